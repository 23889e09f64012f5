"""Shuffle the items of an epoch: a stored permutation, or for large data sets one computed place by place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

LARGE = 1 << 24
"""Fewest items for which `epoch_order` returns a `LargeOrder`."""
ROUNDS = 8
BLOCK = 4096
"""Places that `LargeOrder` computes at once."""


class EpochOrder(Sampler[int]):
    """A random permutation of 0..n-1, fixed by `seed` and `epoch`.

    `state_dict` and `load_state_dict` carry the position: the first iteration after a load continues with the next
    index, later ones begin at the start. `set_epoch` chooses the next epoch's permutation.
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one item, got n={n}")
        self.n = n
        self.seed = seed
        self.epoch = epoch
        self.position = 0
        self._resume = False

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        start = self.position if self._resume else 0
        self._resume = False
        for place, index in enumerate(self.items(start), start):
            self.position = place + 1
            yield index

    def items(self, start: int) -> Iterator[int]:
        """Iterate over the indices from place `start` on."""
        return iter(self.permutation()[start:].tolist())

    def permutation(self) -> Tensor:
        """Return the order of the whole epoch, `[n]`."""
        word = hashlib.sha256(f"{self.seed}:{self.epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(word[:7], "big"))
        return torch.randperm(self.n, generator=generator)

    def set_epoch(self, epoch: int) -> None:
        """Choose an epoch; a change of epoch resets the position."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0
            self._resume = False

    def state_dict(self) -> dict[str, Any]:
        """Return the order's identity and its position, the number of indices yielded in this epoch."""
        return {"n": self.n, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; raise `ValueError` if it belongs to another order."""
        for name in ("n", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved order has {name}={state[name]}, not {getattr(self, name)}: data or seed changed"
                )
        if not 0 <= state["position"] <= self.n:
            raise ValueError(f"the saved position must lie in 0..{self.n}, got {state['position']}")
        self.epoch = state["epoch"]
        self.position = state["position"]
        self._resume = True


class LargeOrder(EpochOrder):
    """A random permutation of 0..n-1 that computes any place alone and stores no list of n items.

    A Feistel network of eight rounds permutes the numbers of 2 b bits, the smallest even width that holds n. A result
    of n or more goes through the network again until it is below n (at most four times on average). The round function
    is SplitMix64's finaliser, with a key for each round from SHA-256 of seed and epoch.
    """

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        super().__init__(n, seed, epoch)
        self.bits = max(1, -(-(n - 1).bit_length() // 2))

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the items at `places`, int64; raise `ValueError` for a place outside 0..n-1."""
        if len(places) and not 0 <= places.min() <= places.max() < self.n:
            raise ValueError(f"places must lie in 0..{self.n - 1}, got {places.min()} to {places.max()}")
        items = self._network(places.astype(np.uint64))
        while (outside := items >= self.n).any():
            items[outside] = self._network(items[outside])
        return items.astype(np.int64)

    def permutation(self) -> Tensor:
        """Return the order of the whole epoch, `[n]`."""
        return torch.from_numpy(self.at(np.arange(self.n)))

    def items(self, start: int) -> Iterator[int]:
        """Iterate over the indices from place `start` on."""
        for first in range(start, self.n, BLOCK):
            yield from self.at(np.arange(first, min(self.n, first + BLOCK))).tolist()

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


def epoch_order(n: int, seed: int, epoch: int) -> EpochOrder:
    """Return the order of an epoch over n items: an `EpochOrder` if n < `LARGE`, else a `LargeOrder`."""
    return EpochOrder(n, seed, epoch) if n < LARGE else LargeOrder(n, seed, epoch)
