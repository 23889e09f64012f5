"""Patterns of distant keys: fixed keys for all queries, residues, columns, and random blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from subquad.ops.patterns.base import Pattern, multiples
from subquad.ops.patterns.local import Band, Causal, Window

NEAR_ROWS = 128
"""Queries per tile near the first blocks, which need a mask."""
WORD = 2**32 - 1
Number = TypeVar("Number", int, Tensor)


def _near_and_far(size: int, some_from: int, all_from: int, q_start: int, q_stop: int) -> list[int]:
    """Return cuts at `some_from` and `all_from`, and between them one after every `NEAR_ROWS` queries or more."""
    starts = {q_start, *(cut for cut in (some_from, all_from) if q_start < cut < q_stop)}
    first = max(q_start, some_from)
    if first < min(q_stop, all_from):
        starts |= set(multiples(size * -(-NEAR_ROWS // size), first, min(q_stop, all_from)))
    return sorted(starts)


@dataclass(frozen=True)
class Sinks(Pattern):
    """Keys in the first `count` blocks of `size` tokens, if more than `back` blocks before the query's own block.

    Disjoint from `Window(width)` (`size=1, back=width - 1`) and `Segments(size, back)`: see `merge_attention`.
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("count", "back")
    anchored: ClassVar[bool] = True
    count: int
    back: int
    size: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the first blocks."""
        return self.count * self.size

    @property
    def offset(self) -> int:
        """Tokens by which the first block is shorter."""
        return 0

    def block(self, position: Number) -> Number:
        """Return the number of the block that holds a position."""
        return (position + self.offset) // self.size

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k < tokens` and `block(k) < block(q) - back`."""
        return (k_pos < self.tokens) & (self.block(k_pos) < self.block(q_pos) - self.back)

    def seen(self, query: int) -> int:
        """Return how many tokens a query sees, from the first on."""
        return max(0, min(self.tokens, (self.block(query) - self.back) * self.size - self.offset))

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        return 0, self.seen(q_stop - 1)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """Cut between queries that see no block, some blocks and all blocks."""
        some, every = (((b + self.back + 1) * self.size - self.offset) for b in (0, self.block(self.tokens - 1)))
        return _near_and_far(self.size, some, every, q_start, q_stop)

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        return k_stop <= self.seen(q_start)


@dataclass(frozen=True)
class SinkTokens(Sinks):
    """The first `count` tokens more than `back` blocks before the query's; the first block is `offset` shorter.

    Disjoint from `Segments(size, back)` and, with `offset` = size - shift, from `Shifted(size, back, shift)`.
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("count", "back", "offset")
    offset: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offset >= self.size:
            raise ValueError(f"SinkTokens.offset must be below its size {self.size}, got {self.offset}")

    @property
    def tokens(self) -> int:
        return self.count


@dataclass(frozen=True)
class Globals(Pattern):
    """The first `count` blocks of `size` tokens, except those `back` before to `ahead_blocks` after the query's own."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("count", "back", "ahead_blocks")
    causal: ClassVar[bool] = False
    anchored: ClassVar[bool] = True
    count: int
    back: int
    ahead_blocks: int
    size: int = 1

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`block(k) < count` and not `-back <= block(k) - block(q) <= ahead_blocks`."""
        q_block, k_block = q_pos // self.size, k_pos // self.size
        near = (k_block >= q_block - self.back) & (k_block <= q_block + self.ahead_blocks)
        return (k_block < self.count) & ~near

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        return 0, self.count * self.size

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        """Cut between queries near the first blocks and those that see all."""
        return _near_and_far(self.size, 0, (self.count + self.back) * self.size, q_start, q_stop)

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """True if the first query lies far enough after the keys."""
        return k_stop <= min(self.count, max(0, q_start // self.size - self.back)) * self.size


@dataclass(frozen=True)
class Dilated(Pattern):
    """Every `dilation`-th token back from the query's own, `width` of them including its own."""

    width: int
    dilation: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`k <= q`, the distance is a multiple of `dilation` and below `width * dilation`."""
        distance = q_pos - k_pos
        return (distance >= 0) & (distance % self.dilation == 0) & (distance < self.width * self.dilation)

    @property
    def reach(self) -> int:
        return (self.width - 1) * self.dilation

    @property
    def folded(self) -> tuple[int, Pattern]:
        """`Window` over the tokens of one residue."""
        return self.dilation, Window(self.width)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        return multiples(128, q_start, q_stop)


@dataclass(frozen=True)
class DilatedBand(Pattern):
    """Every `dilation`-th token to both sides, `before` and `after` of them, and the query's own."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("before", "after")
    causal: ClassVar[bool] = False
    before: int
    after: int
    dilation: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The distance is a multiple of `dilation`, at most `before` of them back and `after` ahead."""
        distance = q_pos - k_pos
        near = (distance <= self.before * self.dilation) & (distance >= -self.after * self.dilation)
        return near & (distance % self.dilation == 0)

    @property
    def reach(self) -> int:
        return self.before * self.dilation

    @property
    def ahead(self) -> int:
        return self.after * self.dilation

    @property
    def folded(self) -> tuple[int, Pattern]:
        """`Band` over the tokens of one residue."""
        return self.dilation, Band(self.before, self.after)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        return multiples(128, q_start, q_stop)


@dataclass(frozen=True)
class Strided(Pattern):
    """Every `stride`-th token back from the query's own, to the first (Child et al. 2019, arXiv:1904.10509)."""

    stride: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos <= q_pos) & ((q_pos - k_pos) % self.stride == 0)

    @property
    def folded(self) -> tuple[int, Pattern]:
        """`Causal` over the tokens of one residue."""
        return self.stride, Causal()


