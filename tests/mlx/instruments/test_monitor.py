"""The monitor of a run: the same bits as without it, and numbers that the reference in core has too."""

import shutil

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest
from mlx import nn

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import parse
from halfstep.core.observed import COLUMNS, ROLES, Observation
from halfstep.core.policy import Policy
from halfstep.mlx import prepare
from halfstep.mlx.optim.optimizers import AdamW
from halfstep.mlx.session import Session
from tests.columns import row_of
from tests.refusals import refuses
from tests.token_batches import batch

SMALL = ["model.context=16", "model.layers=2", "model.width=16", "model.heads=2", "training.batch=4"]
SMALL += ["training.micro_batches=2", "training.compile=false", "optimizer.name=adamw"]
FP16 = "compute=fp16,emulate=true,scale=dynamic:init=1024:interval=2:floor=1"


class Model(nn.Module):
    """Layers of each kind; `shared` is used twice, and the embedding is the head too."""

    def __init__(self, drops=0.0, again=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.RMSNorm(8)
        self.shared = nn.Linear(8, 8, bias=False)
        self.drop = nn.Dropout(drops)
        self.again = again

    def __call__(self, tokens):
        block = nn.utils.checkpoint(self.shared) if self.again else self.shared
        x = self.embed(tokens)
        for _ in range(2):
            x = x + self.drop(mx.tanh(block(self.norm(x))))
        return self.embed.as_linear(x)


def loss_fn(model, tokens):
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def tokens(rows=4, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 11, (rows, 6)))


def prepared(policy="bf16-mixed", drops=0.0, again=False, **options):
    mx.random.seed(3)
    return prepare(Model(drops, again), AdamW(1e-2), policy, **options)


def trained(run, steps=3):
    return [run.step(loss_fn, [tokens(seed=i), tokens(seed=i + 9)]).loss.item() for i in range(steps)]


def state(run):
    return {name: np.array(array.astype(mx.float32)) for name, array in run.state_dict().items()}


def same_state(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("policy", "again"), [("bf16-mixed,param=fp32:split", False), (FP16, True)], ids=["split", "fp16-recomputed"]
)
def test_a_monitor_changes_no_bit(policy, again):
    losses = {}
    for watched in (True, False):
        run = prepared(policy, drops=0.2, again=again)
        monitor = run.monitor() if watched else None
        if monitor:
            monitor.weight_numbers()
        losses[watched] = trained(run)
        if monitor:
            monitor.sample(loss_fn, tokens())
        losses[watched] += [trained(run), state(run)]
    assert losses[True][:-1] == losses[False][:-1]
    assert same_state(losses[True][-1], losses[False][-1])


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("g++") is None, reason="without g++ MLX does not compile")
def test_a_monitor_changes_no_bit_of_a_compiled_step():
    def run(*, compile):
        mx.random.seed(3)
        model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.Tanh())
        return prepare(model, mlx.optimizers.SGD(0.1), "bf16-mixed", compile=compile)

    watched, alone, eager = run(compile=True), run(compile=True), run(compile=False)
    monitors = [each.monitor() for each in (watched, eager)]
    batches = [mx.array(np.random.default_rng(seed).standard_normal((4, 8), np.float32)) for seed in range(3)]
    losses = [[each.step(squares, [x]).loss.item() for x in batches] for each in (watched, alone, eager)]
    assert losses[0] == losses[1]
    assert same_state(state(watched), state(alone))
    # The compiler may leave out a rounding, so magnitudes may differ; what was looked at may not.
    numbers = [monitor.layer_numbers().read() for monitor in monitors]
    assert np.array_equal(numbers[0][..., 0], numbers[1][..., 0])
    assert numbers[0][..., 1].all()


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
def test_numbers_are_those_of_the_reference_and_merge_over_uses_and_micro_batches(again):
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)
            self.layer.weight = 2 * mx.eye(8)

        def __call__(self, x):
            layer = nn.utils.checkpoint(self.layer) if again else self.layer
            return layer(layer(x))

    run = prepare(Doubling(), AdamW(1e-3), "compute=fp16,emulate=true,scale=static:value=1")
    monitor = run.monitor(slice=20)
    batches = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float16).astype(np.float32)
    batches[1] *= 2.0**-22  # subnormal in fp16, and rounded
    cotangent = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float16).astype(np.float32)
    differentiate = run.value_and_grad(lambda model, x: (model(x) * mx.array(cotangent)).sum())
    for x in batches:
        run.accumulate(differentiate(mx.array(x))[1])
    fp16, numbers = parse("fp16"), monitor.layer_numbers().read()
    rounded = batches.astype(np.float16).astype(np.float32)
    for role, met in (
        ("activation", [factor * x for x in rounded for factor in (1, 2)]),
        ("gradient", [factor * cotangent for _ in batches for factor in (1, 2)]),
    ):
        rows = np.array([row_of(x.reshape(-1)[:20], fp16) for x in met])
        expected = [rows[:, 0].sum(), rows[:, 1].max(), *rows[:, 2:].sum(axis=0)]
        assert numbers[0, ROLES.index(role)].tolist() == expected
    assert not monitor.layer_numbers().read().any()  # from zero again


