"""The additive masks of tiles: 0 where a query sees a key, -inf elsewhere.

Shape letters: B batch, N tiles of C queries and W keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops._torch.tiles import Group
from subquad.ops.patterns import Pattern


def static_bias(
    pattern: Pattern, group: Group, q_start: int, k_start: int, like: Tensor, triangles: bool = False
) -> Tensor | None:
    """`[C, W]`, None where a tile sees all its keys (or, but for `triangles`, the fused kernel masks it itself)."""
    if group.kind == "full" or (group.kind == "causal" and not triangles):
        return None
    q_pos = torch.arange(group.rows) + q_start + group.q
    k_pos = torch.arange(group.keys) + k_start + group.k
    return _bias(pattern.allowed(q_pos[:, None], k_pos), like)


def bias_to(lengths_B: Tensor, pattern: Pattern, group: Group, q_start: int, k_start: int, like: Tensor) -> Tensor:
    """`[B, 1, C, W]` for one tile a row, `[1, N, C, W]` for the folded tiles of one row: keys within the lengths."""
    q_slot, k_slot = group.query_slots(), group.key_slots()
    real_BN1W = (k_slot < lengths_B[:, None, None])[:, :, None]
    if group.kind == "full":
        return _bias(real_BN1W, like)  # one row for all queries
    return _bias(pattern.allowed((q_slot + q_start)[..., None], (k_slot + k_start)[:, None]) & real_BN1W, like)


def ragged_bias(
    pattern: Pattern, group: Group, q_pos: Tensor, k_pos: Tensor, docs: tuple[Tensor, Tensor] | None, like: Tensor
) -> Tensor:
    """`[B, 1, C, W]` for one tile a row, `[1, N, C, W]` for the folded tiles of one row."""

    def tiles(q_BT: Tensor, k_BS: Tensor) -> tuple[Tensor, Tensor]:
        q = q_BT.narrow(1, group.q, group.rows * group.count).unflatten(1, (group.count, group.rows))
        k = k_BS.narrow(1, group.k, group.keys + group.rows * (group.count - 1)).unfold(1, group.keys, group.rows)
        return q[..., :, None], k[..., None, :]

    q, k = tiles(q_pos, k_pos)
    allowed = pattern.allowed(q, k) & (q >= 0) & (k >= 0)
    if docs is not None:
        q, k = tiles(*docs)
        allowed = allowed & (q == k)
    return _bias(allowed, like)


def _bias(allowed: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, dtype=like.dtype).masked_fill_(~allowed, -torch.inf)
