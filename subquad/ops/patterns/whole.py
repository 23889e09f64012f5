"""Patterns without a bound on how far a query looks: everything, or everything before, and parts of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subquad.ops.patterns.base import Pattern


@dataclass(frozen=True)
class Full(Pattern):
    """Every key."""

    causal: ClassVar[bool] = False

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """All."""
        return torch.ones_like(q_pos == k_pos)

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Causal(Pattern):
    """The query's own token and every earlier one."""

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k <= q`."""
        return k_pos <= q_pos

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """Where the keys end before the first query's successor."""
        return k_stop <= q_start + 1

    def is_triangle(self, start: int, stop: int) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Prefix(Pattern):
    """The first `length` tokens are seen by all (also by one another, both ways); the rest is causal.

    Perceiver AR's V1 treats its history so (arXiv:2412.06106, section 4.1).
    """

    causal: ClassVar[bool] = False
    length: int

    def least(self, field: str) -> int:
        """An empty prefix is plain causal attention."""
        return 0

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k <= q` or `k < length`."""
        return (k_pos <= q_pos) | (k_pos < self.length)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Up to the last query or the prefix's end."""
        return 0, max(q_stop, self.length)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """The prefix's queries apart from the rest."""
        return [q_start, *([self.length] if q_start < self.length < q_stop else [])]

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """The prefix, or keys before the first query's successor."""
        return k_stop <= max(self.length, q_start + 1)

    def is_triangle(self, start: int, stop: int) -> bool:
        """After the prefix."""
        return start >= self.length


@dataclass(frozen=True)
class Suffix(Pattern):
    """Only queries from position `start` on exist, and they are causal; earlier rows see nothing and give zeros.

    Perceiver AR's first layer, drawn over the whole sequence: latents are the suffix (arXiv:2202.07765, section 3.1).
    """

    start: int

    def least(self, field: str) -> int:
        """A suffix from 0 is plain causal attention."""
        return 0

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`start <= q` and `k <= q`."""
        return (k_pos <= q_pos) & (q_pos >= self.start)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Nothing for rows before `start`."""
        return 0, 0 if q_stop <= self.start else q_stop

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """The rows before `start` apart from the rest."""
        return [q_start, *([self.start] if q_start < self.start < q_stop else [])]

    def is_triangle(self, start: int, stop: int) -> bool:
        """In the suffix."""
        return start >= self.start
