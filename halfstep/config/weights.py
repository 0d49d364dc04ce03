"""The weights of the reference decoder: the initial ones, and those of a run under another policy.

Initial weights are the same on every backend: a function of (seed, name), in numpy.

matrices                          normal, variance 1 / (3 fan_in), which keeps the scale of activations
those that write to the stream    zero, or divided by sqrt(2 layers), so that the stream grows as one block
embeddings                        normal, `embedding_std`
an output head                    as a matrix, or zero
gains, factors                    one, on queries `q_gain_start`;   biases   zero
residual_mix                      (1, 0): the stream itself;   value_mix   0.5

Beside them are the angles of rotary positions, which are numbers of a model too, though no weights.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from halfstep.config.model import ModelConfig, Shape, parameter_shapes
from halfstep.config.policy_schedule import held, rule_names
from halfstep.core import host
from halfstep.core.formats import Format
from halfstep.core.philox import tensor_id
from halfstep.core.policy import Policy
from halfstep.core.state_format import OF_BACKEND, OF_POLICY, Stored, convert

# Numbers that may wait for the caller, 2 GiB: while one thread draws an embedding, others draw layers.
MOST_WAITING = 2**29

# Every parameter of a model once, by name, in fp32.
Weights = Iterable[tuple[str, NDArray[np.float32]]]


def initial_weights(model: ModelConfig, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the name and initial value of every parameter. Several at once draw from streams of their own."""
    left = deque(parameter_shapes(model).items())
    ahead, waiting = deque[tuple[str, Future[NDArray[np.float32]]]](), 0
    with ThreadPoolExecutor(host.threads() or 1) as pool:
        while left or ahead:
            while left and (not ahead or waiting < MOST_WAITING):
                name, shape = left.popleft()
                ahead.append((name, pool.submit(_initial, model, seed, name, shape)))
                waiting += math.prod(shape)
            name, drawn = ahead.popleft()
            value = drawn.result()
            waiting -= value.size
            yield name, value


def _initial(model: ModelConfig, seed: int, name: str, shape: Shape) -> NDArray[np.float32]:
    *_, layer, kind = ("", *name.split("."))
    if kind == "residual_mix":
        return np.stack([np.ones(shape[1:], np.float32), np.zeros(shape[1:], np.float32)])
    if kind == "value_mix":
        return np.full(shape, 0.5, np.float32)
    if kind == "bias":
        return np.zeros(shape, np.float32)
    if kind == "q_gain":
        return np.full(shape, model.q_gain_start, np.float32)
    if len(shape) < 2 or kind == "skip_weights":
        return np.ones(shape, np.float32)
    writes = layer in ("o", "down")
    if (writes and model.zero_init) or (layer == "lm_head" and model.zero_head):
        return np.zeros(shape, np.float32)
    std = model.embedding_std if layer in ("embed", "positions") else 1 / math.sqrt(3 * shape[1])
    if writes:
        std /= math.sqrt(2 * model.layers)
    generator = np.random.Generator(np.random.Philox(key=[seed, tensor_id(name)]))
    values = generator.standard_normal(shape, np.float32)
    values *= np.float32(std)
    return values


def rope_tables(model: ModelConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns cos and sin of position * base^(-2i/K), twice side by side, in fp32 of angles in fp64."""
    half = model.size_of_head // 2
    rates = model.rope_base ** -(np.arange(half) / half)
    angles = np.tile(np.outer(np.arange(model.context), rates), (1, 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def held_formats(policy: Policy, model: ModelConfig, state: Mapping[str, Stored]) -> dict[str, Format]:
    """Returns the formats that a policy gives the masters and moments of a state."""
    formats, shapes = dict[str, Format](), parameter_shapes(model)
    for (parameter, role), fmt in held(policy, rule_names(model), shapes).items():
        if role == "param":
            formats[f"model.{parameter}"] = fmt
            continue
        moments = [name for name in state if name.startswith("optimizer.") and f".{parameter}." in name]
        formats |= {name: fmt for name in moments if len(state[name].shape) == len(shapes[parameter])}
    return formats


def carry_over(
    given: Mapping[str, Stored],
    ours: Mapping[str, Stored],
    before: Policy,
    now: Policy,
    model: ModelConfig,
    *,
    crosses: bool = False,
) -> dict[str, Stored]:
    """Converts a state that the policy `before` left to the form of `ours`, a fresh run of the policy `now`.

    What belongs to the policy `now` alone starts anew, and so does what belongs to a backend, if the run `crosses`
    to another. A loss scale is kept if both policies scale alike, and so are amaxes of layers that both delay.
    """
    anew = tuple(each for each in OF_POLICY if each != "scale." or before.scale != now.scale)
    state = convert(given, ours, held_formats(now, model, ours), anew + (OF_BACKEND if crosses else ()))
    known = {} if crosses else {name: given[name] for name in state.keys() & given.keys()}
    return state | {name: value for name, value in known.items() if name.startswith("amax.")}
