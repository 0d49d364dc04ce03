"""Model, optimizers, scale and random state as flat {name: tensor}, and back, bit for bit.

Names are those of core.stored.
Loading checks names, shapes and dtypes before it changes anything: fp32 moments never come back bf16.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.core.errors import HalfstepError
from halfstep.core.scaling import ScaleState
from halfstep.core.stored import Description, Stored, check_same
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
    state = state_of(run)
    # Random state of a device that the run did not have, or has no more, is no part of what it computed.
    check_same(_described(state), _described(given), optional=["rng.cuda"])
    ours = {name for name in state if name != "rng.cuda"}
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


def _described(state: Mapping[str, Tensor]) -> dict[str, Description]:
    return {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()}
