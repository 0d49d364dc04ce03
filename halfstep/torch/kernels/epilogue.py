"""A matmul that computes a GELU as it ends, and one that computes its gradient: cuBLASLt's, which torch lacks.

    linear_gelu         h = x w + bias,  act = gelu(h)     one matmul that writes both       (GELU_AUX_BIAS)
    linear_gelu_grad    dh = (g w) gelu'(h)                one matmul that also reads h      (DGELU)

Otherwise h is read once more for act, and g w is written and read once more for dh. Each result is rounded once,
from the fp32 sum: act is not that of a rounded h. gelu is the tanh approximation. Where there is no GPU the
operations compute the same in torch's functions.

**By its C interface**, with the names and numbers of cublasLt.h, the same in 11.6 and 13.1. Handle and stream are
torch's. The algorithm is the first that cuBLASLt proposes, or one that was faster on an H200 if it is proposed: it
follows from sizes and alignment, and nothing is timed. cuBLASLt's matrices are column-major: row-major ones are
their transposes, so left and right change places, and the bias of a column is a row's.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from halfstep.core.errors import UnsupportedModelError
from halfstep.torch.kernels.activations import gelu
from halfstep.torch.numerics.dtypes import STANDS_FOR, describe

HOPPER = (9, 0)  # older GPUs are not measured

COMPUTE_32F, FP32 = 68, 0  # cublasComputeType_t, cudaDataType_t
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
TRANSA, EPILOGUE, BIAS, AUX, AUX_LD = 3, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
GELU_AUX, GELU_AUX_BIAS, DGELU = 160, 164, 192  # cublasLtEpilogue_t
MAX_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t; of A, B, C, D
TILE, CLUSTER = 1, 8  # cublasLtMatmulAlgoConfigAttributes_t
# Of matmuls that write two results: tiles of 96 x 128 in clusters of 2 x 1 took 3 to 5 % less time than the first.
FASTER = {GELU_AUX: (28, 3), GELU_AUX_BIAS: (28, 3)}
PROPOSED, WORKSPACE = 8, 32 << 20
ONE, ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


# --- the operations, opaque to compilers


@torch.library.custom_op("halfstep::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns h = x w + bias and gelu(h), of contiguous rows."""
    if not x.is_cuda:
        wide = x.float() @ w.float()
        wide = wide if bias is None else wide + bias.float()
        return wide.to(x.dtype), gelu(wide).to(x.dtype)
    h, act = (x.new_empty(x.shape[0], w.shape[1]) for _ in range(2))
    _multiply(x, w, act, h, bias, GELU_AUX if bias is None else GELU_AUX_BIAS)
    return h, act


