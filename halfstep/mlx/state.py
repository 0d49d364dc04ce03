"""Model, optimizer, scale and random state as flat {name: array}, and back, bit for bit.

Names are those of core.state_format, and for what only MLX has:

    remainder.<parameter>                   the int16 half of a split master; `model.<parameter>` is its bf16 half
    average.<parameter>                     the fp32 average of a master, if the run keeps averages
    optimizer.<i>.step, .learning_rate      what an MLX optimizer holds once for all of its parameters
    rng.mlx                                 the key of mx.random, two words; one for all devices
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from halfstep.core import state_format
from halfstep.core.averages import PREFIX, to_state
from halfstep.core.errors import StateError, type_name
from halfstep.core.scaling import ScaleState, saved_scale
from halfstep.core.state_format import Description, Stored, check_same, find_dtype
from halfstep.mlx.convert.places import Place, arrays, public
from halfstep.mlx.numerics.cast import join
from halfstep.mlx.optim.masters import Masters

# For each dtype its name in a safetensors header, and the numpy dtype that carries the bytes.
DTYPE_NAMES = {
    getattr(mx, "bool_" if kind == "bool" else kind): (name, "<u2" if name == "BF16" else np.dtype(kind).str)
    for kind, name in state_format.DTYPE_NAMES.items()
}
_DTYPES = {name: (dtype, carrier) for dtype, (name, carrier) in DTYPE_NAMES.items()}


def state_of(run: Any) -> dict[str, mx.array]:
    """Returns every array that the next step depends on: the live ones, not copies."""
    state = {name: place.array for name, place in _places(run).items()}
    state |= {f"remainder.{name}": array for name, array in run.masters.remainders.items()}
    state |= {f"scale.{field}": run.scalars[field] for field in ScaleState._fields}
    state |= to_state(run.ema)
    state["applied"] = run.num_applied
    state["rng.mlx"] = mx.random.state[0]  # type: ignore[index]
    return state


def load_state(run: Any, given: Mapping[str, mx.array]) -> None:
    """Restores a state, bit for bit. One of another model, optimizer or precision is refused whole."""
    if not (isinstance(given, Mapping) and all(isinstance(array, mx.array) for array in given.values())):
        raise StateError(
            f"the state is {type_name(given)}, not a dict of MLX's arrays by name",
            hint="run.load_state_dict(mx.load(file)) reads what mx.save_safetensors wrote of run.state_dict()",
        )
    check_same(_described(state_of(run)), _described(given))
    scale = saved_scale(run.policy.scale, given)
    for name, place in _places(run).items():
        place.put(given[name])
    remainders, averages = run.masters.remainders, {} if run.averages is None else run.averages.arrays
    remainders.update({name: given[f"remainder.{name}"] for name in remainders})
    averages.update({name: given[f"{PREFIX}{name}"] for name in averages})
    run.scalars.update({} if scale is None else scale._asdict())
    run.scalars["applied"] = given["applied"]
    set_random_key(given["rng.mlx"])
    run.masters.note_writes()


def _places(run: Any) -> dict[str, Place]:
    """Returns where a run keeps the arrays of its model and optimizers, by the names of core.state_format."""
    places = {f"model.{name}": place for name, place in arrays(run.model).items() if public(name)}
    for index, optimizer in enumerate(run.optimizers):
        places |= {f"optimizer.{index}.{name}": place for name, place in arrays(optimizer.state).items()}
    return places


def set_random_key(key: mx.array) -> None:
    """Sets the key of mx.random."""
    high, low = (int(word) for word in np.array(key))
    mx.random.seed(high << 32 | low)


def load_weights(masters: Masters, given: Mapping[str, mx.array]) -> None:
    """Loads the weights of a state, however its masters were held, and holds them as this run does."""
    wide = {}
    for name, place in masters.places.items():
        hi, lo = given[f"model.{name}"], given.get(f"remainder.{name}")
        wide[name] = hi.astype(mx.float32) if lo is None else join(hi, lo)
        if wide[name].shape != place.array.shape:
            raise StateError(
                f"`{name}` has the shape {hi.shape} in the checkpoint and {place.array.shape} in the model",
                hint="load it with the model it was saved with",
            )
    masters.set(wide)


def stored(array: mx.array) -> Stored:
    """Returns an array's dtype, shape and bytes, little-endian."""
    name, carrier = DTYPE_NAMES[array.dtype]
    flat = array.reshape(-1)
    flat = flat.view(mx.uint16) if array.dtype == mx.bfloat16 else flat  # numpy has no bf16
    return Stored(name, tuple(array.shape), np.array(flat).astype(carrier, copy=False).tobytes())


def restored(record: Stored) -> mx.array:
    """Returns the array that `stored` wrote."""
    name, shape, data = record
    dtype, carrier = find_dtype(name, _DTYPES)
    # The dtype is explicit: MLX turns numpy's float64 into float32.
    flat = mx.array(np.frombuffer(data, carrier), mx.uint16 if dtype == mx.bfloat16 else dtype)
    return (flat.view(mx.bfloat16) if dtype == mx.bfloat16 else flat).reshape(shape)


def _described(state: Mapping[str, mx.array]) -> dict[str, Description]:
    return {name: (DTYPE_NAMES[array.dtype][0], tuple(array.shape)) for name, array in state.items()}
