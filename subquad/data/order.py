"""Shuffle the items of an epoch: a stored permutation, or for large data sets one computed place by place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

LARGE = 1 << 24
"""Fewest items for which `epoch_order` returns a `LargeOrder`."""
ROUNDS = 8
BLOCK = 4096
"""Places that `LargeOrder` computes at once."""


def epoch_order(n: int, seed: int, epoch: int) -> Iterable[int]:
    """Return a random permutation of 0..n-1, fixed by `seed` and `epoch`; `ValueError` for n below 1."""
    if n < 1:
        raise ValueError(f"an order needs at least one item, got n={n}")
    if n >= LARGE:
        return LargeOrder(n, seed, epoch)
    word = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(word[:7], "big"))
    return torch.randperm(n, generator=generator).tolist()


class LargeOrder:
    """A random permutation of 0..n-1 that computes any place alone and stores no list of n items.

    A Feistel network of eight rounds permutes the numbers of 2 b bits, the smallest even width that holds n. A result
    of n or more goes through the network again until it is below n (at most four times on average). The round function
    is SplitMix64's finaliser, with a key for each round from SHA-256 of seed and epoch.
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        self.n, self.seed, self.epoch = n, seed, epoch
        self.bits = max(1, -(-(n - 1).bit_length() // 2))

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self.n, BLOCK):
            yield from self.at(np.arange(first, min(self.n, first + BLOCK))).tolist()

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the items at `places`, int64; raise `ValueError` for a place outside 0..n-1."""
        if len(places) and not 0 <= places.min() <= places.max() < self.n:
            raise ValueError(f"places must lie in 0..{self.n - 1}, got {places.min()} to {places.max()}")
        items = self._network(places.astype(np.uint64))
        while (outside := items >= self.n).any():
            items[outside] = self._network(items[outside])
        return items.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        bits, mask = np.uint64(self.bits), np.uint64((1 << self.bits) - 1)
        left, right = numbers >> bits, numbers & mask
        for key in self._keys():
            left, right = right, left ^ (_mixed(right + key) & mask)
        return left << bits | right

    def _keys(self) -> np.ndarray:
        words = [hashlib.sha256(f"{self.seed}:{self.epoch}:{part}".encode()).digest() for part in range(ROUNDS // 4)]
        return np.frombuffer(b"".join(words), dtype="<u8").astype(np.uint64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014, section 3), modulo 2^64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