@dataclass(frozen=True)
class Columns(Pattern):
    """The last `last` tokens of each `size`, up to the query's own (Child et al. 2019, arXiv:1904.10509: "fixed")."""

    size: int
    last: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last > self.size:
            raise ValueError(f"Columns.last must be at most its size {self.size}, got {self.last}")

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos <= q_pos) & (k_pos % self.size >= self.size - self.last)

    @property
    def columns(self) -> tuple[int, int]:
        return self.size, self.last


@dataclass(frozen=True)
class Ranks(Pattern):
    """`Columns` with keys numbered by their rank among the columns."""

    size: int
    last: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The position of the key of rank `k_pos` is at most `q_pos`."""
        return k_pos // self.last * self.size + self.size - self.last + k_pos % self.last <= q_pos

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Columns before `q_stop`."""
        return 0, q_stop // self.size * self.last + max(0, q_stop % self.size - (self.size - self.last))

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """True for columns up to the first query."""
        return k_stop <= (self.key_range(q_start, q_start + 1)[1] or 0)


def _mixed(x: Number, salt: int) -> Number:
    """Hash to 32 bits: products spread bits upwards, shifts downwards, so no two rounds make one linear map."""
    x = (x + salt) & WORD
    for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D):
        x = ((x ^ (x >> 15)) * factor) & WORD
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Random(Pattern):
    """One random block of `size` tokens for each block of queries: number `index` of `of` disjoint patterns.

    Candidates are all blocks except the first `skip` and those from `back` before to `ahead_blocks` after the query's
    own. `blocks` is the number of blocks of the sequence; 0 means causal, with earlier candidates only. Candidates are
    cut into `of` equal strata, and a hash of `seed`, `index` and the query's block draws a block from number `index`.
    """

    may_be_zero: ClassVar[tuple[str, ...]] = ("index", "skip", "back", "ahead_blocks", "blocks", "seed")
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

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return self.blocks == 0

    def chosen(self, q_block: Tensor) -> Tensor:
        """Return the drawn block of each block of queries; -1 without a candidate."""
        before = (q_block - self.back - self.skip).clamp(min=0)
        later = (q_block + self.ahead_blocks + 1).clamp(min=self.skip)
        count = before + (self.blocks - later).clamp(min=0) if self.blocks else before
        lo, hi = count * self.index // self.of, count * (self.index + 1) // self.of
        place = lo + self.drawn(q_block) % (hi - lo).clamp(min=1)
        block = torch.where(place < before, self.skip + place, later + place - before)
        return torch.where(hi > lo, block, -1)

    def chosen_by(self, q_block: int) -> int:
        """Return `chosen` of one block in Python integers, which need no device and no tracing."""
        before = max(0, q_block - self.back - self.skip)
        later = max(self.skip, q_block + self.ahead_blocks + 1)
        count = before + max(0, self.blocks - later) if self.blocks else before
        lo, hi = count * self.index // self.of, count * (self.index + 1) // self.of
        if hi == lo:
            return -1
        place = lo + self.drawn(q_block) % (hi - lo)
        return self.skip + place if place < before else later + place - before

    def drawn(self, q_block: Number) -> Number:
        """Return a random number of 32 bits for each block of queries."""
        return _mixed(_mixed(q_block, _mixed(self.seed & WORD, 1)), _mixed(self.index, 2))

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos // self.size == self.chosen(q_pos // self.size)

    def key_range(self, q_start: int, q_stop: int) -> tuple[int, int | None]:
        """Keys from the first to the last block drawn by any of the queries."""
        chosen = [self.chosen_by(block) for block in range(q_start // self.size, (q_stop - 1) // self.size + 1)]
        chosen = [block for block in chosen if block >= 0]
        return (min(chosen) * self.size, (max(chosen) + 1) * self.size) if chosen else (0, 0)

    def tile_starts(self, q_start: int, q_stop: int) -> list[int]:
        return multiples(self.size, q_start, q_stop)

    def sees_all(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> bool:
        """True for one block of queries and the block that it drew."""
        lo, hi = self.key_range(q_start, q_stop)
        return q_start // self.size == (q_stop - 1) // self.size and hi is not None and lo <= k_start and k_stop <= hi
