"""Engine B on a CPU for patterns of bounded tiles: each tile's scores are a matrix that stays in cache.

torch's fused kernel cuts queries into blocks of 32 rows here, too few for its matrix products; whole tiles of several
heads keep them at full speed. Decision: docs/decisions/0009-tiles-in-cache.md.

Shape letters: H heads of one row of the batch, C queries and W keys of a tile, K channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops._torch.tiles import Group

LEAST_ROWS = 32
"""Smaller tiles are left to the fused kernel, which takes many in one call."""
LONGEST_TRIANGLE = 256
ENTRIES = 1 << 18
"""Scores that are worked on at once: what the caches of a few cores hold."""


class Tile(NamedTuple):
    """One tile of some heads of one row of the batch: indices of `[B, H, T, K]` and `[B, H, S, K]`."""

    queries: tuple[int, slice, slice]
    keys: tuple[int, slice, slice]


def fits(group: Group) -> bool:
    """Whether the tiles of a group are worth it, by their sizes alone."""
    if group.kind == "empty" or group.places or group.rows < LEAST_ROWS:
        return False
    # The fused kernel skips what lies above a long diagonal.
    return group.rows <= LONGEST_TRIANGLE if group.kind == "causal" else group.rows * group.keys <= ENTRIES


def tiles(group: Group, row: int | None, shape_BHTK: torch.Size) -> Iterator[Tile]:
    """The tiles of a group, of all rows of the batch or of one."""
    B, H = shape_BHTK[:2]
    heads = max(1, ENTRIES // (group.rows * group.keys))
    for b in range(B) if row is None else (row,):
        for first in range(0, H, heads):
            some = slice(first, min(first + heads, H))
            for n in range(group.count):
                q, k = group.q + n * group.rows, group.k + n * group.rows
                yield Tile((b, some, slice(q, q + group.rows)), (b, some, slice(k, k + group.keys)))


class Workspace:
    """Forward and backward of one tile after another, in memory that is taken once.

    The C library gives blocks of a megabyte back to the system when they are freed, and fresh pages for each tile would
    cost as much as its products.
    """

    def __init__(self, bias_CW: Tensor | None, scale: float) -> None:
        self.bias_CW, self.scale = bias_CW, scale
        self.blocks: dict[str, Tensor] = {}

    def _block(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Memory of this name for a tensor of this shape."""
        if name not in self.blocks or self.blocks[name].numel() < math.prod(shape):
            self.blocks[name] = like.new_empty(math.prod(shape))
        return self.blocks[name][: math.prod(shape)].view(shape)

    def _weights(self, q_HCK: Tensor, k_HWK: Tensor) -> tuple[Tensor, Tensor]:
        shape = (q_HCK.shape[0], q_HCK.shape[1], k_HWK.shape[1])
        scores_HCW, weights_HCW = (self._block(name, q_HCK, *shape) for name in ("scores", "weights"))
        if self.bias_CW is None:
            torch.bmm(q_HCK, k_HWK.mT, out=scores_HCW).mul_(self.scale)
        else:
            torch.baddbmm(self.bias_CW, q_HCK, k_HWK.mT, alpha=self.scale, out=scores_HCW)
        return scores_HCW, torch.softmax(scores_HCW, -1, out=weights_HCW)

    def forward(self, q_HCK: Tensor, k_HWK: Tensor, v_HWK: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and logsumexp of one tile, until the next call; every query sees a key."""
        scores_HCW, weights_HCW = self._weights(q_HCK, k_HWK)
        # The largest weight is exp(largest score - lse).
        lse_HC = scores_HCW.amax(-1).sub_(weights_HCW.amax(-1).log_())
        return torch.bmm(weights_HCW, v_HWK, out=self._block("rows", q_HCK, *q_HCK.shape)), lse_HC

    def backward(
        self, grad_HCK: Tensor, out_HCK: Tensor, q_HCK: Tensor, k_HWK: Tensor, v_HWK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one tile's queries, keys and values, until the next call."""
        grad_scores_HCW, weights_HCW = self._weights(q_HCK, k_HWK)
        dq_HCK, dk_HWK, dv_HWK = (
            self._block(name, x, *x.shape) for name, x in (("rows", q_HCK), ("keys", k_HWK), ("values", v_HWK))
        )
        delta_HC1 = torch.mul(grad_HCK, out_HCK, out=dq_HCK).sum(-1, keepdim=True)
        torch.bmm(weights_HCW.mT, grad_HCK, out=dv_HWK)
        torch.bmm(grad_HCK, v_HWK.mT, out=grad_scores_HCW).sub_(delta_HC1).mul_(weights_HCW).mul_(self.scale)
        torch.bmm(grad_scores_HCW, k_HWK, out=dq_HCK)
        return dq_HCK, torch.bmm(grad_scores_HCW.mT, q_HCK, out=dk_HWK), dv_HWK