def test_a_narrow_operand_is_scaled_before_it_is_counted():
    run = prepare(Ones(), AdamW(1e-3), "fp32,emulate=true; layer: compute=e4m3")
    monitor = run.monitor()
    x = np.exp2(-np.arange(32, dtype=np.float32)).reshape(2, 16)
    run.step(lambda model, x: mx.square(model(x)).mean(), [mx.array(x)])
    expected = row_of(x, parse("e4m3"), scaled=True)
    assert monitor.layer_numbers().read()[0, 0].tolist() == expected.tolist()
    assert expected[3] > 0


def test_every_layer_has_a_name_a_kind_and_formats():
    monitor = prepared("bf16-mixed,emulate=true; shared: compute=e4m3:row").monitor()
    assert [(info.name, info.kind) for info in monitor.layers] == [
        ("embed", "embedding"),
        ("embed.as_linear", "matmul"),
        ("norm", "norm"),
        ("shared", "matmul"),
    ]
    assert monitor.layers[2].formats == {"activation": "bf16", "gradient": "bf16", "weight": "fp32"}
    assert monitor.layers[3].formats["activation"] == "e4m3:row"


class Chain(nn.Module):
    """Eight layers; what enters one of them is multiplied by a factor, and what leaves it divided."""

    def __init__(self, planted, factor):
        super().__init__()
        self.layers = [nn.Linear(8, 8, bias=False) for _ in range(8)]
        for layer in self.layers:
            layer.weight = mx.eye(8)
        self.planted, self.factor = planted, factor

    def __call__(self, x):
        for index, layer in enumerate(self.layers):
            factor = self.factor if index == self.planted else 1.0
            x = layer(x * factor) / factor
        return x


@pytest.mark.parametrize(
    ("role", "column", "planted", "factor"),
    [("activation", "overflow", 5, 2.0**17), ("gradient", "underflow", 2, 2.0**14)],
)
def test_the_layer_that_leaves_the_range_of_fp16_is_named(role, column, planted, factor):
    run = prepare(Chain(planted, factor), AdamW(1e-3), "compute=fp16,emulate=true,scale=static:value=1")
    monitor = run.monitor()
    run.step(lambda model, x: (model(x) * 2.0**-12).sum(), [mx.ones((4, 8))])
    counts = monitor.layer_numbers().read()[:, ROLES.index(role), COLUMNS.index(column)]
    beyond = list(np.flatnonzero(counts))
    # What overflows stays infinite in the layers after it.
    assert beyond == ([2] if role == "gradient" else [5, 6, 7])
    assert counts[planted] == 32


class Ones(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)
        self.layer.weight = mx.ones((16, 16))

    def __call__(self, x):
        return self.layer(x)


def squares(model, x):
    return mx.square(model(x)).mean()


