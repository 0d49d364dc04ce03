"""What each rank does in the tests, and one process alone to compare with."""

import os
import sys
import time

import mlx.core as mx
import mlx.optimizers
import numpy as np
from mlx import nn

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.mlx import prepare
from halfstep.mlx.parallel import ranks as parallel
from halfstep.mlx.parallel.job import Host
from halfstep.mlx.parallel.ranks import Ranks
from halfstep.mlx.session import Session

STEPS = 3
NAMES = ["loss", "skipped", "scale", "grad_norm", "stuck"]


class Net(nn.Module):
    """A trained matrix, a norm with running statistics, and a frozen matrix."""

    def __init__(self, seed):
        super().__init__()
        mx.random.seed(seed)
        self.inner, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm(8), nn.Linear(8, 3)
        self.head.freeze()

    def __call__(self, x):
        return self.head(nn.relu(self.norm(self.inner(x))))


def group():
    return mx.distributed.init(backend="ring", strict=True)


def data(step, rows=(2, 5, 3)):
    """Three micro-batches of an update, of unequal sizes."""
    rng = np.random.default_rng(step)
    return [mx.array(rng.standard_normal((n, 4), np.float32)) for n in rows]


def squares(model, x):
    return mx.square(model(x)).sum(), float(len(x))


def bits(arrays):
    return {name: (str(a.dtype), np.array(a.reshape(-1).view(mx.uint8)).tobytes()) for name, a in arrays.items()}


def train(policy, alone, unscales):
    """Trains a few updates; returns their numbers, the bits of everything at the end, and what was summed."""
    ranks = None if alone else group()
    run = prepare(
        Net(0 if alone else ranks.rank()),
        mlx.optimizers.AdamW(0.1),
        policy,
        clip_norm=1.0,
        group=ranks,
    )
    whole, summed = mx.distributed.all_sum, []

    def spy(array, **options):
        summed.append((str(array.dtype), array.size))
        return whole(array, **options)

    mx.distributed.all_sum = spy
    rows = []
    try:
        for step in range(STEPS):
            mine = data(step) if alone else _share(data(step), ranks)
            if unscales:
                differentiate = run.value_and_grad(squares)
                result = run.update(run.unscale([differentiate(batch)[1] for batch in mine]))
            else:
                result = run.step(squares, mine)
            rows.append([float(getattr(result, name)) for name in NAMES])
    finally:
        mx.distributed.all_sum = whole
    return rows, bits({k: v for k, v in run.state_dict().items() if k != "rng.mlx"}), summed, run.summary()


def norm_of_terms(policy):
    """The sum of the norms that the micro-batches of the first update add to its gradient."""
    run = prepare(Net(0), mlx.optimizers.SGD(0.1), policy)
    grads = [run.value_and_grad(squares)(batch)[1] for batch in data(0)]
    norms = [sum(mx.square(array).sum().item() for array in each.arrays.values()) ** 0.5 for each in grads]
    weights = [each.weight.item() for each in grads]
    return sum(norm * weight for norm, weight in zip(norms, weights, strict=True)) / sum(weights)


def _share(batches, ranks):
    """The last rank has the last micro-batch; with two, rank 0 has two of the three."""
    first = ranks.rank() + 3 - ranks.size() if ranks.rank() else 0
    return batches[first : ranks.rank() + 4 - ranks.size()]


def skip(policy):
    """An update whose gradients are not finite on rank 1, between two that are finite on both."""
    ranks = group()
    run = prepare(Net(0), mlx.optimizers.SGD(0.1), policy, seed=np.int64(3), clip_norm=np.float32(9), group=ranks)
    rows, states = [], []
    for step in range(3):
        x = data(step)[ranks.rank()]
        if step == 1 and ranks.rank() == 1:
            x = x * mx.array(float("nan"))
        result = run.step(squares, [x])
        rows.append((bool(result.skipped), float(result.scale), result.bad_rank.item()))
        try:
            run.check(result)
        except HalfstepError as error:
            return error.message
        states.append(bits({k: v for k, v in run.state_dict().items() if k.startswith("model.")}))
    return rows, states