@linear_gelu.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w.shape[1]), x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("halfstep::linear_gelu_grad", mutates_args=())
def linear_gelu_grad(h: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """Returns (g w) gelu'(h), of contiguous rows."""
    if not g.is_cuda:
        wide = torch.ops.aten.gelu_backward(g.float() @ w.float(), h.float(), approximate="tanh")
        return wide.to(h.dtype)  # type: ignore[no-any-return]
    out = torch.empty_like(h)
    _multiply(g, w, out, h, None, DGELU)
    return out


@linear_gelu_grad.register_fake
def _(h: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(h)


@register_flop_formula(torch.ops.halfstep.linear_gelu)
def _(x: tuple[int, int], w: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * w[1]


@register_flop_formula(torch.ops.halfstep.linear_gelu_grad)
def _(h: tuple[int, int], g: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * h[0] * h[1] * g[1]


def device_lacks(device: torch.device) -> str:
    """Returns what a device lacks for it; empty if nothing."""
    if device.type not in ("cuda", *STANDS_FOR):
        return "it needs an NVIDIA GPU"
    hardware = describe(device)
    if hardware.kind != "nvidia" or hardware.capability is None or hardware.capability < HOPPER:
        return "it needs an NVIDIA GPU of compute capability 9.0 or higher"
    return "torch has no cuBLASLt that can be called" if device.type == "cuda" and library() is None else ""


# What torch.compiler.assume_constant_result does, which takes a second and a half to import all of dynamo.
device_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- cuBLASLt


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Returns the cuBLASLt that torch has loaded; None if torch has none, or it is part of torch itself."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


def _multiply(left: Tensor, w: Tensor, out: Tensor, aux: Tensor, bias: Tensor | None, epilogue: int) -> None:
    turned = not w.is_contiguous()
    right = w.t().contiguous() if turned else w  # a weight's transpose is contiguous already
    sizes = tuple((*t.shape, t.stride(0)) for t in (right, left, out))
    pointers = (right, left, out, aux, *(() if bias is None else (bias,)))
    aligned = tuple(min(256, t.data_ptr() & -t.data_ptr()) for t in pointers)
    with torch.cuda.device(out.device):
        plan = _plan(out.get_device(), TYPES[out.dtype], epilogue, turned, sizes, aligned)
        plan.run(left, right, out, aux, bias)


@cache
def _plan(*key: Any) -> "Plan":
    return Plan(*key)


class Plan:
    """A matmul of some sizes with an epilogue: its descriptors, and the algorithm that runs it."""

    def __init__(
        self, device: int, dtype: int, epilogue: int, turned: bool, sizes: tuple[tuple[int, int, int], ...],
        aligned: tuple[int, ...],
    ):  # fmt: skip
        self.description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), COMPUTE_32F, FP32)
        self._set(TRANSA, ctypes.c_int32(int(turned)))
        self._set(EPILOGUE, ctypes.c_uint32(epilogue))
        self._set(AUX_LD, ctypes.c_int64(sizes[2][2]))
        for attribute, place in zip((AUX, BIAS), aligned[3:], strict=False):
            self._set(attribute, ctypes.c_void_p(place))  # whose alignment counts
        self.layouts = [_layout(dtype, *size) for size in sizes]
        self.algorithm = self._algorithm(aligned[:3], FASTER.get(epilogue))

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), size)

    def _algorithm(self, aligned: tuple[int, ...], faster: tuple[int, int] | None) -> Any:
        preference, count, results = ctypes.c_void_p(), ctypes.c_int(), (Heuristic * PROPOSED)()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        values: list[tuple[int, Any]] = [(MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE))]
        values += zip(ALIGNMENTS, map(ctypes.c_uint32, (*aligned, aligned[-1])), strict=True)
        for attribute, value in values:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            _call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)
        given = (_handle(), self.description, *self.layouts, self.layouts[-1], preference, PROPOSED)
        _call("cublasLtMatmulAlgoGetHeuristic", *given, results, ctypes.byref(count))
        _call("cublasLtMatmulPreferenceDestroy", preference)
        found = [result.algorithm for result in results[: count.value] if result.state == 0]
        if not found:
            raise UnsupportedModelError(
                "cuBLASLt has no matmul with a GELU for the sizes of these layers",
                hint="report it, please; uncompiled, the model runs without it",
            )
        return next((each for each in found if _form(each) == faster), found[0])

    def run(self, left: Tensor, right: Tensor, out: Tensor, aux: Tensor, bias: Tensor | None) -> None:
        """Multiplies, on torch's current stream."""
        self._set(AUX, ctypes.c_void_p(aux.data_ptr()))
        if bias is not None:
            self._set(BIAS, ctypes.c_void_p(bias.data_ptr()))
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=out.device)
        a, b, d = (ctypes.c_void_p(matrix.data_ptr()) for matrix in (right, left, out))
        of_a, of_b, of_d = self.layouts
        _call(
            "cublasLtMatmul", _handle(), self.description, ctypes.byref(ONE), a, of_a, b, of_b, ctypes.byref(ZERO),
            d, of_d, d, of_d, ctypes.byref(self.algorithm), ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip


def _form(algorithm: Any) -> tuple[int, int]:
    """Returns tile and cluster of an algorithm."""
    tile, cluster, written = ctypes.c_uint32(), ctypes.c_uint16(), ctypes.c_size_t()
    for attribute, value in ((TILE, tile), (CLUSTER, cluster)):
        size = ctypes.c_size_t(ctypes.sizeof(value))
        given = (ctypes.byref(algorithm), attribute, ctypes.byref(value), size, ctypes.byref(written))
        _call("cublasLtMatmulAlgoConfigGetAttribute", *given)
    return tile.value, cluster.value


def _handle() -> ctypes.c_void_p:
    """Returns torch's handle of cuBLAS on the current device, which cuBLASLt takes as one of its own."""
    return ctypes.c_void_p(torch.cuda.current_blas_handle())


def _layout(dtype: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    made, sizes = ctypes.c_void_p(), (ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(stride))
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(made), dtype, *sizes)
    return made


def _call(name: str, *args: Any) -> None:
    status = getattr(library(), name)(*args)
    if status:
        raise RuntimeError(f"{name} returned {status}")
