"""Philox4x32-10: random words that depend only on where they are used.

Stochastic rounding must round the same element the same way on every replica, on every shard and on every
backend, whatever the order of computation. So the words are not a stream but a function

    word = philox(key = seed, counter = (element, tensor, step))

of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A counter of four 32-bit words and
a key of two go through ten rounds of

    high0, low0 = M0 * c0            M0 = 0xD2511F53       64-bit products of 32-bit words, in two halves
    high1, low1 = M1 * c2            M1 = 0xCD9E8D57
    c0, c1, c2, c3 = high1 ^ c1 ^ k0,  low1,  high0 ^ c3 ^ k1,  low0

and between rounds the key advances, modulo 2^32: k0 += 0x9E3779B9, k1 += 0xBB67AE85. The map is a permutation of
the counters, so no block of words comes twice. It passes BigCrush. **The layout**, which all backends share:

    block, lane = element // 4, element % 4     element: row-major index in the whole tensor, from 0
    counter     = (block mod 2^32, block >> 32, tensor id, step)
    key         = (seed mod 2^32, seed >> 32)
    word        = output[lane]

The known answers of Random123 are in tests/core/test_philox.py; a port must give them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2s
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from halfstep.core.errors import RandomBitsError

Words: TypeAlias = NDArray[np.uint32]
Word = TypeVar("Word", bound=Any)

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Returns four random words for each counter, whose words are arrays of one shape, or broadcast."""
    words = np.broadcast_arrays(*(np.asarray(word, np.uint32).astype(np.uint64) for word in counter))
    keys = [(np.uint64(k0), np.uint64(k1)) for k0, k1 in round_keys(key)]

    def product(word: NDArray[np.uint64], multiplier: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        whole = word * np.uint64(multiplier)
        return whole >> _HALF, whole & _MASK

    c0, c1, c2, c3 = (word.astype(np.uint32) for word in rounds(words, keys, product))
    return c0, c1, c2, c3


def round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the two words of the key in each of the ten rounds."""
    (k0, k1), (step0, step1) = key, KEY_STEPS
    return [((k0 + turn * step0) % 2**32, (k1 + turn * step1) % 2**32) for turn in range(10)]


def rounds(
    counter: Sequence[Word], keys: Iterable[tuple[Any, Any]], product: Callable[[Word, int], tuple[Word, Word]]
) -> tuple[Word, Word, Word, Word]:
    """Computes the ten rounds on the words of any framework, each below 2^32 in an integer type of any width.

    `product` multiplies a word by a constant and returns the high and the low half.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        (high0, low0), (high1, low1) = product(c0, MULTIPLIERS[0]), product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def random_bits(shape: int | tuple[int, ...], *, seed: int, step: int, tensor: int, start: int = 0) -> Words:
    """Returns a random word for each element of a tensor, or of a run of elements that begins at `start`.

    A shard passes the row-major index of its first element in the whole tensor as `start`, and gets the words
    that the whole tensor has there. A shard that is cut along a later dimension is several runs.
    """
    dimensions = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    count = math.prod(_within("shape", size, 2**63) for size in dimensions)
    seed = _within("seed", seed, 2**64)
    step = _within("step", step, 2**32)
    tensor = _within("tensor", tensor, 2**32, "tensor_id(name) makes an id from a qualified name")
    start = _within("start", start, 2**63 - count)
    first, last = start // 4, -(-(start + count) // 4)
    block = np.arange(first, last, dtype=np.uint64)
    low, high = (block & _MASK).astype(np.uint32), (block >> _HALF).astype(np.uint32)
    counter = (low, high, np.array(tensor, np.uint32), np.array(step, np.uint32))
    lanes = np.stack(philox4x32(counter, (seed % 2**32, seed >> 32)), axis=-1)
    return lanes.reshape(-1)[start - 4 * first :][:count].reshape(dimensions)


def tensor_id(name: str) -> int:
    """Returns 32 bits for a qualified name, the same in every process: its 4-byte blake2s, little-endian."""
    return int.from_bytes(blake2s(name.encode(), digest_size=4).digest(), "little")


def _within(name: str, value: int, limit: int, hint: str | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < limit:
        raise RandomBitsError(
            f"`{name}` is {value!r}; random words need an integer from 0 to {limit - 1}",
            hint=hint or "all replicas and shards must agree on it",
        )
    return int(value)
