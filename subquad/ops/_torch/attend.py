"""Engine B in plain PyTorch: the fused op on a CPU, gathered tiles with a dense softmax elsewhere.

Shape letters: B batch, H heads, T queries, S keys, K key channels, V value channels; N tiles of C queries and W keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch.attend_cpu import block_attention_cpu, block_attention_cpu_backward
from subquad.ops._torch.tiles import Group, ragged_groups, short_groups, static_groups
from subquad.ops.patterns import Pattern


class Slots(NamedTuple):
    """Where the tokens of queries and keys stand.

    `q_pos_BT`, `k_pos_BS`: positions by row, negative for an empty slot; None: counted from `q_start` and `k_start`.
    """

    q_start: int
    k_start: int
    q_pos_BT: Tensor | None = None
    k_pos_BS: Tensor | None = None
    q_doc_BT: Tensor | None = None
    k_doc_BS: Tensor | None = None


def attend(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, pattern: Pattern, slots: Slots, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, H, T, V]` and logsumexp `[B, H, T]`; keys and values have as many heads as queries."""
    if q_BHTK.device.type == "cpu" and dropout_p == 0:
        return _fused(q_BHTK, k_BHSK, v_BHSV, pattern, slots, scale)
    return gathered(q_BHTK, k_BHSK, v_BHSV, pattern, slots, scale, dropout_p)


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
    scale = ctx.static[-1]
    dq = dk = dv = None
    if grad_BHTK is not None:
        dq, dk, dv = block_attention_cpu_backward(_rows_contiguous(grad_BHTK), q, k, v, out, lse, *ctx.static, *slots)
    if grad_lse_BHT is not None:
        # d lse_i / d score_ij is the weight, so dq is attention to the keys, and dk the value gradient of queries.
        grad_lse_BHT = grad_lse_BHT.masked_fill(torch.isneginf(lse), 0.0)[..., None] * scale
        mean_key_BHTK, _ = block_attention_cpu(q, k, k, *ctx.static, *slots)
        _, _, more_dk = block_attention_cpu_backward(q * grad_lse_BHT, q, k, k, mean_key_BHTK, lse, *ctx.static, *slots)
        more_dq = mean_key_BHTK * grad_lse_BHT
        dq, dk = (more_dq, more_dk) if dq is None or dk is None else (dq + more_dq, dk + more_dk)
    return dq, dk, dv, None, None, None, None, None, None, None, None


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
            # A sum of nothing: zeros that keep their place in the graph.
            outs.append(q[..., :0].sum(-1, keepdim=True).expand(*q.shape[:4], v_BHSV.shape[-1]).flatten(2, 3))
            lses.append(q.new_full(q.shape[:4], -torch.inf).flatten(2))
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
    x_BHSK = x_BHSK.narrow(2, group.k, group.keys + group.rows * (group.count - 1))
    return x_BHSK.unfold(2, group.keys, group.rows)


def _allowed(pattern: Pattern, group: Group, slots: Slots, device: torch.device) -> Tensor:
    """Bool `[B or 1, 1, N, C, W]`."""
    q_slot = torch.arange(group.rows * group.count, device=device).unflatten(0, (group.count, group.rows)) + group.q
    k_slot = torch.arange(group.keys, device=device) + group.rows * torch.arange(group.count, device=device)[:, None]
    k_slot = k_slot + group.k
    if slots.q_pos_BT is None or slots.k_pos_BS is None:
        q, k = (q_slot + slots.q_start)[..., :, None], (k_slot + slots.k_start)[..., None, :]
        return pattern.allowed(q, k)[None, None]
    q, k = slots.q_pos_BT[:, q_slot][..., :, None], slots.k_pos_BS[:, k_slot][..., None, :]
    allowed = pattern.allowed(q, k) & (q >= 0) & (k >= 0)
    if slots.q_doc_BT is not None and slots.k_doc_BS is not None:
        allowed = allowed & (slots.q_doc_BT[:, q_slot][..., :, None] == slots.k_doc_BS[:, k_slot][..., None, :])
    return allowed[:, None]
