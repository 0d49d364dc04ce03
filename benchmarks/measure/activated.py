"""A matmul with an activation function in its epilogue, for Hopper: fewer passes over the memory.

    forward(x, weight, bias)      h = x weight^T + bias, y = act(h)      writes both and reads neither
    backward(grad, weight, h)     dh = (grad weight) act'(h)             never writes grad weight

`act` is GELU (by tanh or exact) or ReLU^2. h is rounded before `act` sees it: y is act of the h that is kept, as
if torch had computed one after the other. dh is rounded once, where torch also rounds grad weight.

1. As many programs as the device runs at once take one block of the result after the other, those of a group of
   rows first, so that blocks that are at work share rows and columns in the cache.
2. Blocks come from and go to memory by descriptors (TMA), which also mind the edges: rows of every matrix must
   begin at multiples of 16 bytes.
3. The epilogue works on `PARTS` of a block in turn, so that it needs less shared memory for what it writes.

It moves into halfstep if a GPU shows that it is faster (epilogue.py).
"""

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from halfstep.torch.kernels.launch import launch

Kind = Literal["gelu", "gelu_exact", "relu2"]


class Form(NamedTuple):
    """How blocks are cut and who works on them."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    warps: int = 8
    stages: int = 3
    parts: int = 2  # of a block's columns, in the epilogue: 1 or 2
    per_unit: int = 1  # programs for each multiprocessor
    flatten: bool = True  # loads for the next block begin during the epilogue


FORM = Form()
GROUP = 8  # blocks of rows that are taken together


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: Kind, form: Form = FORM
) -> tuple[Tensor, Tensor]:
    """Returns x weight^T + bias and act of it, of contiguous matrices."""
    hidden = x.new_empty((x.shape[0], weight.shape[0]))
    out = torch.empty_like(hidden)
    _launch(x, weight, bias, hidden, out, kind, form, backward=False)
    return hidden, out


def backward(grad: Tensor, weight: Tensor, hidden: Tensor, kind: Kind, form: Form = FORM) -> Tensor:
    """Returns grad weight times act' of `hidden`: its gradient, if `grad` is that of act(hidden) weight^T."""
    out = torch.empty_like(hidden)
    _launch(grad, weight, None, hidden, out, kind, form, backward=True)
    return out


def _launch(
    left: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, out: Tensor, kind: Kind, form: Form, *,
    backward: bool,
) -> None:  # fmt: skip
    (rows, columns), inner = hidden.shape, left.shape[1]
    if not hidden.numel():
        return
    blocks = triton.cdiv(rows, form.rows) * triton.cdiv(columns, form.columns)
    programs = min(blocks, _units(left.device) * form.per_unit)
    written = [form.rows, form.columns // form.parts]
    multiplied = [form.depth, form.columns] if backward else [form.columns, form.depth]
    described = (
        TensorDescriptor.from_tensor(left, [form.rows, form.depth]),
        TensorDescriptor.from_tensor(weight, multiplied),
        TensorDescriptor.from_tensor(hidden, written),
        TensorDescriptor.from_tensor(out, written),
    )
    has_bias = bias is not None
    cut = (*form[:3], GROUP, form.parts, form.flatten)
    sizes = (rows, columns, inner, programs)
    # Triton compiles anew for integers that are multiples of 16, and for 1.
    kinds = [(number % 16 == 0, number == 1) for number in sizes]
    aligned = bias is None or bias.data_ptr() % 16 == 0
    key = (left.dtype, *kinds, aligned, kind, backward, has_bias, form, GROUP)
    options: dict[str, Any] = {"num_warps": form.warps, "num_stages": form.stages}
    given = (*described, hidden if bias is None else bias, *sizes, kind, backward, has_bias, *cut)
    launch(_matmul, key, left, programs, *given, **options)


@cache
def _units(device: torch.device) -> int:
    """Returns the number of multiprocessors; interpreted programs run one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _matmul(
    lefts, weights, hiddens, outs, biases, rows, columns, inner, programs, KIND: tl.constexpr,
    BACKWARD: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    down = (rows + ROWS - 1) // ROWS  # tl.cdiv is compiled, also where this is interpreted
    across = (columns + COLUMNS - 1) // COLUMNS
    steps = (inner + DEPTH - 1) // DEPTH
    PART: tl.constexpr = COLUMNS // PARTS
    for block in tl.range(tl.program_id(0), down * across, programs, flatten=FLATTEN):
        first = block // (GROUP * across) * GROUP
        size = min(down - first, GROUP)
        within = block % (GROUP * across)
        row = (first + within % size) * ROWS
        column = within // size * COLUMNS
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for step in range(steps):
            left = lefts.load([row, step * DEPTH])
            right = weights.load([step * DEPTH, column] if BACKWARD else [column, step * DEPTH])
            total = tl.dot(left, right if BACKWARD else right.T, total, input_precision="ieee")
        if PARTS == 1:
            _finish(total, hiddens, outs, biases, row, column, columns, PART, KIND, BACKWARD, BIAS)
        else:
            one, two = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, PART)), (0, 2, 1)))
            _finish(one, hiddens, outs, biases, row, column, columns, PART, KIND, BACKWARD, BIAS)
            _finish(two, hiddens, outs, biases, row, column + PART, columns, PART, KIND, BACKWARD, BIAS)


@triton.jit
def _finish(
    total, hiddens, outs, biases, row, column, columns, PART: tl.constexpr, KIND: tl.constexpr,
    BACKWARD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Writes a part of a block."""
    if BACKWARD:
        hidden = hiddens.load([row, column]).to(tl.float32)
        outs.store([row, column], (total * _act(hidden, KIND, True)).to(outs.dtype))
    else:
        if BIAS:
            at = column + tl.arange(0, PART)
            total += tl.load(biases + at, at < columns, other=0.0).to(tl.float32)[None, :]
        hidden = total.to(hiddens.dtype)
        hiddens.store([row, column], hidden)
        outs.store([row, column], _act(hidden.to(tl.float32), KIND, False).to(outs.dtype))


@triton.jit
def _act(x, KIND: tl.constexpr, SLOPE: tl.constexpr):
    """Returns the activation function of x, or its derivative."""
    if KIND == "relu2":
        kept = tl.where(x < 0, 0.0, x)  # NaN stays
        found = 2.0 * kept if SLOPE else kept * kept
    elif KIND == "gelu":
        # 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        share = 1.0 / (1.0 + tl.exp(x * (-1.5957691216057308 - 0.07135481627260025 * x * x)))
        slope = 1.5957691216057308 + 0.21406444881780076 * x * x
        found = share + x * share * (1.0 - share) * slope if SLOPE else x * share
    else:
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        found = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x) if SLOPE else x * share
    return found
