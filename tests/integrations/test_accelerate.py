"""Accelerate's own loop under a policy: the same updates as `Run.step`; its checkpoints; skips; refusals."""

import copy
import gc
import math
import weakref

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.integrations import state
from halfstep.integrations.accelerate import Accelerator, run_of
from halfstep.torch import AdamW, prepare
from halfstep.torch.update.switches import fp32_is_fp32
from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401
from tests.refusals import refuses
from tests.torch.nets import same_by_name

SPLIT = "bf16-mixed,param=fp32:split"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(F.dropout(self.norm(self.embed(tokens)), 0.1, self.training))


TOKENS = torch.randint(0, 11, (48, 2, 6), generator=torch.Generator().manual_seed(1))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, 0]).flatten(0, 1), batch[:, 1].flatten())


def make(policy, *, steps=1, kind=torch.optim.AdamW, **options):
    """An Accelerator and what it prepared; without a policy, stock Accelerate's."""
    given = {"cpu": True, "gradient_accumulation_steps": steps, **options}
    accelerator = accelerate.Accelerator(**given) if policy is None else Accelerator(policy=policy, **given)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)
    loader, scheduler = DataLoader(TOKENS, batch_size=8), torch.optim.lr_scheduler.LinearLR(optimizer)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator, model, optimizer, loader, scheduler, clip=1.0, batches=None):
    """Accelerate's documented loop."""
    losses = []
    for batch in loader if batches is None else batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def weights(run):
    return {name: value.clone() for name, value in run.weights().items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW])
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", SPLIT, "fp16-mixed"])
def test_a_loop_of_accelerate_makes_the_updates_of_a_run(policy, kind):
    parts = make(policy, steps=2, kind=kind)
    parts[1].eval()  # a DataLoader draws from the generator that dropout draws from
    train(*parts)
    model = Net().eval()
    optimizer = kind(model.parameters(), lr=0.01)
    run, scheduler = prepare(model, optimizer, policy, clip_norm=1.0), torch.optim.lr_scheduler.LinearLR(optimizer)
    for first in range(0, 48, 16):
        result = run.step(
            lambda batch: loss_of(model, batch), [TOKENS[first : first + 8], TOKENS[first + 8 : first + 16]]
        )
        run.scheduler_step(scheduler)
    assert parts[0].run.policy == run.policy
    assert int(parts[0].run.num_applied) == int(run.num_applied) > 0
    assert same_by_name(weights(parts[0].run), weights(run))
    assert torch.equal(parts[0].result.grad_norm, result.grad_norm)


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_losses_stay_within_the_format_of_those_of_stock_accelerate_in_fp32(policy):
    torch.manual_seed(5)
    expected = train(*make(None))
    reset()
    torch.manual_seed(5)
    given = train(*make(policy))
    bits = 8 if policy == "bf16-mixed" else 11
    assert given[0] == pytest.approx(expected[0], rel=2.0**-bits * 4)
    if policy == "bf16-mixed":  # in fp16 updates are skipped
        assert given == pytest.approx(expected, rel=2.0**-bits * 8)


def test_a_shorter_last_group_is_divided_as_accelerate_divides_it():
    """Accelerate divides by gradient_accumulation_steps, however many micro-batches there were."""
    found = []
    for policy in ("fp32", None):
        reset()
        accelerator, model, optimizer, loader, scheduler = make(policy, steps=4, kind=torch.optim.SGD)
        model.eval()
        train(accelerator, model, optimizer, loader, scheduler, clip=0.0)  # groups of four and of two
        found.append(copy.deepcopy(model.state_dict()))
    assert all(torch.allclose(w, found[1][name], rtol=2**-20, atol=2**-24) for name, w in found[0].items())


