"""A tensor as a checkpoint holds it, from any framework, and when one state fits another.

State is flat, {name: (dtype, shape, bytes)}, with the same names on every backend:

    model.<parameter>                       masters, in the format they are held in
    optimizer.<i>.<parameter>.<moment>      moments, in their own format, never in the parameter's; those of a run
                                            of `halfstep train` have the names of config.groups on every backend
    scale.<field>, applied                  the law of scaling, and how many updates were applied
    rng.<device>                            random state, as bytes

Loading checks names, shapes and dtypes before it changes anything: fp32 moments never come back bf16. A run that
changes its policy or its backend converts its state first: what was learned keeps every bit or is refused. What
belongs to one policy alone (a loss scale, amax histories, measured layers) or to the backend (random states, and
the last two) starts as in a new run.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from halfstep.core import split
from halfstep.core.errors import PolicyChangeError, StateError
from halfstep.core.formats import BF16, FP16, FP32, Format
from halfstep.core.rounding import cast

T = TypeVar("T")


class Stored(NamedTuple):
    """A tensor as bytes, row-major and little-endian, whatever framework it comes from."""

    dtype: str  # as in a safetensors header: F32, BF16, I32
    shape: tuple[int, ...]
    data: bytes | memoryview


class Part(Stored):
    """Some rows of a tensor that ranks share: this rank has them, and writes them to its own file."""

    rows: tuple[int, int]  # the first of them, and how many the whole tensor has

    def __new__(cls, record: Stored, start: int, total: int) -> "Part":
        """Takes the rows, the number of the first, and how many the whole tensor has."""
        part = super().__new__(cls, *record)
        part.rows = start, total
        return part


# A copy of a state, queued on the device: calling it, in any thread, waits for the copy and returns its bytes. The
# next snapshot may reuse the memory.
Snapshot = Callable[[], dict[str, Stored]]
Description = tuple[str, tuple[int, ...]]

# Names of dtypes in a safetensors header, by the names that numpy and the frameworks have for them.
DTYPE_NAMES = {
    **{f"float{bits}": f"F{bits}" for bits in (64, 32, 16)},
    "bfloat16": "BF16",
    **{f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)},
    **{f"uint{bits}": f"U{bits}" for bits in (64, 32, 16, 8)},
    "bool": "BOOL",
}
# What belongs to a policy, and to a framework: a run that changes it starts these anew.
OF_POLICY = ("scale.", "amax.", "narrow.")
OF_BACKEND = ("rng.", "amax.", "narrow.")
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bf16: its codes
_FORMATS = {"BF16": BF16, "F16": FP16}
_WORDS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def find_dtype(name: str, known: Mapping[str, T]) -> T:
    """Returns the dtype that a checkpoint names."""
    if name not in known:
        raise StateError(f"a stored tensor has dtype {name}; known are {', '.join(known)}")
    return known[name]


def check_same(
    ours: Mapping[str, Description], given: Mapping[str, Description], *, optional: Collection[str] = ()
) -> None:
    """Refuses a state of another model, optimizer or precision: names, shapes and dtypes must agree.

    `optional` names may be on one side only, such as the random state of a device that the run no longer has. The
    loss scale may be left out as a whole (`scaling.saved_scale`).
    """
    if "scale.scale" not in given:
        ours = {name: value for name, value in ours.items() if not name.startswith("scale.")}
    left, right = (names.keys() - set(optional) for names in (ours, given))
    if left != right:
        odd = sorted(left ^ right)
        where = "the checkpoint lacks" if odd[0] in left else "the run has no"
        raise StateError(
            f"the checkpoint is from another run: {where} `{odd[0]}` ({len(odd)} names differ)",
            hint="resume with the model and optimizer it was saved with",
        )
    for name in sorted(left):
        if not name.startswith("rng.") and tuple(given[name]) != tuple(ours[name]):
            raise StateError(
                f"`{name}` is {_describe(given[name])} in the checkpoint and {_describe(ours[name])} in the run",
                hint="resume with the model and policy it was saved with",
            )


def widen(held: Stored, remainder: Stored | None = None) -> NDArray[np.float32]:
    """Returns the fp32 numbers that a tensor stands for, exactly; a split master is joined with its remainder."""
    dtype, shape, data = held
    flat = np.frombuffer(data, _FLOATS[dtype])
    if remainder is not None:
        return split.join(flat, np.frombuffer(remainder[2], "<i2")).reshape(shape)
    wide = (flat.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else flat.astype(np.float32)
    return wide.reshape(shape)


def convert(
    given: Mapping[str, Stored],
    ours: Mapping[str, Stored],
    formats: Mapping[str, Format] | None = None,
    anew: tuple[str, ...] = OF_POLICY,
) -> dict[str, Stored]:
    """Returns a state that another policy or backend saved as this run holds it, exactly, or refuses it.

    `ours` is the state of the fresh run: it says how each tensor is held, and what starts `anew` is its own.
    `formats` are those of masters and moments: emulated ones are held wider.
    """
    converted = {name: value for name, value in ours.items() if name.startswith(anew)}
    lossy: dict[str, str] = {}
    for name, held in given.items():
        if name.startswith((*anew, "remainder.")):
            continue
        want, half = ours.get(name), f"remainder.{name.removeprefix('model.')}"
        converted[name] = held
        if want is None or {held.dtype, want.dtype} - _FLOATS.keys():
            continue  # `check_same` compares the names and the rest
        fmt = (formats or {}).get(name, FP32)
        fmt = fmt if half in ours or want.dtype == "F32" else _FORMATS[want.dtype]
        if half in given and half in ours:
            converted[half] = given[half]
        elif half in ours:
            codes, rest = split.split(widen(held))
            converted[name] = Stored("BF16", held.shape, codes.astype("<u2").tobytes())
            converted[half] = Stored("I16", held.shape, rest.astype("<i2").tobytes())
        elif half in given or held.dtype != want.dtype or fmt != FP32:
            wide = widen(held, given.get(half))
            lost = 0 if fmt == FP32 else int(np.count_nonzero(cast(wide, fmt, overflow="saturate") != wide))
            if lost:
                lossy[name] = f"`{name}` would be held in {fmt}: {lost:,} of its {wide.size:,} numbers do not fit"
            else:
                converted[name] = _store(wide, want.dtype)
    if lossy:
        more = f", nor do those of {len(lossy) - 1} other tensors" if len(lossy) > 1 else ""
        raise PolicyChangeError(
            f"this policy would round what the run has learned: {next(iter(lossy.values()))}{more}",
            hint="choose a policy that holds masters and moments as wide as before (`param`, `moments`), such as "
            "bf16-mixed or fp16-mixed; a new run may round them, with --init and this policy",
        )
    return converted


def _store(wide: NDArray[np.float32], dtype: str) -> Stored:
    """Returns fp32 numbers in a format that holds them exactly."""
    numbers: NDArray[Any] = wide.view(np.uint32) >> 16 if dtype == "BF16" else wide
    return Stored(dtype, wide.shape, numbers.astype(_FLOATS[dtype]).tobytes())


def _describe(description: Description) -> str:
    dtype, shape = description
    return f"{_WORDS.get(dtype, dtype.lower())} of shape {tuple(shape)}"
