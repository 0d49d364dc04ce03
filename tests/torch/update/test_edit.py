"""Split masters and code that does not know them: exact inside `run.edit()`, refused by name outside."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW, prepare
from halfstep.torch.numerics.split import parameter
from halfstep.torch.state import state_of
from tests.refusals import refuses
from tests.torch.nets import seeded_net

WHOLE, SPLIT = "fp32", "param=fp32:split"


def data(seed=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def prepared(policy=SPLIT, kind=AdamW, **settings):
    model = seeded_net()
    run = prepare(model, kind(model.parameters(), lr=1e-2), policy, **settings)
    step(run)
    return run


def step(run, seed=0):
    return run.step(lambda x: run.model(x).square().mean(), [data(seed)])


def by_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()) * (1 - 1e-4), model.parameters())


def by_data(model):
    for p in model.parameters():
        p.data = p.data * (1 - 1e-4)


def in_place_by_data(model):
    for p in model.parameters():
        p.data[0].mul_(1 - 1e-4)


def by_state_dict(model):
    for value in model.state_dict().values():
        value.mul_(1 - 1e-4)


WRITES = {
    "mul_": lambda model: model[0].weight.mul_(1 - 1e-4),
    "copy_": lambda model: model[0].weight.copy_(torch.linspace(-1, 1, 64).view(8, 8)),
    "init": lambda model: nn.init.uniform_(model[0].weight, 0.1, 0.2, generator=torch.Generator().manual_seed(1)),
    "indexed": lambda model: model[2].weight[1:3].fill_(0.3),
    "vector": by_vector,
    "data": by_data,
    "data in place": in_place_by_data,
    "state dict": by_state_dict,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_exact_inside_edit_and_refused_by_name_outside(write):
    found = []
    for policy in (WHOLE, SPLIT):
        run = prepared(policy)
        with run.edit(), torch.no_grad():
            assert {p.dtype for p in run.model.parameters()} == {torch.float32}
            write(run.model)
        step(run, 1)
        found.append(run.weights())
    assert all(torch.equal(w, found[1][name]) for name, w in found[0].items())
    with torch.no_grad():
        write(run.model)
    for use in (step, state_of, lambda run: run.weights(), lambda run: run.model.state_dict()):
        if write is by_vector and use is not step:
            continue  # it left fp32 data, which a state dict may have
        with refuses(HalfstepError, r"`[02].weight` (of a state dict )?was written to", "with run.edit():"):
            use(run)
    with run.edit():
        pass
    step(run)


def test_reading_is_not_a_write():
    run = prepared()
    kept = [run.model[0].weight.data, run.model.state_dict()]
    with torch.inference_mode():
        kept += [run.model[0].weight.data, run.model.state_dict(), run.weights()]
    for _ in range(2):
        assert run.model[0].weight.data.norm() > 0
        step(run)
    kept[0].mul_(0.9)  # by a tensor that was taken long before
    with refuses(HalfstepError, "`0.weight` was written to", "run.edit()"):
        step(run)


def test_what_was_written_outside_is_taken_as_it_is_by_an_empty_edit_and_replaced_by_loading():
    run = prepared()
    before = run.weights()
    saved = {name: t.clone() for name, t in state_of(run).items()}
    state = {**run.state_dict(), "tensors": saved}
    with torch.no_grad():
        run.model[2].weight.fill_(1.0)
    with run.edit():
        assert (run.model[2].weight == 1.0).all()
    assert (run.weights()["2.weight"] == 1.0).all()
    with torch.no_grad():
        run.model[0].weight.zero_()
    run.load_state_dict(state)
    assert torch.equal(run.model.state_dict()["0.weight"], before["0.weight"])
    own = run.model.state_dict()
    own["2.weight"].mul_(0.3)
    run.model.load_state_dict(own)  # a write to the tensors of a state dict that is loaded is not lost
    step(run)


def test_averages_of_others_are_those_of_whole_masters_inside_edit_and_refused_outside():
    found = []
    for policy in (WHOLE, SPLIT):
        run = prepared(policy, ema=0.9)
        with run.edit():
            averaged = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            by_hand = copy.deepcopy(run.model)
        for seed in range(3):
            step(run, seed)
            with run.edit(), torch.no_grad():
                averaged.update_parameters(run.model)
                for mine, p in zip(by_hand.parameters(), run.model.parameters(), strict=True):
                    mine.lerp_(p, 0.1)
            for mine, now in zip(by_hand.state_dict().values(), run.model.state_dict().values(), strict=True):
                mine.copy_(0.9 * mine + 0.1 * now)  # as some libraries do: their copy's state dict is its own
        found.append({**averaged.state_dict(), **by_hand.state_dict(), **run.ema, "out": by_hand(data())})
    assert found[1]["module.0.weight"].dtype == torch.float32
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    for copied in (lambda: AveragedModel(run.model), lambda: copy.deepcopy(run.model[0])):
        with refuses(HalfstepError, "bf16 half of a split master", "run.ema", "run.edit()", "copy.deepcopy(run)"):
            copied()


def test_inside_edit_the_run_rests_and_an_error_keeps_what_was_written():
    run = prepared(ema=0.9)
    with run.edit():
        for use in (
            step,
            lambda run: run.state_dict(),
            lambda run: run.edit().__enter__(),
            lambda run: run.update(),
        ):
            with refuses(HalfstepError, "whole masters, inside run.edit()", "leave"):
                use(run)
        assert torch.equal(run.weights()["0.weight"], run.model[0].weight)
        run.model(data()).sum().backward()  # the gradient is the parameter's own here
    run.forget()
    with pytest.raises(ZeroDivisionError), run.edit(), torch.no_grad():
        run.model[0].weight.fill_(1 / len(run.model[0].weight.fill_(0.3)[:0]))
    assert torch.equal(run.weights()["0.weight"], torch.full((8, 8), 0.3))
    with (
        refuses(HalfstepError, r"`0.weight` was resized, cast or moved inside run.edit\(\)", "unprepare"),
        run.edit(),
    ):
        run.model.half()
    assert torch.equal(run.weights()["0.weight"], torch.full((8, 8), 0.3))


@pytest.mark.parametrize("policy", ["bf16-true", "bf16-true,param=bf16:stochastic", "bf16-mixed,emulate=true"])
def test_edit_holds_for_masters_of_every_kind(policy):
    run = prepared(policy)
    before = run.weights()
    with run.edit(), torch.no_grad():
        assert {p.dtype for p in run.model.parameters()} == {torch.float32}
        run.model[2].weight.fill_(0.5)
    assert torch.equal(run.weights()["0.weight"], before["0.weight"])
    assert (run.weights()["2.weight"] == 0.5).all()
    step(run)


def test_a_capturable_step_keeps_remainders():
    """Hazard: undoing a step on the device counts as somebody's write, and the remainder would be dropped."""

    class Capturable(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr, momentum=0.9)
            self.param_groups[0]["capturable"] = True

    Capturable.__module__ = "torch.optim.imagined"
    found = []
    for policy in (WHOLE, SPLIT):
        run = prepared(policy, Capturable)
        for seed in range(3):
            step(run, seed)
        assert "undone" in run.summary()
        found.append(run.weights())
    assert all(torch.equal(w, found[1][name]) for name, w in found[0].items())


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


