"""cuBLASLt's matmuls with an epilogue, by its C interface: torch offers GELU alone, which does not keep its input.

    GELU_AUX, GELU_AUX_BIAS    D = gelu(A B (+ bias)), and aux = A B (+ bias); gelu is the tanh approximation
    DGELU, DGELU_BGRAD         D = (A B) gelu'(aux) (, and bias = the sum of D over its columns)
    BGRADB                     D = A B, and bias = the sum of B over the depth of the product

Names and numbers are those of cublasLt.h 13.1; they have not changed since 11.6.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.torch.kernels import epilogue
from halfstep.torch.kernels.epilogue import COMPUTE_32F, MAX_WORKSPACE, WORKSPACE, Heuristic, library

TYPES = {torch.float32: epilogue.FP32, **epilogue.TYPES}
TRANSA, TRANSB, EPILOGUE, BIAS, AUX, AUX_LD = 3, 4, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
DEFAULT, GELU_AUX, GELU_AUX_BIAS, DGELU, DGELU_BGRAD, BGRADB = 1, 160, 164, 192, 208, 512  # cublasLtEpilogue_t
# cublasLtMatmulAlgoConfigAttributes_t, each with its C type
CONFIG: dict[str, tuple[int, Any]] = {
    "id": (0, ctypes.c_int32),
    "tile": (1, ctypes.c_uint32),
    "split-k": (2, ctypes.c_int32),
    "reduction": (3, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "cluster": (8, ctypes.c_uint16),
}
ALGORITHMS = 8


class LtMatmul:
    """A matmul of row-major matrices whose results go through an epilogue, by one of cuBLASLt's algorithms.

    cuBLASLt's matrices are column-major: row-major ones are their transposes, so left and right change places, and
    a row's bias is one of its columns. `turned` names what is transposed before it is multiplied, as it is stored.
    """

    def __init__(
        self, left: Tensor, right: Tensor, out: Tensor, epilogue: int, aux: Tensor | None = None,
        bias: Tensor | None = None, *, turned: str = "",
    ):  # fmt: skip
        self.library, self.handle, self.kept = library(), ctypes.c_void_p(), (left, right, out, aux, bias)
        self._call("cublasLtCreate", ctypes.byref(self.handle))
        self.describe(left, right, out, epilogue, aux, bias, turned)
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=out.device)
        self.found = self._algorithms()
        self.algorithm = self.found[0]

    def describe(
        self, left: Tensor, right: Tensor, out: Tensor, epilogue: int, aux: Tensor | None, bias: Tensor | None,
        turned: str,
    ) -> None:  # fmt: skip
        """Makes cuBLASLt's descriptors of the matmul and of its matrices."""
        self.description = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(self.description), COMPUTE_32F, TYPES[torch.float32])
        self._set(TRANSA, ctypes.c_int32(int("right" in turned)))
        self._set(TRANSB, ctypes.c_int32(int("left" in turned)))
        self._set(EPILOGUE, ctypes.c_uint32(epilogue))
        if aux is not None:
            self._set(AUX, ctypes.c_void_p(aux.data_ptr()))
            self._set(AUX_LD, ctypes.c_int64(aux.stride(0)))
        if bias is not None:
            self._set(BIAS, ctypes.c_void_p(bias.data_ptr()))
        self.layouts = [self._layout(matrix) for matrix in (right, left, out)]

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self.library, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned {status}")

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), size)

    def _layout(self, matrix: Tensor) -> ctypes.c_void_p:
        made, (rows, columns) = ctypes.c_void_p(), matrix.shape
        sizes = (ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(matrix.stride(0)))
        self._call("cublasLtMatrixLayoutCreate", ctypes.byref(made), TYPES[matrix.dtype], *sizes)
        return made

    def _algorithms(self) -> list[Any]:
        preference, count = ctypes.c_void_p(), ctypes.c_int()
        size = ctypes.c_uint64(WORKSPACE)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        given = (preference, MAX_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8))
        self._call("cublasLtMatmulPreferenceSetAttribute", *given)
        results = (Heuristic * ALGORITHMS)()
        right, left, out = self.layouts
        given = (self.handle, self.description, right, left, out, out, preference, ALGORITHMS)
        self._call("cublasLtMatmulAlgoGetHeuristic", *given, results, ctypes.byref(count))
        found = [result.algorithm for result in results[: count.value] if result.state == 0]
        if not found:
            raise RuntimeError("cuBLASLt has no algorithm for it")
        return found

    def __call__(self) -> None:
        """Runs the matmul on these operands with the chosen algorithm."""
        left, right, out, _, _ = self.kept
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        address = [ctypes.c_void_p(matrix.data_ptr()) for matrix in (right, left, out)]
        layout = self.layouts
        self._call(
            "cublasLtMatmul", self.handle, self.description, ctypes.byref(one), address[0], layout[0], address[1],
            layout[1], ctypes.byref(zero), address[2], layout[2], address[2], layout[2],
            ctypes.byref(self.algorithm), ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def choose_algorithm(self, milliseconds: Callable[[Callable[[], None], int], float]) -> str:
        """Times the algorithms that cuBLASLt proposes, keeps the fastest, and returns its description."""
        times = []
        for self.algorithm in self.found:  # noqa: B020
            try:
                milliseconds(self, 2)
                times.append(milliseconds(self, 5))
            except RuntimeError:
                times.append(float("inf"))
        best = times.index(min(times))
        self.algorithm = self.found[best]
        every = " ".join(f"{ms:.3f}" for ms in times)
        return f"algorithm {best} of {len(self.found)} ({self.config()}), ms of each: {every}"

    def config(self) -> str:
        """Returns what the algorithm is."""
        parts = []
        for name, (attribute, kind) in CONFIG.items():
            value, written = kind(), ctypes.c_size_t()
            size = ctypes.c_size_t(ctypes.sizeof(value))
            given = (ctypes.byref(self.algorithm), attribute, ctypes.byref(value), size, ctypes.byref(written))
            status = self.library.cublasLtMatmulAlgoConfigGetAttribute(*given)
            parts.append(f"{name} {'unknown' if status else value.value}")
        return ", ".join(parts)
