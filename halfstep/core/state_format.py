"""A tensor as a checkpoint holds it, from any framework, and when one state fits another.

State is flat, {name: (dtype, shape, bytes)}, with the same names on every backend:

    model.<parameter>                       masters, in the format they are held in
    optimizer.<i>.<parameter>.<moment>      moments, in their own format, never in the parameter's
    scale.<field>, applied                  the law of scaling, and how many updates were applied
    rng.<device>                            random state, as bytes

Loading checks names, shapes and dtypes before it changes anything: fp32 moments never come back bf16.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from halfstep.core.errors import HalfstepError


class Stored(NamedTuple):
    """A tensor as bytes, row-major and little-endian, whatever framework it comes from."""

    dtype: str  # as in a safetensors header: F32, BF16, I32
    shape: tuple[int, ...]
    data: bytes | memoryview


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
_WORDS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def check_same(
    ours: Mapping[str, Description], given: Mapping[str, Description], *, optional: Collection[str] = ()
) -> None:
    """Refuses a state of another model, optimizer or precision: names, shapes and dtypes must agree.

    `optional` names may be on one side only, such as the random state of a device that the run no longer has.
    """
    left, right = (names.keys() - set(optional) for names in (ours, given))
    if left != right:
        odd = sorted(left ^ right)
        where = "the checkpoint lacks" if odd[0] in left else "the run has no"
        raise HalfstepError(
            f"the checkpoint is from another run: {where} `{odd[0]}` ({len(odd)} names differ)",
            hint="resume with the model and optimizer it was saved with",
        )
    for name in sorted(left):
        if not name.startswith("rng.") and tuple(given[name]) != tuple(ours[name]):
            raise HalfstepError(
                f"`{name}` is {_describe(given[name])} in the checkpoint and {_describe(ours[name])} in the run",
                hint="resume with the model and policy it was saved with",
            )


def _describe(description: Description) -> str:
    dtype, shape = description
    return f"{_WORDS.get(dtype, dtype.lower())} of shape {tuple(shape)}"
