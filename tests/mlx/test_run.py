"""One update: micro-batches, the order of unscale and clip, skipped steps, masters, the compiled step."""

from dataclasses import replace

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx import nn

from halfstep.core.errors import HalfstepError, PolicyError
from halfstep.core.formats import BF16
from halfstep.core.philox import tensor_id
from halfstep.core.rounding import cast
from halfstep.mlx import prepare
from halfstep.mlx.numerics.cast import join, random_bits
from halfstep.mlx.optim.optimizers import AdamW, Muon
from tests.refusals import refuses

FP16 = "compute=fp16,emulate=true,scale=dynamic:init=1024:interval=3:floor=256"
# Two fp32 sums of the same terms in another order: at most 36 positive terms, and a few products around them.
SUMMED = 2 * 48 * 2.0**-24


class Recorder(AdamW):
    """Keeps the gradients it was handed."""

    def apply_gradients(self, gradients, parameters):
        self.seen, self.given = gradients, parameters
        self.made = super().apply_gradients(gradients, parameters)
        return self.made


def draw(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def linear(seed=0, dtype=mx.float32):
    model = nn.Linear(4, 3, bias=False)
    model.weight = draw(3, 4, seed=seed).astype(dtype)
    return model


def run(policy="fp32", clip_norm=0.0, model=None, optimizer=None, **options):
    return prepare(model or linear(), optimizer or Recorder(0.1), policy, clip_norm=clip_norm, **options)


def data(rows, seed=1):
    return draw(rows, 4, seed=seed)


def squares(model, x):
    return mx.square(model(x)).sum(), float(len(x))


def seen(r):
    return r.optimizer.seen["weight"]


def test_a_mean_loss_counts_each_micro_batch_alike():
    r, x = run(), data(12)
    expected = sum(mx.square(r.model(b)).mean().item() for b in (x[:2], x[2:])) / 2
    result = r.step(lambda model, b: mx.square(model(b)).mean(), [x[:2], x[2:]])
    assert all(isinstance(value, mx.array | None) for value in vars(result).values())  # until they are read
    assert result.loss.item() == pytest.approx(expected, rel=SUMMED)


def test_gradients_carry_their_scale_past_an_update_in_between():
    r, plain = run(FP16), run("compute=fp16,scale=static:value=1,emulate=true")
    for each in (r, plain):
        differentiate = each.value_and_grad(squares)
        early = differentiate(data(4))[1]
        for _ in range(3):
            each.update(differentiate(data(4))[1])  # the third one doubles the scale of r
        each.update([differentiate(data(2, seed=7))[1], early])
    assert r.scale_state.scale.item() == 2048
    assert mx.array_equal(seen(r), seen(plain))


POLICIES = ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true,moments=bf16", FP16]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_but_the_scale(policy, bad):
    r = run(policy, optimizer=AdamW(lambda step: 0.1 / (1 + step)))
    r.step(squares, [data(4)])
    before = r.state_dict()
    result = r.step(lambda model, x: mx.square(model(x)).sum() * bad, [data(4)])
    assert result.skipped.item()
    after = r.state_dict()
    same = {name for name in before if mx.array_equal(before[name], after[name])}
    # the scale, and how many good steps it has seen
    assert before.keys() - same <= {"scale.scale", "scale.good_steps"}
    assert ("scale.scale" in same) == (policy != FP16)
    assert not r.step(squares, [data(4)]).skipped.item()
    assert r.num_applied.item() == 2
    assert not mx.array_equal(r.state_dict()["model.weight"], before["model.weight"])


def test_the_graph_does_not_grow_from_step_to_step():
    """Nothing is read, and batches of 64 KiB are not kept for a graph that nobody evaluated."""
    r = run("bf16-mixed")

    def held(steps):
        for step in range(steps):
            r.step(squares, [data(4096, seed=step)])
        mx.synchronize()
        return mx.get_active_memory()

    first = held(3)
    assert held(20) <= first + 2 * 65536


def test_an_update_without_gradients_or_their_scale_is_refused():
    with pytest.raises(HalfstepError, match="no gradients"):
        run().update()
    with pytest.raises(HalfstepError, match="which scale they carry"):
        run().update({"weight": mx.zeros((3, 4))})


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed,param=fp32:split", FP16])
def test_gradients_by_hand_are_true_after_unscale_and_the_update_knows(policy):
    one, two = run(policy), run(policy)
    batches = [data(4), data(2, seed=3)]
    first = one.step(squares, batches)
    grads = two.unscale([two.value_and_grad(squares)(batch)[1] for batch in batches])
    assert mx.array_equal(grads.arrays["weight"], seen(one))
    assert two.unscale(grads) is grads  # once
    second = two.update(grads)
    assert mx.array_equal(seen(one), seen(two))
    for name in ("loss", "skipped", "scale", "grad_norm", "stuck"):
        assert getattr(second, name).item() == pytest.approx(getattr(first, name).item(), rel=SUMMED), name
    for each in (1e-3, 2e-3):
        grads = two.unscale(two.value_and_grad(squares)(data(4))[1])
        clipped = {name: mx.clip(g, -each, each) for name, g in grads.arrays.items()}
        two.update(replace(grads, arrays=clipped))
        assert mx.array_equal(seen(two), clipped["weight"])
    with refuses(HalfstepError, "some of the gradients have been unscaled", "run.unscale()"):
        two.update([grads, two.value_and_grad(squares)(data(4))[1]])


@pytest.mark.prove
def test_a_compiled_update_takes_unscaled_gradients():
    found = []
    for unscaled in (False, True):
        r = run(FP16, optimizer=AdamW(0.1), compile=True)
        for _ in range(2):
            grads = r.value_and_grad(squares)(data(4))[1]
            r.update(r.unscale(grads) if unscaled else grads)
        found.append({name: value for name, value in r.state_dict().items() if not name.startswith("rng.")})
    assert all(mx.allclose(value, found[1][name]).item() for name, value in found[0].items())


def test_a_step_that_was_not_finite_before_unscale_is_skipped():
    r = run(FP16)
    grads = r.unscale(r.value_and_grad(lambda model, x: mx.square(model(x)).sum() * float("inf"))(data(4))[1])
    result = r.update(replace(grads, arrays={name: mx.zeros_like(g) for name, g in grads.arrays.items()}))
    assert result.skipped.item()
    assert (result.scale.item(), r.scale_state.scale.item()) == (1024, 512)


def test_gradients_do_not_leak_into_the_next_step():
    r, fresh = run(), run()
    r.update(r.value_and_grad(squares)(data(4))[1])
    r.model.weight = fresh.model.weight
    for each in (r, fresh):
        each.step(squares, [data(4, seed=5)])
    assert mx.array_equal(seen(r), seen(fresh))


def test_the_two_verbs_are_the_step():
    one, two, three = run("bf16-mixed"), run("bf16-mixed"), run("bf16-mixed")
    batches = [data(4), data(2, seed=3)]
    result = one.step(squares, batches)
    handed = [two.value_and_grad(squares)(batch) for batch in batches]
    also = two.update([grads for _, grads in handed])
    for batch in batches:
        three.accumulate(three.value_and_grad(squares)(batch)[1])
    three.update()
    mean = (4 * handed[0][0].item() + 2 * handed[1][0].item()) / 6
    assert result.loss.item() == also.loss.item() == pytest.approx(mean, rel=SUMMED)
    assert mx.array_equal(seen(one), seen(two))
    assert mx.array_equal(seen(one), seen(three))


def test_a_loss_that_is_too_narrow_is_refused():
    r = run("bf16-mixed")
    with pytest.raises(PolicyError, match="loss=fp32"):
        r.step(lambda model, x: model(x).astype(mx.bfloat16).mean(), [data(4)])
    assert r.model.weight.dtype == mx.float32  # and what was in the model is there again


def test_a_step_without_any_token_is_skipped():
    r = run()
    before = r.model.weight
    assert r.step(lambda model, x: (model(x).sum() * 0, 0.0), [data(4)]).skipped.item()
    assert mx.array_equal(r.model.weight, before)


def test_a_negative_norm_is_refused():
    with pytest.raises(HalfstepError, match=r"clip_norm=-1\.0"):
        run(clip_norm=-1.0)


def test_the_loop_of_plain_mlx_is_refused_and_not_stepped_without_masters_and_scale():
    r = run("bf16-true", model=mlp())
    _, grads = nn.value_and_grad(r.model, squares)(r.model, data(4))
    before = r.num_applied.item()
    with pytest.raises(HalfstepError, match=r"optimizer\.update") as caught:
        r.optimizer.update(r.model, grads)
    assert "run.update(grads)" in caught.value.hint
    assert r.num_applied.item() == before
    model = r.unprepare()
    r.optimizer.update(model, grads)


def test_a_run_that_is_over_is_over():
    r = run()
    grads = r.value_and_grad(squares)(data(4))[1]
    r.unprepare()
    for call in (lambda: r.step(squares, [data(4)]), lambda: r.update(grads), r.unprepare):
        with pytest.raises(HalfstepError, match="the run is over"):
            call()


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "bf16-true", FP16])
def test_any_optimizer_is_given_fp32_masters_and_gradients(policy):
    r = run(policy, model=linear(dtype=mx.bfloat16))
    r.step(squares, [data(4)])
    assert seen(r).dtype == mx.float32
    assert r.optimizer.given["weight"].dtype == mx.float32


