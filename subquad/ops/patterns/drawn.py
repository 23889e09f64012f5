"""A pattern that draws blocks at random, the same at every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from subquad.ops.patterns.base import Pattern, multiples

WORD = 2**32 - 1
Number = TypeVar("Number", int, Tensor)


def _mixed(x: Number, salt: int) -> Number:
    """A hash of 32 bits: products spread upwards, shifts downwards, so that no two rounds are one linear map."""
    x = (x + salt) & WORD
    for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D):
        x = ((x ^ (x >> 15)) * factor) & WORD
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Random(Pattern):
    """One random block of `size` tokens for each block of queries: number `index` of `of` such patterns, all disjoint.

    The candidates are all blocks but the first `skip` and those within `back` before and `ahead_blocks` after the
    query's own; with `blocks=0` it is causal and they lie before. They are cut into `of` equal strata, and a hash of
    `seed`, `index` and the query's block draws one block from each. With `blocks` the sequence has that many blocks.
    """

    anchored: ClassVar[bool] = True
    scattered: ClassVar[bool] = True
    size: int
    index: int
    of: int
    skip: int
    back: int
    ahead_blocks: int = 0
    blocks: int = 0
    seed: int = 0

    def least(self, field: str) -> int:
        """A block has a token, and there is at least one draw."""
        return 1 if field in ("size", "of") else 0

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """With `blocks=0`."""
        return self.blocks == 0

    def chosen(self, q_block: Tensor) -> Tensor:
        """The drawn block of each block of queries; -1 where there is no candidate."""
        before = (q_block - self.back - self.skip).clamp(min=0)
        later = (q_block + self.ahead_blocks + 1).clamp(min=self.skip)
        count = before + (self.blocks - later).clamp(min=0) if self.blocks else before
        lo, hi = count * self.index // self.of, count * (self.index + 1) // self.of
        place = lo + self.drawn(q_block) % (hi - lo).clamp(min=1)
        block = torch.where(place < before, self.skip + place, later + place - before)
        return torch.where(hi > lo, block, -1)

    def chosen_by(self, q_block: int) -> int:
        """`chosen` for one block, in whole numbers, which need no device and no tracing."""
        before = max(0, q_block - self.back - self.skip)
        later = max(self.skip, q_block + self.ahead_blocks + 1)
        count = before + max(0, self.blocks - later) if self.blocks else before
        lo, hi = count * self.index // self.of, count * (self.index + 1) // self.of
        if hi == lo:
            return -1
        place = lo + self.drawn(q_block) % (hi - lo)
        return self.skip + place if place < before else later + place - before

    def drawn(self, q_block: Number) -> Number:
        """A random number of 32 bits for each block of queries."""
        return _mixed(_mixed(q_block, _mixed(self.seed & WORD, 1)), _mixed(self.index, 2))

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The drawn block."""
        return k_pos // self.size == self.chosen(q_pos // self.size)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """The drawn blocks of all queries, from the first to the last."""
        chosen = [self.chosen_by(block) for block in range(q_start // self.size, (q_stop - 1) // self.size + 1)]
        chosen = [block for block in chosen if block >= 0]
        return (min(chosen) * self.size, (max(chosen) + 1) * self.size) if chosen else (0, 0)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """One tile a block."""
        return multiples(self.size, q_start, q_stop)

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """A block of queries and the block that it drew."""
        lo, hi = self.key_range(q_start, q_stop)
        return q_start // self.size == (q_stop - 1) // self.size and hi is not None and lo <= k_start and k_stop <= hi
