"""Model, optimizers, scale and random state as flat {name: tensor}, and back, bit for bit.

    model.<parameter>                       masters, in the format they are held in
    optimizer.<i>.<parameter>.<moment>      moments, in their own format, never in the parameter's
    scale.<field>, applied                  the law of scaling, and how many updates were applied
    rng.cpu, rng.cuda                       random state, as bytes

Loading checks names, shapes and dtypes before it changes anything: fp32 moments never come back bf16.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.core.errors import HalfstepError
from halfstep.core.scaling import ScaleState
from halfstep.torch.step import Run

# Names of dtypes in a safetensors header.
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# (dtype name, shape, bytes): what a checkpoint stores, whatever framework made it.
Stored = tuple[str, tuple[int, ...], bytes]


def state_of(run: Run) -> dict[str, Tensor]:
    """Every tensor that the next step depends on. They are the live ones, not copies."""
    state = {f"model.{name}": p.detach() for name, p in run.model.named_parameters()}
    for index, optimizer in enumerate(run.optimizers):
        for parameter, name in optimizer.names.items():
            for key, value in optimizer.state[parameter].items():
                state[f"optimizer.{index}.{name}.{key}"] = value
    state |= {f"scale.{field}": value for field, value in run.scale_state._asdict().items()}
    state["applied"] = run.applied
    state["rng.cpu"] = torch.get_rng_state()
    if run.device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(run.device)
    return state


@torch.no_grad()
def load_state(run: Run, given: Mapping[str, Tensor]) -> None:
    """Puts a state back. One of another model, optimizer or precision is refused whole."""
    # Random state of a device that the run did not have, or has no more, is no part of what it computed.
    ours, theirs = ({k for k in names if k != "rng.cuda"} for names in (state_of(run), given))
    state = state_of(run)
    if ours != theirs:
        odd = sorted(ours ^ theirs)
        where = "the checkpoint lacks" if odd[0] in ours else "the run has no"
        raise HalfstepError(
            f"the checkpoint is of another run: {where} `{odd[0]}` ({len(odd)} names differ)",
            hint="resume with the model and optimizer it was saved with",
        )
    for name in sorted(ours):
        was, now = given[name], state[name]
        if (was.shape, was.dtype) != (now.shape, now.dtype) and not name.startswith("rng."):
            raise HalfstepError(
                f"`{name}` is {_told(was)} in the checkpoint and {_told(now)} in the run",
                hint="resume with the model and policy it was saved with",
            )
    for name in ours - {"rng.cpu"}:
        state[name].copy_(given[name])
    run.scale_state = ScaleState(*(given[f"scale.{f}"].to(run.device) for f in ScaleState._fields))
    torch.set_rng_state(given["rng.cpu"].cpu())
    if run.device.type == "cuda" and "rng.cuda" in given:
        torch.cuda.set_rng_state(given["rng.cuda"].cpu(), run.device)


def stored(tensor: Tensor) -> Stored:
    """A tensor's bytes, little-endian, with its dtype and shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().tobytes()


def restored(record: Stored) -> Tensor:
    """The tensor that `stored` wrote."""
    name, shape, data = record
    if name not in _DTYPES:
        raise HalfstepError(f"a stored tensor has dtype {name}; known are {', '.join(_DTYPES)}")
    if not data:
        return torch.empty(shape, dtype=_DTYPES[name])
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[name]).reshape(shape)


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