@pytest.mark.parametrize("stochastic", ["", ":stochastic"])
@pytest.mark.parametrize("emulate", ["", ",emulate=true"])
def test_a_bf16_master_is_updated_in_fp32_and_rounded_once(stochastic, emulate):
    r = run(f"bf16-true,param=bf16{stochastic}{emulate}", seed=5)
    for count in (1, 2):
        r.step(squares, [data(4)])
        wide = np.array(r.optimizer.made["weight"])
        bits = np.array(random_bits((3, 4), seed=5, step=count, tensor=tensor_id("weight")))
        how = {"rounding": "stochastic", "bits": bits} if stochastic else {}
        assert r.model.weight.dtype == (mx.float32 if emulate else mx.bfloat16)
        assert np.array_equal(np.array(r.model.weight.astype(mx.float32)), cast(wide, BF16, overflow="inf", **how))
        assert not np.array_equal(wide, cast(wide, BF16, overflow="inf"))


def mlp():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.RMSNorm(8), nn.Linear(8, 3, bias=False))
    first, *_, last = model.layers
    first.weight, first.bias = draw(8, 4) * 0.5, draw(8, seed=7) * 0.1
    last.weight = draw(3, 8, seed=3) * 0.5
    return model


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed,emulate=true"])
def test_a_hundred_steps_with_split_masters_are_those_with_fp32_masters_bit_for_bit(policy):
    """Where the master is used whole, joined, nothing differs at all."""
    whole, split = (run(f"{policy}{held}", model=mlp(), clip_norm=1.0) for held in ("", ",param=fp32:split"))
    for step in range(100):
        results = [r.step(squares, [data(4, seed=step)]) for r in (whole, split)]
    assert results[0].loss.item() == results[1].loss.item()
    for index in (0, 3):
        name = f"layers.{index}.weight"
        hi, lo = split.state_dict()[f"model.{name}"], split.state_dict()[f"remainder.{name}"]
        assert (hi.dtype, lo.dtype) == (mx.bfloat16, mx.int16)
        assert mx.array_equal(join(hi, lo), whole.state_dict()[f"model.{name}"])
    assert split.model.layers[2].weight.dtype == mx.float32  # gains are never split
    assert split.masters.remainders.keys() == {"layers.0.weight", "layers.3.weight"}


