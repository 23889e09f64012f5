"""Block attention on any device and with dropout: the keys of each tile are gathered, the softmax in it is dense.

Shape letters: B batch, H heads, T queries, S keys, K key channels; N tiles of C queries and W keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch.tiles import Group, ragged_groups, short_groups, static_groups
from subquad.ops.patterns import Pattern
from subquad.ops.slots import Slots, nothing


def gathered(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, H, T, V]` and logsumexp `[B, H, T]`.

    Linear memory for patterns of bounded reach; for the others autograd keeps the weights of all tiles.
    """
    T, S, outs, lses = q_BHTK.shape[2], k_BHSK.shape[2], [], []
    ragged = slots.q_pos_BT is not None
    groups = ragged_groups(pattern, T, S) if ragged else static_groups(pattern, slots.q_start, T, slots.k_start, S)
    for group in short_groups(groups):
        q = q_BHTK.narrow(2, group.q, group.rows * group.count).unflatten(2, (group.count, group.rows))
        if group.kind == "empty":
            out, lse = nothing(q.flatten(2, 3), v_BHSV)
            outs.append(out)
            lses.append(lse)
            continue
        k, v = (_tiles(x, group).mT for x in (k_BHSK, v_BHSV))
        forbidden = ~_allowed(pattern, group, slots, q.device)
        scores = (q @ k.mT) * scale
        lses.append(scores.masked_fill(forbidden, -torch.inf).logsumexp(-1).flatten(2))
        weights = scores.masked_fill(forbidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(forbidden, 0.0)
        outs.append((F.dropout(weights, dropout_p) @ v).flatten(2, 3))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _tiles(x_BHSK: Tensor, group: Group) -> Tensor:
    """`[B, H, N, K, W]`: the keys of each tile."""
    if group.places:
        slots = group.key_slots().to(x_BHSK.device)
        return x_BHSK.index_select(2, slots.flatten()).unflatten(2, slots.shape).mT
    x_BHSK = x_BHSK.narrow(2, group.k, group.keys + group.rows * (group.count - 1))
    return x_BHSK.unfold(2, group.keys, group.rows)


def _allowed(pattern: Pattern, group: Group, slots: Slots, device: torch.device) -> Tensor:
    """Bool `[B or 1, 1, N, C, W]`."""
    q_slot, k_slot = group.query_slots().to(device), group.key_slots().to(device)
    if slots.q_pos_BT is None or slots.k_pos_BS is None:
        q, k = (q_slot + slots.q_start)[..., :, None], (k_slot + slots.k_start)[..., None, :]
        allowed = pattern.allowed(q, k)[None]
        if slots.lengths_B is not None:
            allowed = allowed & (k_slot < slots.lengths_B[:, None, None])[:, :, None]
        return allowed[:, None]
    q, k = slots.q_pos_BT[:, q_slot][..., :, None], slots.k_pos_BS[:, k_slot][..., None, :]
    allowed = pattern.allowed(q, k) & (q >= 0) & (k >= 0)
    if slots.q_doc_BT is not None and slots.k_doc_BS is not None:
        allowed = allowed & (slots.q_doc_BT[:, q_slot][..., :, None] == slots.k_doc_BS[:, k_slot][..., None, :])
    return allowed[:, None]
