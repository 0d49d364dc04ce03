"""Weights in 4 or 2 bits: of the numbers that onnxruntime's MatMulNBits holds, those nearest to a model's.

    w ~ q * scale    q from -2^(bits-1) to 2^(bits-1) - 1; one fp32 scale for each block of a row's inputs

The largest number of a block takes the lowest q, so that none is spare. A smaller scale clips it, and rounds the
others less: of a few scales, each block takes the one with the least squared error. The lowest q is in every
block, so that these numbers, rounded again, are the same numbers: onnxruntime's quantizer packs them unchanged.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from halfstep.config.model import is_matmul

Floats = NDArray[np.float32]
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # of the scale that clips nothing
ROWS = 1024  # at once: it takes several times their memory


def round_matrices(
    weights: Mapping[str, Floats], bits: int, block: int
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Returns weights whose matrices are rounded, and how far each is from itself, relative to its norm."""
    rounded, errors = dict(weights), {}
    for name, matrix in weights.items():
        if is_matmul(name):
            rounded[name] = round_matrix(matrix, bits, block)
            distance = np.linalg.norm((rounded[name] - matrix).astype(np.float64))
            errors[name] = float(distance / (np.linalg.norm(matrix.astype(np.float64)) or 1.0))
    return rounded, errors


def round_matrix(matrix: Floats, bits: int, block: int) -> Floats:
    """Returns a matrix (outputs, inputs) rounded by blocks of inputs; the last block may be shorter."""
    parts = range(0, len(matrix), ROWS)
    return np.concatenate([_round_rows(matrix[start : start + ROWS], bits, block) for start in parts])


def _round_rows(rows: Floats, bits: int, block: int) -> Floats:
    outputs, inputs = rows.shape
    blocks = np.pad(rows, ((0, 0), (0, -inputs % block))).reshape(outputs, -1, block)
    lowest = -(2 ** (bits - 1))
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1, keepdims=True), axis=-1)
    best, least = blocks, np.full_like(largest, np.inf)
    for shrink in SHRINKS:
        scale = largest * np.float32(shrink / lowest)
        rounded = np.rint(blocks / np.where(scale == 0, 1, scale)).clip(lowest, -lowest - 1) * scale
        error = np.square(rounded - blocks).sum(axis=-1, keepdims=True)
        best, least = np.where(error < least, rounded, best), np.minimum(error, least)
    return best.reshape(outputs, -1)[:, :inputs]