def test_split_masters_in_bf16_take_4_bytes_and_matmuls_use_the_half_as_it_is():
    whole, split = (run(f"bf16-mixed{held}", model=linear()) for held in ("", ",param=fp32:split"))
    for step in range(20):
        results = [r.step(squares, [data(4, seed=step)]) for r in (whole, split)]
    # no master of 12 fell on a tie of bf16, on which alone the two differ
    assert results[0].loss.item() == results[1].loss.item()
    assert split.model.weight.nbytes + split.masters.remainders["weight"].nbytes == 4 * 12
    assert mx.array_equal(whole.model.weight, join(split.model.weight, split.masters.remainders["weight"]))
    assert mx.array_equal(split.unprepare().weight, whole.unprepare().weight)
    assert split.model.weight.dtype == mx.float32


def test_moments_are_stored_in_their_format_and_computed_in_fp32():
    narrow, wide = run("fp32,moments=bf16"), run("fp32")
    for r in (narrow, wide):
        r.step(squares, [data(4)])
    assert mx.array_equal(narrow.model.weight, wide.model.weight)  # the first step does not read a rounded moment
    held, exact = (r.optimizer.state["weight"]["v"] for r in (narrow, wide))
    assert held.dtype == mx.bfloat16
    assert mx.array_equal(held, exact.astype(mx.bfloat16))
    before = narrow.optimizer.state["weight"]["m"].astype(mx.float32)
    narrow.step(squares, [data(4)])
    after = narrow.optimizer.state["weight"]["m"]
    # 0.9 times a bf16 array would be rounded to bf16 before the gradient is added
    assert mx.array_equal(after, (0.9 * before + (1 - 0.9) * seen(narrow)).astype(mx.bfloat16))
    assert after.dtype == mx.bfloat16
    assert narrow.optimizer.state["step"].dtype == mx.uint64


