"""Weights in 4 or 2 bits: which numbers a matrix becomes."""

import numpy as np
import pytest

from halfstep.tools.export.blocks import round_matrices, round_matrix

CASES = [(bits, block) for bits in (4, 2) for block in (32, 64, 128)]


def drawn(outputs=5, inputs=200):
    return np.random.default_rng(0).standard_normal((outputs, inputs)).astype(np.float32)


def pieces(matrix, block):
    """The blocks of a matrix; the last of each row may be shorter."""
    return [row[start : start + block] for row in matrix for start in range(0, len(row), block)]


@pytest.mark.parametrize(("bits", "block"), CASES)
def test_each_block_is_a_few_multiples_of_one_scale(bits, block):
    for piece in pieces(round_matrix(drawn(), bits, block), block):
        scale = piece[np.abs(piece).argmax()] / np.float32(-(2 ** (bits - 1)))  # the largest has the lowest code
        codes = np.rint(piece / scale)
        assert set(codes) <= set(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))
        assert (codes.astype(np.float32) * scale == piece).all()


@pytest.mark.parametrize(("bits", "block"), CASES)
def test_a_rounded_matrix_is_rounded_to_itself(bits, block):
    once = round_matrix(drawn(), bits, block)
    assert round_matrix(once, bits, block).tobytes() == once.tobytes()


@pytest.mark.parametrize(("bits", "block"), CASES)
def test_no_block_is_further_away_than_with_the_scale_that_clips_nothing(bits, block):
    matrix, lowest = drawn(), -(2 ** (bits - 1))
    closer = 0
    for before, after in zip(pieces(matrix, block), pieces(round_matrix(matrix, bits, block), block), strict=True):
        scale = before[np.abs(before).argmax()] / np.float32(lowest)
        plain = np.clip(np.rint(before / scale), lowest, -lowest - 1) * scale
        error, most = (np.square(np.float64(each) - before).sum() for each in (after, plain))
        assert error <= most * (1 + 1e-5)  # both are sums of fp32 numbers
        closer += error < 0.99 * most
    assert closer > 0


def test_blocks_of_zeros_stay_zeros():
    matrix = drawn(3, 64)
    matrix[1] = 0
    rounded = round_matrix(matrix, 4, 32)
    assert not rounded[1].any()
    assert rounded[0].any()


def test_only_matrices_that_are_multiplied_are_rounded_and_each_says_how_far():
    weights = {"embed.weight": drawn(), "final_norm.weight": drawn()[0], "blocks.0.mlp.up.weight": drawn(4, 64)}
    rounded, errors = round_matrices(weights, 2, 64)
    assert all((rounded[name] == weights[name]).all() for name in ("embed.weight", "final_norm.weight"))
    name = "blocks.0.mlp.up.weight"
    assert list(errors) == [name]
    distance = np.sqrt(np.square(np.float64(rounded[name]) - weights[name]).sum())
    assert errors[name] == pytest.approx(distance / np.sqrt(np.square(np.float64(weights[name])).sum()), rel=1e-6)
    assert 0.2 < errors[name] < 0.6  # of 2 bits: to be seen, not hidden