@pytest.mark.parametrize("policy", ["bf16-mixed", SPLIT + ",moments=bf16", "fp16-mixed"])
def test_a_run_is_saved_and_resumed_bit_for_bit_by_accelerate_itself(policy, tmp_path):
    accelerator, *parts = make(policy, ema=0.9)
    train(accelerator, *parts)
    accelerator.save_state(str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names >= {state.NAME, "scheduler.bin"}
    assert not any("optimizer" in name for name in names)
    losses = train(accelerator, *parts)
    after, rate = weights(accelerator.run), parts[3].get_last_lr()

    reset()
    torch.manual_seed(99)
    other, *again = make(policy, ema=0.9)
    other.load_state(str(tmp_path / "saved"))
    assert train(other, *again) == losses
    assert same_by_name(weights(other.run), after)
    assert same_by_name(other.run.ema, accelerator.run.ema)
    assert again[3].get_last_lr() == rate


@pytest.mark.parametrize("policy", [SPLIT, "fp16-mixed"])
def test_frozen_weights_come_back_from_accelerates_own_file(policy, tmp_path):
    def prepared(seed):
        reset()
        accelerator, model = Accelerator(policy=policy, cpu=True), Net()
        torch.manual_seed(seed)
        nn.init.normal_(model.embed.weight.requires_grad_(False))
        trained = [p for p in model.parameters() if p.requires_grad]
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))

    def step(accelerator, model, optimizer):
        accelerator.backward(loss_of(model, TOKENS[:8]))
        optimizer.step()
        return float(accelerator.result.loss)

    parts = prepared(1)
    step(*parts)
    parts[0].save_state(str(tmp_path))
    losses = [step(*parts), step(*parts)]
    again = prepared(2)
    again[0].load_state(str(tmp_path))
    assert [step(*again), step(*again)] == losses
    assert same_by_name(weights(again[0].run), weights(parts[0].run))