def test_rules_give_masters_and_moments_by_name():
    r = run("bf16-mixed; layers.0: param=bf16,moments=bf16", model=mlp())
    r.step(squares, [data(4)])
    dtypes = {name: array.dtype for name, array in r.state_dict().items()}
    assert dtypes["model.layers.0.weight"] == dtypes["optimizer.0.layers.0.bias.m"] == mx.bfloat16
    assert dtypes["model.layers.3.weight"] == dtypes["optimizer.0.layers.3.weight.m"] == mx.float32


def test_many_optimizers_make_one_update():
    optimizer = mlx.optimizers.MultiOptimizer(
        [mlx.optimizers.SGD(0.1, momentum=0.9), AdamW(0.01)], [lambda name, _: name.endswith("3.weight")]
    )
    r = run(FP16, model=mlp(), optimizer=optimizer)
    before = r.state_dict()
    assert r.step(lambda model, x: mx.square(model(x)).sum() * float("inf"), [data(4)]).skipped.item()
    moved = [name for name, array in r.state_dict().items() if not mx.array_equal(array, before[name])]
    assert moved == ["scale.scale"]
    assert r.scale_state.scale.item() == 512  # halved once, however many optimizers there are
    r.step(squares, [data(4)])
    assert "optimizer.0.layers.3.weight.v" in r.state_dict()
    assert "optimizer.1.layers.0.weight.m" in r.state_dict()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = linear(), nn.BatchNorm(3), nn.Dropout(0.5)

    def __call__(self, x):
        return self.drop(self.norm(self.layer(x)))


def test_running_statistics_move_with_a_step_and_stay_with_a_skipped_one():
    r = run(FP16, model=Noisy(), optimizer=AdamW(0.1))
    r.step(squares, [data(4)])
    mean = r.model.norm.running_mean
    assert mx.abs(mean).max().item() > 0
    assert mean.dtype == mx.float32
    assert r.step(squares, [data(4), data(4) * float("nan")]).skipped.item()
    assert mx.array_equal(r.model.norm.running_mean, mean)
    r.step(squares, [data(4, seed=3)])
    assert not mx.array_equal(r.model.norm.running_mean, mean)


@pytest.mark.prove
def test_a_compiled_step_is_the_step_and_compiles_once():
    """Rates, scales and random numbers change; the functions are traced once."""
    traced = []

    def loss(model, x):
        traced.append(1)
        return mx.square(model(x)).sum(), 4.0

    def train(compile):
        mx.random.seed(0)
        policy = "compute=fp16,scale=dynamic:init=1024:interval=2"
        model = nn.Sequential(linear(), nn.Dropout(0.5))
        r = run(policy, model=model, optimizer=mlx.optimizers.SGD(0.01), compile=compile)
        losses = []
        for step in range(5):
            if step == 3:
                r.optimizer.learning_rate = 0.02
            x = data(4) * (float("nan") if step == 2 else 1.0)
            losses.append(r.step(loss, [x]))
        assert [result.skipped.item() for result in losses] == [False, False, True, False, False]
        assert [result.scale.item() for result in losses] == [1024, 1024, 2048, 1024, 1024]
        return r, losses

    eager, left = train(False)
    traced.clear()
    compiled, right = train(True)
    assert len(traced) == 1
    # One compiler may contract a product and a sum that another does not: equal to a few roundings of fp16 inputs.
    for one, two in zip(left, right, strict=True):
        assert one.loss.item() == pytest.approx(two.loss.item(), rel=2.0**-8, nan_ok=True)
    weights = [r.model.layers[0].weight for r in (eager, compiled)]
    assert mx.abs(weights[0] - weights[1]).max().item() <= 2.0**-8


