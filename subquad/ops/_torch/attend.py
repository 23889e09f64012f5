"""Engine B in plain PyTorch: the fused op on a CPU, gathered tiles with a dense softmax elsewhere.

Shape letters: B batch, H heads, T queries, S keys, K key channels, V value channels; N tiles of C queries and W keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch.attend_cpu import block_attention_cpu, block_attention_cpu_backward
from subquad.ops._torch.tiles import Group, ragged_groups, short_groups, static_groups
from subquad.ops.patterns import Pattern, Ranks
from subquad.ops.slots import Slots


def attend(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, H, T, V]` and logsumexp `[B, H, T]`; keys and values have as many heads as queries."""
    T, S = q_BHTK.shape[2], k_BHSK.shape[2]
    whole = slots.q_pos_BT is None and slots.q_start == slots.k_start == 0 and T == S
    if whole and pattern.folded:
        return _by_residue(q_BHTK, k_BHSK, v_BHSV, *pattern.folded, slots.lengths_B, scale, dropout_p)
    if whole and pattern.columns:
        columns_S = _columns(T, *pattern.columns, q_BHTK.device)
        k_BHSK, v_BHSV = k_BHSK.index_select(2, columns_S), v_BHSV.index_select(2, columns_S)
        pattern = Ranks(*pattern.columns)
    if k_BHSK.shape[2] == 0:
        return nothing(q_BHTK, v_BHSV)
    if q_BHTK.device.type == "cpu" and dropout_p == 0:
        return _fused(q_BHTK, k_BHSK, v_BHSV, pattern, slots, scale)
    return gathered(q_BHTK, k_BHSK, v_BHSV, pattern, slots, scale, dropout_p)


def nothing(q_BHTK: Tensor, v_BHSV: Tensor) -> tuple[Tensor, Tensor]:
    """What attention to no key gives: zeros that keep their place in the graph, and -inf."""
    out_BHTV = q_BHTK[..., :0].sum(-1, keepdim=True).expand(*q_BHTK.shape[:3], v_BHSV.shape[-1])
    return out_BHTV, q_BHTK.new_full(q_BHTK.shape[:3], -torch.inf)


def _columns(tokens: int, size: int, last: int, device: torch.device) -> Tensor:
    """Slots of the last `last` of each `size` tokens."""
    count = tokens // size * last + max(0, tokens % size - (size - last))
    rank_S = torch.arange(count, device=device)
    return rank_S // last * size + size - last + rank_S % last


def _by_residue(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    residues: int,
    inner: Pattern,
    lengths_B: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """A whole sequence whose tokens see only those of their own residue: each residue is a sequence of the batch."""
    B, _, T, _ = q_BHTK.shape
    steps = -(-T // residues)

    def fold(x_BHTK: Tensor) -> Tensor:
        x_BHTK = F.pad(x_BHTK, (0, 0, 0, steps * residues - T))
        return x_BHTK.unflatten(2, (steps, residues)).permute(0, 3, 1, 2, 4).flatten(0, 1)

    def unfold(x_RHTK: Tensor) -> Tensor:
        return x_RHTK.unflatten(0, (B, residues)).permute(0, 2, 3, 1, 4).flatten(2, 3)[:, :, :T]

    if not inner.causal:  # slots beyond the end would be seen
        real_B = q_BHTK.new_full((B,), T, dtype=torch.int64) if lengths_B is None else lengths_B
        left_BR = real_B[:, None] - torch.arange(residues, device=q_BHTK.device)
        lengths_B = ((left_BR + residues - 1) // residues).clamp(min=0).flatten()
    slots = Slots(0, 0, None if inner.causal else lengths_B)
    q, k, v = fold(q_BHTK), fold(k_BHTK), fold(v_BHTV)
    out_RHTV, lse_RHT = attend(q, k, v, inner, slots, scale, dropout_p)
    return unfold(out_RHTV), unfold(lse_RHT[..., None])[..., 0]


def _fused(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float
) -> tuple[Tensor, Tensor]:
    K, V = q_BHTK.shape[-1], v_BHSV.shape[-1]
    if K != V:  # the fused kernel wants one size; zero channels change no score and no value
        q_BHTK, k_BHSK, v_BHSV = (F.pad(x, (0, max(K, V) - x.shape[-1])) for x in (q_BHTK, k_BHSK, v_BHSV))
    # Its rows must be contiguous.
    q_BHTK, k_BHSK, v_BHSV = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHTK, k_BHSK, v_BHSV))
    out_BHTV, lse_BHT = block_attention_cpu(
        q_BHTK, k_BHSK, v_BHSV, pattern.key(), slots.q_start, slots.k_start, scale, *slots[2:]
    )
    return out_BHTV[..., :V], lse_BHT


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, pattern, q_start, k_start, scale, *slots = inputs
    ctx.save_for_backward(q, k, v, *output, *slots)
    ctx.static = (pattern, q_start, k_start, scale)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_BHTK: Tensor | None, grad_lse_BHT: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *slots = ctx.saved_tensors
    rest = (None,) * (len(ctx.static) + len(slots))
    if grad_BHTK is None and grad_lse_BHT is None:
        return None, None, None, *rest
    grad_BHTK = torch.zeros_like(out) if grad_BHTK is None else _rows_contiguous(grad_BHTK)
    dq, dk, dv = block_attention_cpu_backward(grad_BHTK, grad_lse_BHT, q, k, v, out, lse, *ctx.static, *slots)
    return dq, dk, dv, *rest


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


block_attention_cpu.register_autograd(_backward, setup_context=_setup_context)


def gathered(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """The same on any device and with dropout: the keys of each tile are gathered, and the softmax in it is dense.

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
