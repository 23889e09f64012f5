"""Engine B on a CPU for patterns of bounded tiles: each tile's scores are a matrix that stays in cache.

torch's fused kernel cuts queries into blocks of 32 rows here, too few for its matrix products; whole tiles of several
heads keep them at full speed. Decision: docs/decisions/0009-tiles-in-cache.md.

Shape letters: H heads of one row of the batch, C queries and W keys of a tile, K channels.
"""

from __future__ import annotations

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


def _scores(q_HCK: Tensor, k_HWK: Tensor, bias_CW: Tensor | None, scale: float) -> Tensor:
    if bias_CW is None:
        return torch.bmm(q_HCK, k_HWK.mT).mul_(scale)
    return torch.baddbmm(bias_CW, q_HCK, k_HWK.mT, alpha=scale)


def forward(q_HCK: Tensor, k_HWK: Tensor, v_HWK: Tensor, bias_CW: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and logsumexp of one tile; every query sees a key."""
    weights_HCW = _scores(q_HCK, k_HWK, bias_CW, scale)
    most_HC1 = weights_HCW.amax(-1, keepdim=True)
    total_HC1 = weights_HCW.sub_(most_HC1).exp_().sum(-1, keepdim=True)
    out_HCK = torch.bmm(weights_HCW, v_HWK).div_(total_HC1)
    return out_HCK, most_HC1.add_(total_HC1.log_())[..., 0]


def backward(
    grad_HCK: Tensor,
    delta_HC: Tensor,
    q_HCK: Tensor,
    k_HWK: Tensor,
    v_HWK: Tensor,
    lse_HC: Tensor,
    bias_CW: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one tile's queries, keys and values; `delta` is `dO . o - dlse`."""
    weights_HCW = _scores(q_HCK, k_HWK, bias_CW, scale).sub_(lse_HC[..., None]).exp_()
    dv_HWK = torch.bmm(weights_HCW.mT, grad_HCK)
    scores_HCW = torch.bmm(grad_HCK, v_HWK.mT).sub_(delta_HC[..., None]).mul_(weights_HCW).mul_(scale)
    return torch.bmm(scores_HCW, k_HWK), torch.bmm(scores_HCW.mT, q_HCK), dv_HWK