def test_a_step_inside_somebody_elses_compile_is_refused_with_the_way_out():
    """It would be traced once, and its gradients be those of the first weights and the first scale."""
    r, x = run("fp16-mixed"), data(4)
    grads = r.value_and_grad(squares)(x)[1]
    for function in (
        lambda x: r.step(squares, [x]).loss,
        lambda x: r.value_and_grad(squares)(x)[0],
        lambda x: r.update(replace(grads, weights=grads.weights + x.sum())).loss,
    ):
        with refuses(HalfstepError, r"inside mx\.compile, mx\.vmap or mx\.grad", "compile=True"):
            mx.compile(function)(x)


@pytest.mark.prove
def test_a_prepared_model_may_be_compiled_to_be_evaluated():
    r, x = run("bf16-mixed"), data(4)
    evaluate = mx.compile(lambda x: r.model(x), inputs=r.model.state)
    for step in range(3):
        assert np.allclose(evaluate(x), r.model(x), atol=2.0**-8)
        r.step(squares, [data(4, seed=step)])


def everything(compile):
    """Dropout, split masters, Muon, a schedule of rates, a scale that moves, averages and a skipped step."""
    mx.random.seed(0)
    optimizer = Muon(mlx.optimizers.linear_schedule(0.01, 0.1, 4))
    policy = "compute=fp16,param=fp32:split,scale=dynamic:init=1024:interval=2"
    model = nn.Sequential(linear(), nn.Dropout(0.5))
    r, results = run(policy, model=model, optimizer=optimizer, compile=compile, ema=0.5), []
    for step in range(4):
        x = data(4, seed=step) * (float("nan") if step == 1 else 1.0)
        results.append(r.step(squares, [x]))
    return r, results


@pytest.mark.prove
def test_everything_compiles():
    (eager, left), (compiled, right) = everything(False), everything(True)
    assert "the step is compiled" in compiled.summary()
    for name in ("skipped", "scale"):
        assert [getattr(result, name).item() for result in left] == [getattr(r, name).item() for r in right]
    assert [result.skipped.item() for result in right] == [False, True, False, False]
    # A compiler may contract a product and a sum: a few roundings of fp16 in each of four steps.
    for ours, theirs in ((eager.weights(), compiled.weights()), (eager.ema, compiled.ema)):
        assert all(mx.abs(array - theirs[name]).max().item() <= 2.0**-8 for name, array in ours.items())
    saved = compiled.state_dict()
    compiled.step(squares, [data(4)])
    compiled.load_state_dict(saved)
    assert all(mx.array_equal(array, saved[name]) for name, array in compiled.state_dict().items())


def test_averages_follow_the_masters_and_are_saved():
    def prepared():
        return run("bf16-mixed,param=fp32:split", ema=0.75)

    r, x = prepared(), data(4)
    expected = r.masters.wide()["weight"]
    for step in range(3):
        r.step(squares, [data(4, seed=step) * (float("nan") if step == 1 else 1.0)])
        expected = expected + (0.25 if step != 1 else 0.0) * (r.masters.wide()["weight"] - expected)
    assert mx.array_equal(r.ema["weight"], expected)
    before, plain = r.weights()["weight"], r.model(x)
    with r.averaged():
        assert mx.array_equal(r.model.parameters()["weight"], expected)
        assert not mx.array_equal(r.model(x), plain)
        for refused in (r.state_dict, lambda: r.step(squares, [x])):
            with refuses(HalfstepError, r"holds its averages, inside run\.averaged\(\)", "leave"):
                refused()
    assert mx.array_equal(r.weights()["weight"], before)
    assert "averages of the masters in fp32, decay 0.75" in r.summary()
    other = prepared()
    other.load_state_dict(r.state_dict())
    assert mx.array_equal(other.ema["weight"], expected)
    assert run().ema == {}
    with refuses(HalfstepError, "there are no averages", "ema=0.999"), run().averaged():
        pass
    with refuses(HalfstepError, "ema=1: the decay of an average is between 0 and 1", "0.999"):
        run(ema=1)