@pytest.mark.parametrize(("param", "lost"), [("bf16", 1.0), ("fp32", 0.0), ("fp32:split", 0.0)])
@pytest.mark.parametrize("kind", [AdamW, mlx.optimizers.Adam, mlx.optimizers.Lion], ids=lambda kind: kind.__name__)
def test_lost_updates_are_counted_against_what_the_optimizer_intended(param, lost, kind):
    run = prepare(Ones(), kind(1e-4), f"bf16-mixed,param={param}")  # 1 - 1e-4 is 1 in bf16
    unread = run.monitor().weight_numbers()
    run.step(squares, [mx.ones((4, 16))])
    norm, gradient, update, share = unread.read()[0]
    assert share == lost
    assert gradient > 0
    assert norm == pytest.approx(16, rel=1e-3)
    assert (update == 0) == (lost == 1)


def test_the_gradient_is_that_of_the_loss_without_scale_and_clip():
    unread, policy = {}, "compute=fp16,emulate=true,scale=static:value=1024"
    for given, clip in ((policy, 0.0), (policy, 1e-3), ("fp32", 0.0)):
        run = prepare(Ones(), AdamW(1e-4), given, clip_norm=clip)
        unread[given, clip] = run.monitor().weight_numbers()
        run.step(squares, [mx.ones((4, 16))])
    assert len({each.read()[0, 1] for each in unread.values()}) == 1


def test_a_skipped_update_loses_nothing_and_an_update_of_zero_is_not_intended():
    run = prepare(Ones(), AdamW(1e-4), "bf16-mixed")
    monitor = run.monitor()
    skipped = monitor.weight_numbers()
    run.step(squares, [mx.full((4, 16), float("nan"))])
    none = monitor.weight_numbers()
    run.step(squares, [mx.zeros((4, 16))])
    assert np.isnan(skipped.read()[0, 3])
    assert np.isnan(none.read()[0, 3])
    assert none.read()[0, 2] == 0


def test_a_sample_describes_a_part_of_the_batch_and_leaves_everything_as_it_was():
    run = prepared("bf16-mixed", drops=0.2)
    monitor = run.monitor()
    run.accumulate(run.value_and_grad(loss_fn)(tokens())[1])
    before = state(run)
    sampled = monitor.sample(loss_fn, tokens(rows=32))
    assert same_state(before, state(run))
    assert run._sum is not None
    assert set(sampled) == {info.name for info in monitor.layers}
    assert {role for roles in sampled.values() for role in roles} == {"activation", "gradient", "weight"}
    assert sampled["norm"]["activation"].count == 2 * 2 * 5 * 8  # two of 32 rows, used twice
    weight = np.array(run.model.shared.weight.astype(mx.float32))
    assert sampled["shared"]["weight"] == Observation.of(weight, parse("fp32")).sample()


def test_unprepare_gives_back_the_classes_and_a_second_monitor_must_agree():
    run = prepared()
    monitor = run.monitor(slice=128)
    assert run.monitor(slice=128) is monitor
    with refuses(HalfstepError, "monitored already"):
        run.monitor(slice=64)
    with refuses(HalfstepError, "slice"):
        prepared().monitor(slice=0)
    model = run.unprepare()
    assert type(model.shared) is nn.Linear
    assert "halfstep_watched" not in vars(model.shared)


def session(*extra):
    return Session(load("tiny", [*SMALL, *extra]), Policy.parse("bf16-mixed"), "cpu", lambda applied, xp: 1.0)


def test_a_session_is_watched_with_the_same_losses():
    watched, alone = session(), session()
    layers = watched.watch(4096)
    unread = watched.weight_numbers()
    losses = [[s.read(s.step(batch(i, s)))["loss"] for i in range(2)] for s in (watched, alone)]
    assert losses[0] == losses[1]
    assert [info.name for info in layers][:2] == ["embed", "blocks.0.attn_norm"]
    numbers = watched.layer_numbers().read()
    assert numbers.shape == (len(layers), 2, 5)
    assert (numbers[..., :2] > 0).all()
    assert (unread.read()[:, 3][[info.name.endswith(".o") for info in layers]] == 0).all()
    assert set(watched.sample(batch(0, watched))) == {info.name for info in layers}
    assert watched.read(watched.step(batch(2, watched)))["loss"] == alone.read(alone.step(batch(2, alone)))["loss"]
