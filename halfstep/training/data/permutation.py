"""A keyed permutation: the order of n items, any part of which can be computed without a table.

A place x is written as two digits, l in Z_a and r in Z_b with a = ceil(sqrt n), b = ceil(n / a), and each round
adds a hash (splitmix64's finalizer) of one digit to the other (a Feistel network over numbers instead of bits;
Black and Rogaway, "Ciphers with arbitrary finite domains", 2002):

    l <- l + h(r, key)  mod a            r <- r + h(l, key')  mod b

Subtracting undoes a round, so any number of rounds is a permutation of the a * b pairs. There are up to a - 1 more
pairs than items: a place that leads to no item goes through again until it leads to one, which keeps it a
permutation of the n. Twelve rounds are far more than an order of training data needs.
"""

import math

import numpy as np
from numpy.typing import NDArray

ROUNDS = 12


class Permutation:
    """An order of range(size), keyed by the words of a generator. Index it with an array of places."""

    def __init__(self, size: int, words: np.random.Philox):
        self.size = size
        self.keys = [np.uint64(word) for word in words.random_raw(ROUNDS)]
        self.left = math.isqrt(size - 1) + 1
        self.right = -(-size // self.left)

    def __getitem__(self, places: NDArray[np.int64], /) -> NDArray[np.int64]:
        items = self._permute(places.astype(np.uint64))
        while (outside := items >= self.size).any():
            items[outside] = self._permute(items[outside])
        return items.astype(np.int64)

    def _permute(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self.left), np.uint64(self.right)
        left, right = np.divmod(places, b)
        for even, odd in zip(self.keys[::2], self.keys[1::2], strict=True):
            left = (left + _hash(right ^ even)) % a
            right = (right + _hash(left ^ odd)) % b
        return left * b + right


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the upper 32 bits of splitmix64's finalizer, so that adding a digit does not wrap."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (words ^ (words >> np.uint64(31))) >> np.uint64(32)
