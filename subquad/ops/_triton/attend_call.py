"""What the launches of block attention are given: the formula of a pattern's ranges, tiles, strides, where rows stand.

Shape letters: B batch, H query heads, G key heads, T queries, S keys, K key channels, V value channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.ops._triton import common
from subquad.ops.patterns import (
    Band,
    Blocks,
    Causal,
    Full,
    Pattern,
    Prefix,
    Segments,
    Shifted,
    Sinks,
    Suffix,
    Window,
)
from subquad.ops.slots import Slots

FAR = 1 << 28
"""Farther than any position, and small enough that sums of a few stay within 32 bits."""


class Range(NamedTuple):
    """The one range of keys that a query sees, in the kernels' formula (see attend_kernels.py)."""

    lo_step: int = 1
    before: int = FAR
    hi_step: int = 1
    after: int = 0
    offset: int = 0
    prefix: int = 0
    last: int = FAR
    start: int = -FAR


RANGES: dict[type[Pattern], Callable[[Any], Range]] = {
    Band: lambda p: Range(before=p.before, after=p.after),
    Blocks: lambda p: Range(p.size, p.back * p.size, p.size, p.ahead_blocks * p.size),
    Causal: lambda p: Range(),
    Full: lambda p: Range(after=FAR),
    Prefix: lambda p: Range(prefix=p.length),
    Segments: lambda p: Range(p.size, p.back * p.size),
    Shifted: lambda p: Range(p.size, p.back * p.size, offset=p.offset),
    Sinks: lambda p: Range(hi_step=p.size, after=-(p.back + 1) * p.size, last=p.count * p.size),
    Suffix: lambda p: Range(start=p.start),
    Window: lambda p: Range(before=p.width - 1),
}


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps of a program, tiles loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """The tiles of each kernel."""

    forward: Tiles
    decode: Tiles
    queries: Tiles
    keys: Tiles


SIZES: dict[tuple[int, int], Sizes] = {
    (2, 64): Sizes(Tiles(128, 64, 4, 3), Tiles(16, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
    (2, 128): Sizes(Tiles(128, 64, 8, 3), Tiles(16, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(32, 128, 8, 2)),
    (2, 256): Sizes(Tiles(128, 64, 8, 2), Tiles(16, 64, 4, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 2)),
    (4, 64): Sizes(Tiles(64, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2)),
    (4, 128): Sizes(Tiles(32, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
    (4, 256): Sizes(Tiles(16, 32, 8, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 8, 2), Tiles(16, 32, 8, 2)),
}
"""By bytes of an entry and channels of a head, at most: never by the length.

Chosen by what the compiler makes of them for sm_90: registers that hardly spill, products that are not serialised.
"""


class Call:
    """What the launches of one call have in common."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, slots: Slots, scale: float) -> None:
        self.K, self.V = q.shape[-1], v.shape[-1]
        self.G, self.S = k.shape[1:3]
        self.dtype = q.dtype
        self.K_unit, self.V_unit = (_unit(x) for x in (q, v))
        (q, *q_strides), (k, *k_strides) = (in_units(x, self.K_unit) for x in (q, k))
        v, *v_strides = in_units(v, self.V_unit)
        self.inputs, self.strides = (q, k, v), (*q_strides, *k_strides, *v_strides)
        documents = (None if x is None else x.contiguous() for x in (slots.q_doc_BT, slots.k_doc_BS))
        self.rows = _row_table(slots, q.shape[2], self.S), *documents
        limits = Range(*(min(max(n, -FAR), FAR) for n in RANGES[type(pattern)](pattern)))
        self.where = (slots.q_start, slots.k_start, *limits)
        self.reach = min(self.S, limits.lo_step + limits.before + limits.hi_step + max(0, limits.after))
        self.in_nat = 1.0 if q.dtype == torch.float32 else math.log2(math.e)  # see attend_kernels.py
        self.score_scale = scale * self.in_nat
        widest = max(common.tile(self.K), common.tile(self.V), 64)
        self.sizes = SIZES[q.element_size(), widest]

    def constants(self, tiles: Tiles, backward: bool = False) -> dict[str, Any]:
        """What is built into a kernel: head sizes, dtype, tiles."""
        kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[self.dtype]
        if common.INTERPRETED and self.dtype == torch.bfloat16:
            kind = tl.float32  # the interpreter has no arithmetic in bfloat16
        # Gradients of scores may lie beyond the range of float16, but not of tf32, which has its precision.
        wide = {"GRAD_TYPE": tl.float32 if self.dtype == torch.float16 else kind} if backward else {}
        return {
            "K": self.K,
            "V": self.V,
            "K_WIDTH": common.tile(self.K),
            "V_WIDTH": common.tile(self.V),
            "K_UNIT": self.K_unit,
            "V_UNIT": self.V_unit,
            "TYPE": kind,
            **wide,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }


def _unit(x: Tensor) -> int:
    """Entries of the largest aligned load: 16 bytes, or what divides a head's channels."""
    return math.gcd(x.shape[-1], 16 // x.element_size())


def in_units(x: Tensor, unit: int) -> tuple[Any, ...]:
    """The tensor with rows of neighbouring entries, copied where need be, and its other strides in units."""
    if x.stride(-1) != 1 or any(n > 1 and stride % unit for n, stride in zip(x.shape[:-1], x.stride(), strict=False)):
        x = x.contiguous()
    return x, *(stride // unit for stride in x.stride()[:-1])


def _row_table(slots: Slots, T: int, S: int) -> Tensor | None:
    """Int32 `[B, 6]`: of each row's queries, then keys, the position of slot 0 and the slots that hold a token.

    Without positions or lengths by row there is none.
    """
    if slots.q_pos_BT is not None and slots.k_pos_BS is not None:
        fields = []
        for pos in (slots.q_pos_BT, slots.k_pos_BS):
            real = pos >= 0
            first_B1 = real.int().argmax(1, keepdim=True)
            stop_B1 = first_B1 + real.sum(1, keepdim=True)
            fields += [pos.gather(1, first_B1) - first_B1, first_B1, stop_B1]
        return torch.cat(fields, 1).to(torch.int32)
    if slots.lengths_B is None:
        return None
    stop_B = slots.lengths_B.clamp(max=S).to(torch.int32)
    fixed = (slots.q_start, 0, T, slots.k_start, max(0, -slots.k_start))
    return torch.stack([*(torch.full_like(stop_B, n) for n in fixed), stop_B], 1)