@pytest.mark.parametrize("policy", [SPLIT, "bf16-mixed"])
def test_a_folder_that_accelerate_saved_without_a_policy_is_taken_over(policy, tmp_path, log):
    accelerator, model, optimizer, loader, scheduler = make(None)
    train(accelerator, model, optimizer, loader, scheduler)
    accelerator.save_state(str(tmp_path))
    reset()
    torch.manual_seed(3)
    ours, again, *parts = make(policy, ema=0.9)
    nn.init.normal_(again.norm.weight)
    ours.load_state(str(tmp_path))
    assert "was saved without a policy" in log.getvalue()
    assert "5 parameters after 6 updates" in log.getvalue()
    wanted = dict(model.named_parameters())
    assert same_by_name(weights(ours.run), wanted)
    assert same_by_name(ours.run.ema, wanted)
    for name, p in again.named_parameters():
        held, moments = optimizer.state[wanted[name]], parts[0].state[p]
        assert all(torch.equal(held[key], moments[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert parts[-1].get_last_lr() == scheduler.get_last_lr()
    train(ours, again, *parts)
    assert int(ours.run.num_applied) == 12


def test_weights_beside_our_file_are_the_fp32_masters(tmp_path):
    from safetensors.torch import load_file

    accelerator, *parts = make(SPLIT)
    train(accelerator, *parts)
    accelerator.save_state(str(tmp_path))
    assert same_by_name(load_file(tmp_path / "model.safetensors"), weights(accelerator.run))


def test_a_state_of_another_policy_is_refused_and_nothing_is_loaded(tmp_path):
    accelerator, *_ = make("bf16-mixed")
    accelerator.save_state(str(tmp_path))
    reset()
    other, *parts = make("fp16-mixed")
    train(other, *parts)
    before = weights(other.run)
    with refuses(HalfstepError, "the policy"):
        other.load_state(str(tmp_path))
    assert same_by_name(before, weights(other.run))


def test_skips_are_seen_by_accelerate_and_its_scheduler():
    accelerator, model, optimizer, loader, scheduler = make(
        "fp16-mixed,scale=dynamic:init=1152921504606846976:ceiling=1152921504606846976"
    )
    batch = next(iter(loader))
    rate = scheduler.get_last_lr()
    train(accelerator, model, optimizer, loader, scheduler, batches=[batch])
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == rate
    assert int(accelerator.run.num_applied) == 0
    while accelerator.optimizer_step_was_skipped:
        train(accelerator, model, optimizer, loader, scheduler, batches=[batch])
    assert scheduler.get_last_lr() != rate
    assert int(accelerator.run.num_applied) == 1
    assert "skipped updates: known exactly" in accelerator.summary()


def test_a_run_that_no_scale_can_save_is_stopped():
    accelerator, model, optimizer, loader, scheduler = make("fp16-mixed,scale=dynamic:init=1:floor=1")
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    with refuses(ScalingError, "at its floor"):
        for _ in range(20):
            train(accelerator, model, optimizer, loader, scheduler, clip=0, batches=[TOKENS[:8]])


def test_a_skip_under_bf16_is_the_last_flag_that_is_known():
    accelerator, model, optimizer, loader, scheduler = make("bf16-mixed")
    train(accelerator, model, optimizer, loader, scheduler, batches=[TOKENS[:8]])
    assert not accelerator.optimizer_step_was_skipped
    accelerator.backward(loss_of(model, TOKENS[:8]) * math.inf)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped  # a CPU need not be waited for


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed,scale=static:value=64"])
@pytest.mark.parametrize("how", ["part", "other norm", "value", "inf"])
def test_other_ways_to_clip_are_those_of_accelerate(policy, how):
    accelerator, model, optimizer, *_ = make(policy)
    model.eval()
    accelerator.backward(loss_of(model, TOKENS[:8]))
    if how == "part":
        norm = accelerator.clip_grad_norm_(model.head.parameters(), 1e-3)
        held = [p.grad for p in model.head.parameters()]
        assert float(torch.nn.utils.get_total_norm(held)) == pytest.approx(1e-3, rel=1e-2)
    elif how == "other norm":
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type=math.inf)
        assert max(float(p.grad.abs().max()) for p in model.parameters()) == pytest.approx(1e-3, rel=1e-2)
    elif how == "value":
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        norm = max(float(p.grad.abs().max()) for p in model.parameters())
        assert norm == pytest.approx(1e-3)
    else:
        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
    optimizer.step()
    assert float(norm) > 0
    assert int(accelerator.run.num_applied) == 1
    if how == "inf":
        assert float(accelerator.result.grad_norm) == pytest.approx(float(norm), rel=2**-20)


def test_the_norm_that_is_returned_is_that_before_clipping_and_clips_one_update_only():
    accelerator, model, optimizer, *_ = make(
        "bf16-mixed", kind=lambda p, lr: torch.optim.SGD(p, lr=3.0)
    )  # a third, at first
    model.eval()
    for clip in (1e-2, None):
        before = weights(accelerator.run)
        accelerator.backward(loss_of(model, TOKENS[:8]))
        if clip:
            norm = accelerator.clip_grad_norm_(model.parameters(), clip)
            assert float(norm) > 0.1
        optimizer.step()
        moved = [weights(accelerator.run)[n] - before[n] for n in before]
        size = float(torch.nn.utils.get_total_norm(moved))
        assert size == pytest.approx(clip, rel=1e-3) if clip else size > 0.1


def test_models_and_optimizers_may_come_one_by_one_and_in_any_order():
    accelerator = Accelerator(policy="bf16-mixed", cpu=True)
    model = Net()
    optimizers = [torch.optim.SGD(model.embed.parameters(), lr=0.1), torch.optim.AdamW(model.head.parameters())]
    *optimizers, model = accelerator.prepare(*optimizers, model)
    assert len(accelerator.run.optimizers) == 2
    before = weights(accelerator.run)
    accelerator.backward(loss_of(model, TOKENS[:8]))
    optimizers[0].step()
    optimizers[0].zero_grad()
    assert same_by_name(before, weights(accelerator.run))  # one update, once all were stepped
    with refuses(HalfstepError, "1 of the model's 2 optimizers"):
        accelerator.backward(loss_of(model, TOKENS[:8]))
    optimizers[1].step()
    assert int(accelerator.run.num_applied) == 1

    teacher = accelerator.prepare_model(Net(), evaluation_mode=True)
    assert run_of(teacher).policy == accelerator.run.policy
    assert accelerator.run.model is model


@pytest.mark.prove
def test_a_model_is_freed_and_may_be_prepared_again_with_the_same_or_another_optimizer():
    accelerator, model, optimizer, loader, scheduler = make("bf16-mixed")
    train(accelerator, model, optimizer, loader, scheduler)
    run = accelerator.run
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.run is run
    fresh = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert accelerator.run is not run
    assert run_of(model) is accelerator.run
    accelerator.backward(loss_of(model, TOKENS[:8]))
    fresh.step()
    assert int(accelerator.run.num_applied) == 1
    with refuses(HalfstepError, "its run has ended"):
        optimizer.step()
    alive = weakref.ref(model)
    accelerator.free_memory()
    del model, optimizer, scheduler, run, fresh
    gc.collect()
    assert alive() is None


def test_a_copy_of_a_model_has_no_run():
    accelerator, model, *_ = make("bf16-mixed")
    assert run_of(copy.deepcopy(model)) is None
    assert run_of(model) is accelerator.run


def test_evaluation_follows_the_policy():
    accelerator, model, *_ = make("bf16-mixed,eval=fp32")
    seen = []
    model.head.register_forward_hook(lambda layer, given, out: seen.append(layer.precision.compute.name))
    with accelerator.evaluation():
        model(TOKENS[:1, 0])
    model(TOKENS[:1, 0])
    assert seen == ["fp32", "bf16"]


def test_a_second_opinion_on_precision_is_refused(monkeypatch):
    with refuses(HalfstepError, 'mixed_precision="bf16" beside policy=', "drop mixed_precision"):
        Accelerator(policy="bf16-mixed", mixed_precision="bf16", cpu=True)
    with refuses(HalfstepError, "GradScalerKwargs would do nothing beside policy=", "omit it"):
        Accelerator(policy="bf16-mixed", kwargs_handlers=[accelerate.utils.GradScalerKwargs()], cpu=True)
    narrow = accelerate.utils.DistributedDataParallelKwargs(
        comm_hook=accelerate.utils.DDPCommunicationHookType.FP16
    )
    with refuses(HalfstepError, "comm_hook=fp16", "the role `reduce`"):
        Accelerator(policy="bf16-mixed", kwargs_handlers=[narrow], cpu=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with refuses(HalfstepError, "launched with mixed_precision fp16", "--mixed_precision no"):
        Accelerator(policy="bf16-mixed", cpu=True)


@pytest.mark.parametrize(
    ("name", "variable", "said"),
    [
        ("deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM", "Megatron"),
    ],
)
def test_sharding_is_refused_before_anything_is_set_up(name, variable, said, monkeypatch):
    with refuses(HalfstepError, said, "drop policy="):
        Accelerator(policy="bf16-mixed", cpu=True, **{name: object()})
    monkeypatch.setenv(variable, "true")
    with refuses(HalfstepError, f"{said}.*launcher", "drop policy="):
        Accelerator(policy="bf16-mixed", cpu=True)
    assert AcceleratorState._shared_state == {}


def test_what_would_bypass_the_policy_is_refused():
    accelerator, model, optimizer, *_ = make("bf16-mixed", steps=2)
    with refuses(HalfstepError, "closure"):
        optimizer.step(lambda: None)
    with refuses(HalfstepError, "retain_graph"):
        accelerator.backward(loss_of(model, TOKENS[:8]), retain_graph=True)
    with refuses(HalfstepError, "holds parameters of no model", "prepare"):
        accelerator.prepare(torch.optim.SGD(Net().parameters()))
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, TOKENS[:8]))
        with refuses(HalfstepError, "before all micro-batches", "sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with refuses(HalfstepError, "max_norm=0"), accelerator.accumulate(model):
        accelerator.clip_grad_norm_(model.parameters(), 0)
    other = Net()
    with refuses(HalfstepError, "two models would be trained", "ModuleDict"):
        accelerator.prepare(other, torch.optim.SGD(other.parameters()))

    class Lomo(torch.optim.SGD):
        pass

    with refuses(HalfstepError, "inside of the backward pass"):
        accelerator.prepare(Lomo(model.parameters()))


def test_compiling_in_fp32_does_not_allow_tf32(monkeypatch):
    def allows(self, *_, **__):
        torch.set_float32_matmul_precision("high")  # as Accelerate does on a GPU
        raise InterruptedError

    monkeypatch.setattr(accelerate.Accelerator, "__init__", allows)
    with pytest.raises(InterruptedError):
        Accelerator(policy="fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    # TrainingArguments that compile allow it by torch's newer setting, after which the older one cannot be read.
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(InterruptedError):
            Accelerator(policy="bf16-mixed")
        assert not fp32_is_fp32()
    finally:
        torch.set_float32_matmul_precision("highest")
