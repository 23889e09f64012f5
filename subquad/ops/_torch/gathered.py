"""Block attention on any device and with dropout: gather the keys of each tile, and compute a dense softmax.

Shape letters: B batch, H heads, T queries, S keys, K key channels; N tiles of C queries and W keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch.tiles import Group, short_groups, tile_groups
from subquad.ops.patterns import Pattern
from subquad.ops.slots import Slots, allowed_between, nothing


def gathered(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Return outputs `[B, H, T, V]` and logsumexp `[B, H, T]`.

    Memory is linear for patterns of bounded reach; for others autograd keeps the weights of all tiles.
    """
    T, S, outs, lses = q_BHTK.shape[2], k_BHSK.shape[2], [], []
    for group in short_groups(tile_groups(pattern, slots.starts, T, S)):
        q = q_BHTK.narrow(2, group.q, group.rows * group.count).unflatten(2, (group.count, group.rows))
        if group.kind == "empty":
            out, lse = nothing(q.flatten(2, 3), v_BHSV)
            outs.append(out)
            lses.append(lse)
            continue
        k, v = (_tiles(x, group).mT for x in (k_BHSK, v_BHSV))
        q_slots, k_slots = (x.to(q.device) for x in (group.query_slots(), group.key_slots()))
        forbidden = ~allowed_between(pattern, slots, q_slots, k_slots)[:, None]
        scores = (q @ k.mT) * scale
        lses.append(scores.masked_fill(forbidden, -torch.inf).logsumexp(-1).flatten(2))
        # A finite floor, and zeros after it: rows without keys must not be NaN.
        weights = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(forbidden, 0.0)
        outs.append((F.dropout(weights, dropout_p) @ v).flatten(2, 3))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _tiles(x_BHSK: Tensor, group: Group) -> Tensor:
    """Return the keys of each tile, `[B, H, N, K, W]`."""
    if group.places:
        slots = group.key_slots().to(x_BHSK.device)
        return x_BHSK.index_select(2, slots.flatten()).unflatten(2, slots.shape).mT
    x_BHSK = x_BHSK.narrow(2, group.k, group.keys + group.rows * (group.count - 1))
    return x_BHSK.unfold(2, group.keys, group.rows)