@pytest.mark.parametrize("held", ["", ",param=fp32:split"])
def test_evaluation_computes_in_the_formats_of_its_role_and_is_over_after(held):
    wide, r = run("fp32", model=mlp()), run(f"bf16-mixed,eval=fp32{held}", model=mlp(), ema=0.5)
    x, before = data(4), r.model(data(4))
    with r.evaluation():
        assert mx.array_equal(r.model(x), wide.model(x))
        with refuses(HalfstepError, r"the formats of `eval`, inside run\.evaluation\(\)", "leave"):
            r.step(squares, [x])
    with r.averaged(), r.evaluation():
        assert mx.array_equal(r.model(x), wide.model(x))  # before the first step
    assert mx.array_equal(r.model(x), before)
    r.step(squares, [x])


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp32"])
def test_a_model_with_split_masters_computes_with_whole_ones_outside_of_a_step_too(policy):
    whole, split = (run(f"{policy}{held}", model=mlp()) for held in ("", ",param=fp32:split"))
    assert mx.array_equal(whole.model(data(4)), split.model(data(4)))
    split.model.layers[0].weight = split.model.layers[0].weight * 2
    split.model(data(4))
    with refuses(HalfstepError, r"`layers\.0\.weight` was written by hand", "load_weights"):
        split.step(squares, [data(4)])


def test_compiling_where_mlx_would_silently_not_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    model = linear()
    with pytest.raises(HalfstepError, match=r"no g\+\+"):
        run(model=model, compile=True)
    assert type(model) is nn.Linear  # refused before anything was changed
    assert not run(model=model).compile  # on a CPU the default is not to
    monkeypatch.undo()
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    with pytest.raises(HalfstepError, match="MLX_DISABLE_COMPILE"):
        run(compile=True)


@pytest.mark.parametrize(("model", "optimizer"), [(print, AdamW()), (linear(), print)])
def test_what_is_not_a_model_or_optimizer_of_mlx_is_refused(model, optimizer):
    with pytest.raises(HalfstepError, match=r"is a `builtin_function_or_method`, not an `mlx\."):
        prepare(model, optimizer, "fp32")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.layers[0].freeze(),
        lambda model: model.layers[0].__setitem__("extra", mx.ones(3)),
        lambda model: model.layers.__setitem__(0, nn.Linear(4, 8)),
        lambda model: model.set_dtype(mx.bfloat16),
    ],
    ids=["frozen", "added", "replaced", "cast"],
)
def test_a_model_that_changed_since_is_refused(change):
    r = run("bf16-mixed", model=mlp())
    change(r.model)
    with pytest.raises(HalfstepError, match=r"changed since .*`layers\.0"):
        r.step(squares, [data(4)])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda m, x: (m(x).sum(), "a"), "number of tokens"),
        (lambda m, x: (m(x).sum(), -1), "weight=-1: it is a number of tokens"),
    ],
)
def test_what_is_not_a_loss_is_refused(loss, said):
    run = prepare(nn.Linear(2, 2), mlx.optimizers.SGD(learning_rate=0.1), "bf16-mixed")
    with pytest.raises(HalfstepError, match=said):
        run.step(loss, [mx.ones((3, 2))])


def test_half_a_sum_of_a_step_that_failed_is_no_part_of_the_next():
    found = []
    for fails in (False, True):
        run = prepare(nn.Linear(2, 2), mlx.optimizers.SGD(learning_rate=0.1), "fp32")
        run.model.weight = mx.ones((2, 2))
        if fails:
            with pytest.raises(ZeroDivisionError):
                run.step(lambda m, x: m(x).sum() * (1 // (x.size == 6)), [mx.ones((3, 2)), mx.ones((4, 2))])
        run.step(lambda m, x: m(x).sum(), [mx.ones((3, 2))])
        found.append(run.weights()["weight"].tolist())
    assert found[0] == found[1]


def test_a_policy_is_a_policy_or_its_text():
    with pytest.raises(PolicyError, match="unknown preset `3`"):
        prepare(nn.Linear(2, 2), mlx.optimizers.SGD(learning_rate=0.1), 3)
