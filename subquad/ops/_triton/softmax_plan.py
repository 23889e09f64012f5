"""How a call of the running softmax is cut for its kernels: tiles, segments, precision, strides.

Shape letters: B batch, H heads, T tokens, L latents, V value channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops._triton import common

EMPTY = -(2.0**100)
"""The log-normaliser of nothing."""
LONGEST_SEGMENT = 16
"""Chunks of a segment, where sequences are cut into several."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
STATE_LATENTS = 16
"""Latents of a tile in the passes over segments, which multiply no matrices."""


class Precision(NamedTuple):
    """How matrices are multiplied, by the dtype of v: the dtype of operands that are bounded (values, scores, exp of
    what is at most zero) and of those that need the range of float32; how float32 operands are multiplied; how far a
    logit may exceed the reference of its window, which costs up to so many roundings of float32; and the value
    channels that a tile may have, so that operands fit into registers.
    """

    bounded: tl.dtype
    wide: tl.dtype
    mode: str
    bound: float
    values: int

    def constants(self) -> dict[str, Any]:
        """What the kernels know of it when they are compiled."""
        return {"DOT": self.bounded, "WIDE": self.wide, "PRECISION": self.mode, "BOUND": self.bound}


PRECISIONS = {
    torch.float32: Precision(tl.float32, tl.float32, "ieee", 4.0, 32),
    torch.bfloat16: Precision(tl.bfloat16, tl.bfloat16, "tf32", 32.0, 128),
    torch.float16: Precision(tl.float16, tl.float32, "tf32", 32.0, 64),
}


class Tiles(NamedTuple):
    """What a program works on: tokens of a chunk, latents and value channels; its warps; and how many programs fill a
    large device: sequences are cut into segments only while there are fewer.
    """

    chunk: int
    latents: int
    values: int
    warps: int
    programs: int

    @classmethod
    def of(cls, L: int, V: int, dtype: torch.dtype) -> Tiles:
        """They depend on head sizes and dtype alone, never on T. Without tensor cores, in float32, operands of products
        lie in registers: tiles are small. One latent has no matrices; a warp alone has the shortest sums over rows.
        """
        latents, values = min(common.tile(L), 64), common.tile(V)
        if L == 1:
            return cls(32, latents, min(values, 32 if dtype == torch.float32 else 64), 1, 8 * MULTIPROCESSORS)
        values = min(values, PRECISIONS[dtype].values)
        if dtype == torch.float32:
            return cls(16, latents, values, 8, 2 * MULTIPROCESSORS)
        return cls(64, latents, values, 8 if latents * values >= 64 * 64 else 4, 2 * MULTIPROCESSORS)


class Plan(NamedTuple):
    """How a call is cut. With T only counts change, which kernels take as numbers, so that nothing compiles again."""

    rows: int
    L: int
    V: int
    tile: Tiles
    groups: int
    tiles: int
    chunks: int
    segments: int
    per: int

    @classmethod
    def of(cls, p_BHTL: Tensor, v_BHTV: Tensor) -> Plan:
        """Segments are as few as fill the device: a sequence in one piece is read once."""
        B, H, T, L = p_BHTL.shape
        V = v_BHTV.shape[-1]
        tile = Tiles.of(L, V, v_BHTV.dtype)
        groups, tiles, chunks = triton.cdiv(L, tile.latents), triton.cdiv(V, tile.values), triton.cdiv(T, tile.chunk)
        programs = B * H * groups * tiles
        per = max(1, chunks) if programs >= tile.programs else LONGEST_SEGMENT
        while programs < tile.programs and per > 2 and programs * triton.cdiv(chunks, per) < tile.programs:
            per //= 2
        return cls(B * H, L, V, tile, groups, tiles, chunks, max(1, triton.cdiv(chunks, per)), per)

    def numbers(self, p_BHTL: Tensor) -> tuple[int, int, int, int]:
        """What the kernels over segments are told at each launch."""
        return p_BHTL.shape[2], p_BHTL.shape[1], self.segments, self.per

    def grid(self, segments: int) -> tuple[int, int]:
        """Of the kernels over segments."""
        return self.rows * self.groups * segments, self.tiles

    def saved(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of m before each chunk and after the last, of z before each chunk, of U before each segment."""
        N, L = self.rows, self.L
        return (N, self.chunks + 1, L), (N, self.chunks, L), (N, self.segments, L, self.V)

    def state_grid(self) -> tuple[int, int]:
        """Of the passes over segments."""
        return self.rows * triton.cdiv(self.L, STATE_LATENTS), self.tiles

    def state_sizes(self) -> dict[str, Any]:
        """What the passes over segments know when they are compiled."""
        return {"L": self.L, "V": self.V, "LATENTS": STATE_LATENTS, "VALUES": self.tile.values}

    def sizes(self, *tensors: Tensor) -> dict[str, Any]:
        """What the kernels over segments know when they are compiled, of head sizes and of tensors' strides."""
        # Where head sizes are no multiples of 16, strides are for some T: nothing is promised then. Rows of one channel
        # are never promised to be aligned.
        whole = self.V % 16 == 0 and (self.L == 1 or self.L % 16 == 0)
        wide = strides(*(x for x in tensors if x.shape[-1] > 1))
        return {
            "L": self.L,
            "V": self.V,
            "GROUPS": self.groups,
            "LATENTS": self.tile.latents,
            "VALUES": self.tile.values,
            "CHUNK": self.tile.chunk,
            "ALIGNED": whole and not any(stride % 16 for stride in wide),
            "num_warps": self.tile.warps,
            "num_stages": 2,
        }


def strides(*tensors: Tensor) -> list[int]:
    """Of all axes but the last, whose stride is one."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def rows(x: Tensor) -> Tensor:
    """With channels next to each other, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def contiguous(x: Tensor | None) -> Tensor | None:
    """Without gaps, where there is one."""
    return None if x is None else x.contiguous()


def empty_like(x: Tensor) -> Tensor:
    """In the layout of x, so that what moves heads back beside channels moves no data; channels next to each other."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def parts_of(x: Tensor, count: int) -> Tensor:
    """Where `count` tiles leave what sums up to x: x itself where there is one."""
    return x[None] if count == 1 else x.new_empty(count, *x.shape, dtype=torch.float32)


def add_parts(parts: Tensor, x: Tensor) -> None:
    """Sums into x what `parts_of` was filled with; nothing to do where that is x itself."""
    if len(parts) > 1:
        x.copy_(parts.sum(0))