CHANGES = {
    "parametrized": lambda m: register_parametrization(m[0], "weight", Doubled()),
    "pruned": lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_dict_without_the_whole_master_is_refused(change):
    run = prepared()
    change(run.model)
    with refuses(HalfstepError, "`0.weight`, half of a split master, is not a parameter", "before prepare()"):
        run.model.state_dict()


def test_a_term_of_the_loss_that_uses_a_half_directly_is_refused_by_name():
    """Hazard: a penalty on weights, whose value and gradient would be those of bf16 numbers."""
    run = prepared()
    weight = run.model[0].weight
    with refuses(HalfstepError, "the loss uses `0.weight` outside of its layer", "`0: param=fp32`"):
        run.step(lambda x: run.model(x).square().mean() + weight.float().square().sum(), [data()])
    step(run)
    run.unprepare()
    weight.square().sum().backward()  # a parameter like any other again


COPIES = {
    "clone": lambda p: p.clone(),
    "clone, detached": lambda p: p.clone().detach(),  # as torch_ema and diffusers do
    "detached, clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(memory_format=torch.contiguous_format),
    "deepcopy": copy.deepcopy,
    "deepcopy of data": lambda p: copy.deepcopy(p.data),
    "deepcopy of detached": lambda p: copy.deepcopy(p.detach()),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_parameter_is_the_whole_master_inside_edit_and_refused_by_name_outside(copied):
    """Hazard: averages of others, made from `[p.clone() for p in model.parameters()]`, would be bf16."""
    run = prepared()
    with refuses(HalfstepError, "`0.weight` is the bf16 half of a split master", "with run.edit():", "run.ema"):
        [copied(p) for p in run.model.parameters()]
    masters = run.weights()
    with run.edit():
        found = {name: copied(p) for name, p in run.model.named_parameters()}
    assert all(torch.equal(w, found[name]) for name, w in masters.items())
    assert type(found["0.weight"]) in (torch.Tensor, nn.Parameter)
    step(run)
    assert copied(run.unprepare()[0].weight).dtype == torch.float32


def test_a_half_is_read_as_any_tensor_and_its_numbers_are_not_pickled():
    run = prepared()
    weight, half = run.model[0].weight, run.weights()["0.weight"].bfloat16()
    for numbers in (weight.data, weight.detach()):
        assert torch.equal(numbers, half)
        assert type(numbers + 0) is type(numbers[0]) is type(numbers.float()) is torch.Tensor
        with refuses(HalfstepError, "`0.weight` is the bf16 half", "run.edit()"):
            torch.save(numbers, io.BytesIO())
    read = torch.compile(lambda: weight.detach().clone().sum(), backend="aot_eager", fullgraph=True)
    assert read().isfinite()
    assert state_of(run)["model.0.weight"].clone().dtype == torch.bfloat16  # beside its remainder


def moved_by_data(model):
    for p in model.parameters():
        p.data = torch.empty_like(p.data).copy_(p.data)


def moved_by_apply(model):
    model._apply(lambda t: t.detach() + 0)


def laid_out_otherwise(model):
    model[0].weight.data = torch.empty_like(model[0].weight.data.t()).copy_(model[0].weight.data.t()).t()


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW], ids=["ours", "stock"])
@pytest.mark.parametrize("move", [moved_by_data, moved_by_apply, laid_out_otherwise])
def test_the_same_numbers_on_another_device_are_a_move_that_loses_nothing(move, kind, monkeypatch):
    """Hazard: `model.cpu(); model.cuda()` was taken for a write, and its remedy dropped the remainders."""
    monkeypatch.setattr(parameter, "_elsewhere", lambda *_: True)  # tests/torch/test_gpu.py has two devices
    found = []
    for moves in (False, True):
        run = prepared(kind=kind)
        for seed in range(2):
            if moves:
                move(run.model)
            run.backward(run.model(data(seed)).square().mean())
            if moves:
                move(run.model)
            run.update()
        found.append({**run.weights(), **run.model.state_dict(prefix="state.")})
    assert all(torch.equal(w, found[1][name]) for name, w in found[0].items())
    with torch.no_grad():
        run.model[0].weight.mul_(0.5)
    move(run.model)  # hides no write that came before it
    with refuses(HalfstepError, "`0.weight` was written to", "run.edit()"):
        step(run)