def session(alone):
    """Trains a recipe as the loop does; returns the numbers of each step, and the bits of the state."""
    small = ["model.context=8", "model.layers=1", "model.width=16", "model.heads=2", "training.batch=2"]
    config = load("tiny", [*small, "training.micro_batches=2", "training.compile=false"])
    host = None if alone else Host()
    device = "cpu" if alone else host.connect("cpu", 60.0)
    try:
        run = Session(config, Policy.parse("bf16-mixed"), device, lambda applied, xp: 1.0 / (1.0 + applied))
        rows = []
        for step in range(STEPS):
            tokens = np.random.default_rng(step).integers(0, 256, (2, 2, 9), np.int32)
            rows.append(run.read(run.step(tokens if alone else tokens[host.rank : host.rank + 1])))
        state = {name: record for name, record in run.state().items() if name != "rng.mlx"}
        trains_alone = Session(config, Policy.parse("fp32"), "cpu").run.ranks is None  # for evaluation
        shared = alone or [host.broadcast("a folder" if host.rank == 0 else None), host.gather("!" * host.rank)]
        return rows, state, trains_alone, shared
    finally:
        if not alone:
            host.close()


def differ(what):
    """Starts with settings that depend on the rank; returns the refusal."""
    rank = group().rank()
    given = {"policy": "auto" if what == "auto" else "fp32", "clip_norm": 0.0, "learning_rate": 0.1, "weights": 4}
    if rank and what != "auto":
        given |= {what: {"policy": "bf16-mixed", "clip_norm": 1.0, "learning_rate": 0.2, "weights": 5}[what]}
    model = nn.Linear(given["weights"], 3)
    optimizer = mlx.optimizers.SGD(given["learning_rate"])
    try:
        prepare(model, optimizer, given["policy"], clip_norm=given["clip_norm"], group=group())
    except HalfstepError as error:
        return str(error)


def stray():
    """Ranks that do different things; returns the refusal."""
    try:
        Ranks(group()).exchange("an evaluation" if group().rank() else "update 3", [])
    except HalfstepError as error:
        return str(error)


def tell(lengths):
    return Ranks(group()).exchange("a text", "x" * lengths[group().rank()])


def first_weights():
    given = {"a": mx.full((3,), -0.0 if group().rank() == 0 else 1.0), "b": mx.zeros((2, 0)), "c": mx.array(True)}
    given["d"] = mx.array([7, -7], mx.int16) * (1 + group().rank())
    return bits(Ranks(group()).from_rank_0("arrays", given))


def sum_in_buckets(bucket):
    """Sums arrays of 1 to 6 numbers, each filled with its own size."""
    whole, sizes = mx.distributed.all_sum, []

    def spy(array, **options):
        sizes.append(array.size)
        return whole(array, **options)

    mx.distributed.all_sum, old, parallel.BUCKET = spy, parallel.BUCKET, bucket
    try:
        sums = Ranks(group()).sum("sums", {str(n): mx.full((n,), n, mx.bfloat16) for n in range(1, 7)})
        return sizes, {name: (str(array.dtype), array.tolist()) for name, array in sums.items()}
    finally:
        mx.distributed.all_sum, parallel.BUCKET = whole, old


def arrive_late(timeout, ended):
    """Rank 1 comes to an exchange once rank 0 has ended; returns what that printed, and how it ended."""
    ranks, codes = Ranks(group(), timeout), []

    def end(code):
        codes.append(code)
        ended.touch()

    if ranks.rank == 1:
        ranks.timeout = 60.0
        while not ended.exists():
            time.sleep(0.02)
    own, os._exit = os._exit, end
    err, sys.stderr = sys.stderr, _Lines()
    try:
        answers = ranks.exchange("the sums of update 7", ranks.rank)
        return answers, codes, sys.stderr.text
    finally:
        os._exit, sys.stderr = own, err


class _Lines:
    text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass
