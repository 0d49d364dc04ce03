"""What tests call in a process of four devices: it takes and returns what travels between processes."""

import re
import tempfile
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from halfstep.cli.main import run
from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.policy import Policy
from halfstep.jax import Monitor, Weighted, init, load_state_dict, make_step, state_dict
from halfstep.jax.layers import COMPILER_OPTIONS
from halfstep.jax.session import Session
from tests.jax.parallel.losses import APART, SYNCED, WHOLE, batch_of, weights
from tests.token_batches import batch

ROWS, LENGTH, WIDTH, WORDS, MICRO = 8, 6, 16, 32, 2
RATE = 0.1
KINDS = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"


def four_devices():
    """Before JAX is used in this process."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_compilation_cache", False)  # nothing is dumped of what it has


def params():
    generator = np.random.default_rng(0)
    shapes = {"embed": (WORDS, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WORDS), "bias": (WORDS,)}
    return {name: {"weight": generator.standard_normal(s, np.float32) * 0.3} for name, s in shapes.items()}


def batches(steps, micro, *, uneven=False):
    """Tokens of each step, and how much each counts; with `uneven`, rows have different numbers that do."""
    generator = np.random.default_rng(1)
    lead = () if micro is None else (micro,)
    for _ in range(steps):
        tokens = generator.integers(0, WORDS, (*lead, ROWS, LENGTH + 1), np.int32)
        lengths = generator.integers(0, LENGTH + 1, (*lead, ROWS, 1)) if uneven else LENGTH
        yield tokens, np.broadcast_to(np.arange(LENGTH) < lengths, (*lead, ROWS, LENGTH)).astype(np.float32)


def loss(params, batch):
    tokens, counts = batch
    x = params["embed"]["weight"][tokens[:, :-1]]
    x = jnp.maximum(x @ params["up"]["weight"], 0)
    logits = (x @ params["down"]["weight"] + params["bias"]["weight"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    counts = counts.astype(jnp.float32)
    return Weighted((losses * counts).sum(), counts.sum()), losses


def train(shape, policy, steps=3, micro=MICRO, *, uneven=False, broken=None):
    """Trains on a mesh of a shape, or on one device if it is (): a row per step, the weights, what else there is.

    In the step `broken`, the last row counts infinitely, so that one device alone has no finite gradient.
    """
    place = jax.make_mesh(shape, ("machines", "data")[-len(shape) :]) if shape else None
    optimizer = optax.sgd(RATE, momentum=0.5)
    state = init(params(), optimizer, policy, mesh=place)
    rows, aux = [], None
    with dumped() as programs:
        step = make_step(loss, optimizer, clip_norm=1.0, micro_batches=micro, mesh=place)
        for number, (tokens, counts) in enumerate(batches(steps, micro, uneven=uneven)):
            if number == broken:
                counts[..., -1, :] = np.inf
            state, result = step(state, (tokens, counts))
            values = (result.loss, result.grad_norm, result.skipped, result.scale)
            rows.append(tuple(np.asarray(value).item() for value in values))
            aux = result.aux.shape
        exchanged = [exchanges(text) for text in programs()]
    copies = [[np.asarray(s.data).tobytes() for s in leaf.addressable_shards] for leaf in jax.tree.leaves(state)]
    weights = {name: np.asarray(leaf["weight"]) for name, leaf in state.masters().items()}
    amaxes = {name: np.asarray(history) for name, history in state.amaxes.items()}
    same = all(len(each) == np.prod(shape) and len({*each}) == 1 for each in copies)
    more = {"aux": aux, "same": same, "exchanged": exchanged, "programs": step._cache_size(), "amaxes": amaxes}
    return rows, weights, more


@contextmanager
def dumped():
    """Yields a function that returns the program that was compiled inside: as it was partitioned, and optimized.

    The partitioned one says what is exchanged. XLA makes fp32 of every sum on a CPU later, which has no other.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        with patch.dict(COMPILER_OPTIONS, dump):
            yield lambda: [
                path.read_text()
                for end in ("after_spmd-partitioning*", "cpu_after_optimizations")
                for path in Path(folder).glob(f"*{end}.txt")
            ]


def exchanges(text):
    """What devices exchange in a program: {(kind, dtype, shape, whether outside of its main part): times}."""
    found = Counter()
    *_, main = re.split(r"^ENTRY ", text, flags=re.MULTILINE)
    for line in text.splitlines():
        if match := re.search(rf" = (.*?) ({KINDS})(-start)?\(", line):
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                found[match[2], dtype, shape, line not in main] += 1
    return dict(found)


def followed():
    """What our step exchanges without a mesh, where jit follows the shardings of its arguments."""
    mesh, optimizer = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,)), optax.sgd(RATE)
    state = init(jax.device_put(params(), NamedSharding(mesh, PartitionSpec())), optimizer, "bf16-mixed")
    rows = jax.device_put(next(batches(1, MICRO)), NamedSharding(mesh, PartitionSpec(None, "data")))
    with dumped() as programs:
        make_step(loss, optimizer, micro_batches=MICRO)(state, rows)
        return [exchanges(text) for text in programs()]


def draw():
    """Returns the number that each device draws in each of two micro-batches."""
    mesh, optimizer = jax.make_mesh((4,), ("data",)), optax.sgd(RATE)

    def drawn(params, batch, rng):
        return (params["w"] * batch).mean(), jax.random.uniform(rng)

    state = init({"w": jnp.ones(2)}, optimizer, "fp32", mesh=mesh)
    step = make_step(drawn, optimizer, micro_batches=2, mesh=mesh)
    return np.asarray(step(state, np.ones((2, 4, 2), np.float32), jax.random.key(0))[1].aux)


def keys():
    """Trains beside a count and keys of generators; then starts again from them, and resumes."""
    mesh, key = jax.make_mesh((4,), ("data",)), jax.random.key(0)
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.sgd(RATE))
    weights = {"w": jnp.ones(2), "key": key, "count": jnp.int32(3)}
    step = make_step(lambda params, batch: (params["w"] * batch).mean(), optimizer, mesh=mesh)
    state, _ = step(init(weights, optimizer, "fp32", mesh=mesh), np.ones((4, 2), np.float32))
    saved = {name: np.asarray(array) for name, array in state_dict(state).items()}
    again = load_state_dict(init(weights, optimizer, "fp32", mesh=mesh), saved)
    states = [step(each, np.ones((4, 2), np.float32))[0] for each in (state, again)]
    return [np.asarray(each.params["w"]).tobytes() for each in states]


def refusals(cases):
    """Returns the message and hint of each refusal."""
    return [_refusal(case) for case in cases]


def _refusal(case):
    mesh, optimizer = jax.make_mesh((4,), ("data",)), optax.sgd(RATE)
    state = init(params(), optimizer, "fp32", mesh=None if case == "one device" else mesh)
    if case == "sharded":
        rows = NamedSharding(mesh, PartitionSpec("data"))
        state = init(jax.device_put(params(), rows), optimizer, "fp32")
    tokens, counts = next(batches(1, None))
    batch = {"rows": (tokens[:6], counts[:6]), "leaves": (tokens, counts[:4])}.get(case, (tokens, counts))
    try:
        make_step(loss, optimizer, mesh="data" if case == "name" else mesh)(state, batch)
    except HalfstepError as error:
        return error.message, error.hint
    return None


SMALL = ["model.context=8", "model.layers=1", "model.width=16", "model.heads=2", "model.vocabulary=64"]
SMALL += ["optimizer.name=muon", "training.batch=4", "training.micro_batches=2", "training.ema=0.5"]


def sessions(policy, steps=2):
    """Trains on four devices and on one, then gives the first's state to the second, and compares what they do."""
    four, one = (Session(load("tiny", SMALL), Policy.parse(policy), device) for device in ("cpu:0-3", "cpu"))
    trained = [[s.read(s.step(batch(i, s))) for i in range(steps)] for s in (four, one)]
    state = four.state()
    kept = {name: (*record[:2], bytes(record.data)) for name, record in four.snapshot()().items()}
    one.load(state)
    tokens = batch(9, one)
    scores = [[s.evaluate([tokens[0], tokens[1, :3]], averaged=a)[0] for a in (False, True)] for s in (four, one)]
    logits = [s.logits([1, 2, 3]).tobytes() for s in (four, one)]
    return {
        "trained": trained,
        "resumed": [s.read(s.step(tokens)) for s in (four, one)],
        "snapshot": kept == {name: (*record[:2], bytes(record.data)) for name, record in state.items()},
        "scores": scores,
        "logits": logits,
        "blamed": [s.blame(tokens) for s in (four, one)],
        "names": [s.description.name for s in (four, one)],
    }


def command(arguments):
    """Runs `halfstep`; returns its exit code."""
    return run(arguments)


def open_session(device, *settings):
    try:
        Session(load("tiny", [*SMALL, *settings]), Policy.parse("fp32"), device)
    except HalfstepError as error:
        return error.message, error.hint
    return None


def losses(names, micro=None):
    """Trains two steps with each loss on one device and on four: for each the rows, the weights, and warnings."""
    return {name: [trained_by(name, shape, micro) for shape in ((), (4,), (2, 2))] for name in names}


def trained_by(name, shape, micro=None):
    mesh = jax.make_mesh(shape, ("machines", "data")[-len(shape) :]) if shape else None
    loss_fn, optimizer, rows = (APART | WHOLE | SYNCED)[name], optax.sgd(RATE), []
    state = init(weights(), optimizer, "fp32", mesh=mesh)
    step = make_step(loss_fn, optimizer, micro_batches=micro, mesh=mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            state, result = step(state, batch_of(micro), jax.random.key(number))
            rows.append((float(result.loss), float(result.grad_norm)))
    said = [str(each.message) for each in caught if "whole batch" in str(each.message)]
    return rows, {name: np.asarray(leaf) for name, leaf in state.masters().items()}, said


def exchanged_by(name, policy):
    """What devices exchange in the step of a loss, as it was partitioned."""
    mesh, optimizer = jax.make_mesh((4,), ("data",)), optax.sgd(RATE)
    state = init(weights(), optimizer, policy, mesh=mesh)
    with dumped() as programs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_step(WHOLE[name], optimizer, mesh=mesh)(state, batch_of())
        return exchanges(programs()[0])


def watched_whole():
    """The shape of the aux of a loss that mixes rows, and the sizes of its layers on four devices and on one."""
    counted, optimizer = [], optax.sgd(RATE)

    def loss_fn(params, batch):
        return WHOLE["contrastive"](params, batch), batch["y"]

    for mesh in (jax.make_mesh((4,), ("data",)), None):
        monitor = Monitor()
        step = make_step(loss_fn, optimizer, mesh=mesh, monitor=monitor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, result = step(init(weights(), optimizer, "fp32", mesh=mesh), batch_of())
        counted.append((result.aux.shape, monitor.layer_numbers().read()[..., 0].tolist()))
    return counted[0][0], counted[0][1], counted[1][1]