def test_a_model_on_another_device_than_its_run_is_refused_with_the_way_back():
    for policy in (WHOLE, SPLIT):
        run = prepared(policy)
        run.backward(run.model(data()).mean())
        run.device = torch.device("meta")  # as if it had been prepared there
        run.scale_state = run.scale_state._replace(scale=run.scale_state.scale.to("meta"))
        for use in (step, lambda run: run.backward(run.model(data()).mean()), lambda run: run.update()):
            with refuses(HalfstepError, "the model is on cpu, and .* on meta", 'model.to("meta")', "unprepare"):
                use(run)


def test_the_run_opens_masters_without_handing_anything_out():
    """Watching `p.data` costs 23 us for each parameter, in every step of a stock optimizer."""
    run = prepared(kind=torch.optim.SGD)
    with run.edit():
        pass
    step(run)
    assert type(run.model[0].weight.halfstep_split.noted) is tuple


def test_a_gradient_for_a_half_by_hand_is_exact_inside_edit_and_refused_by_torch_outside():
    grads = []
    for policy in (WHOLE, SPLIT):
        run = prepared(policy)
        with run.edit():
            grads.append(torch.autograd.grad(run.model(data()).square().mean(), run.model.parameters()))
    assert all(map(torch.equal, *grads))
    loss = run.model(data()).square().mean()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, run.model.parameters(), retain_graph=True)
    assert torch.autograd.grad(loss, run.model[0].bias, retain_graph=True)[0].dtype == torch.float32
    run.backward(loss)
    run.update()


def test_whole_masters_do_not_share_memory_which_savers_take_for_tied_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed,param=fp32:split")
    with run.edit():
        assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 4
