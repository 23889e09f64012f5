"""Patterns of one range of keys: everything, everything before, windows and segments, causal or to both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from subquad.ops.patterns.base import Pattern, multiples

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class Full(Pattern):
    """Every key."""

    causal: ClassVar[bool] = False

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return torch.ones_like(q_pos == k_pos)

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        return True


@dataclass(frozen=True)
class Causal(Pattern):
    """The query's own token and every earlier one."""

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        return k_stop <= q_start + 1

    def is_triangle(self, start: int, stop: int) -> bool:
        return True


@dataclass(frozen=True)
class Prefix(Pattern):
    """The first `length` tokens, seen by all queries (their own included, both ways), and causal keys after them.

    Perceiver AR's V1 uses it for the history (arXiv:2412.06106, section 4.1).
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("length",)
    causal: ClassVar[bool] = False
    length: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos <= q_pos) | (k_pos < self.length)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        return 0, max(q_stop, self.length)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        return [q_start, *([self.length] if q_start < self.length < q_stop else [])]

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """True if the keys lie in the prefix or not after the first query."""
        return k_stop <= max(self.length, q_start + 1)

    def is_triangle(self, start: int, stop: int) -> bool:
        return start >= self.length


@dataclass(frozen=True)
class Suffix(Pattern):
    """Causal for queries from position `start` on; earlier queries see nothing and give zeros.

    Perceiver AR's first layer over the whole sequence: its latents are the suffix (arXiv:2202.07765, section 3.1).
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("start",)
    start: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos <= q_pos) & (q_pos >= self.start)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        return 0, 0 if q_stop <= self.start else q_stop

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        return [q_start, *([self.start] if q_start < self.start < q_stop else [])]

    def is_triangle(self, start: int, stop: int) -> bool:
        return start >= self.start


@dataclass(frozen=True)
class Window(Pattern):
    """The last `width` tokens, including the query's own."""

    width: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos <= q_pos) & (q_pos - k_pos < self.width)

    @property
    def reach(self) -> int:
        return self.width - 1

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """True if the keys are in the last query's window and not after the first query."""
        return q_stop - self.width <= k_start and k_stop <= q_start + 1

    def is_triangle(self, start: int, stop: int) -> bool:
        """True if the block is no larger than the window."""
        return stop - start <= self.width


@dataclass(frozen=True)
class Band(Pattern):
    """A window to both sides: `before` tokens before the query's own and `after` tokens after it."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("before", "after")
    causal: ClassVar[bool] = False
    before: int
    after: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos - k_pos <= self.before) & (k_pos - q_pos <= self.after)

    @property
    def reach(self) -> int:
        return self.before

    @property
    def ahead(self) -> int:
        return self.after


@dataclass(frozen=True)
class Segments(Pattern):
    """The query's own segment of `size` tokens, causally, and the `back` segments before it.

    `size` is LLP's half segment c = s / 2 (Mahmood and Huang 2024, arXiv:2412.06106, section 4.4).
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("back",)
    size: int
    back: int = 1

    @property
    def offset(self) -> int:
        """Tokens by which the first segment is shorter."""
        return 0

    def segment(self, position: Position) -> Position:
        """Return the number of the segment that holds a position."""
        return (position + self.offset) // self.size

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k <= q` and the key's segment is at most `back` segments before the query's."""
        return (k_pos <= q_pos) & (self.segment(k_pos) >= self.segment(q_pos) - self.back)

    @property
    def reach(self) -> int:
        """`(back + 1) size - 1` tokens, from a segment's last query."""
        return (self.back + 1) * self.size - 1

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Keys from the start of the earliest segment that the first query sees."""
        return max(0, (self.segment(q_start) - self.back) * self.size - self.offset), q_stop

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        return multiples(self.size, q_start, q_stop, -self.offset)

    @property
    def period(self) -> int:
        return self.size

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """True if the last query still sees the first key's segment and no key is after the first query."""
        return self.segment(k_start) >= self.segment(q_stop - 1) - self.back and k_stop <= q_start + 1

    def is_triangle(self, start: int, stop: int) -> bool:
        """True if the last query still sees the first key's segment."""
        return self.segment(start) >= self.segment(stop - 1) - self.back


@dataclass(frozen=True)
class Shifted(Segments):
    """Segments with moved boundaries: the first one has only `shift` tokens. Nothing wraps around.

    Half of the heads of LongLoRA's shifted attention see this (Chen et al. 2023, arXiv:2309.12307, section 3.2).
    """

    back: int = 0
    shift: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift >= self.size:
            raise ValueError(f"Shifted.shift must be below its size {self.size}, got {self.shift}")

    @property
    def offset(self) -> int:
        return self.size - self.shift


@dataclass(frozen=True)
class Blocks(Pattern):
    """The query's own block of `size` tokens, `back` blocks before it and `ahead_blocks` after it, all seen whole.

    With neither it is the attention of Perceiver AR's V2 over its history (arXiv:2412.06106, section 4.2).
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("back", "ahead_blocks")
    causal: ClassVar[bool] = False
    size: int
    back: int = 0
    ahead_blocks: int = 0

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`-back <= block(k) - block(q) <= ahead_blocks`."""
        distance = k_pos // self.size - q_pos // self.size
        return (distance >= -self.back) & (distance <= self.ahead_blocks)

    @property
    def reach(self) -> int:
        """`(back + 1) size - 1` tokens, from a block's last query."""
        return (self.back + 1) * self.size - 1

    @property
    def ahead(self) -> int:
        """`(ahead_blocks + 1) size - 1` tokens, from a block's first query."""
        return (self.ahead_blocks + 1) * self.size - 1

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Keys of whole blocks: the queries' own, `back` before and `ahead_blocks` after."""
        first, last = q_start // self.size - self.back, (q_stop - 1) // self.size + self.ahead_blocks
        return max(0, first) * self.size, (last + 1) * self.size

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        return multiples(self.size, q_start, q_stop)

    @property
    def period(self) -> int:
        return self.size

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """True if the last query sees the first key and the first query sees the last key."""
        far = k_start // self.size >= (q_stop - 1) // self.size - self.back
        return far and (k_stop - 1) // self.size <= q_start // self.size + self.ahead_blocks
