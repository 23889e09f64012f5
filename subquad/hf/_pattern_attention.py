"""Attention of a transformers model's own queries, keys and values over the patterns of a mechanism.

Shape letters: B batch, H query heads, G key heads, T queries, S key slots, K channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.hf._forms import Part
from subquad.hf._standing import Standing
from subquad.ops import block_attention, merge_attention
from subquad.ops.patterns import Pattern


def attend_over(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    parts: Sequence[Part],
    standing: Standing,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """`y_t = sum_s softmax_s(scale q_t . k_s) v_s` over the keys s that t's head may see, `[B, H, T, K]`.

    Positions count the real tokens of a row; outputs of padding are zeros.
    """
    k_BGSK, v_BGSK = (x[:, :, : standing.before + q_BHTK.shape[2]] for x in (k_BGSK, v_BGSK))
    if len(parts) > 1:
        shared = q_BHTK.shape[1] // k_BGSK.shape[1]
        k_BGSK, v_BGSK = (x.repeat_interleave(shared, 1) for x in (k_BGSK, v_BGSK))
        heads = [part.heads for part in parts]
        split = zip(*(x.split(heads, 1) for x in (q_BHTK, k_BGSK, v_BGSK)), parts, strict=True)
        return torch.cat([_union(q, k, v, part.patterns, standing, scale, dropout_p) for q, k, v, part in split], 1)
    return _union(q_BHTK, k_BGSK, v_BGSK, parts[0].patterns, standing, scale, dropout_p)


def _union(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    patterns: Sequence[Pattern],
    standing: Standing,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    """Softmax over the union of disjoint patterns."""
    T, S = q_BHTK.shape[2], k_BGSK.shape[2]
    real_BS = standing.real_BS
    q_start: int | Tensor = standing.before
    k_start: int | Tensor = 0
    mask_BT = q_order_BT = None
    if real_BS is not None:
        real_BS = real_BS.to(q_BHTK.device)
        if T == S:
            mask_BT = real_BS
        else:
            # Every row's real tokens to the end of its slots: those before them get negative positions.
            lengths_B = real_BS.sum(-1)
            q_start, k_start = lengths_B - T, lengths_B - S
            q_order_BT, k_order_BS = (x.byte().argsort(dim=-1, stable=True) for x in (real_BS[:, S - T :], real_BS))
            q_BHTK = _taken(q_BHTK, q_order_BT)
            k_BGSK, v_BGSK = _taken(k_BGSK, k_order_BS), _taken(v_BGSK, k_order_BS)
    outs, lses = [], []
    for pattern in patterns:
        # Fewer queries than keys: those out of reach of the first query are not read.
        drop = 0 if T == S or pattern.reach is None else max(0, S - T - pattern.reach)
        out_BHTK, lse_BHT = block_attention(
            q_BHTK,
            k_BGSK[:, :, drop:],
            v_BGSK[:, :, drop:],
            pattern,
            q_start=q_start,
            k_start=k_start + drop,
            mask=mask_BT,
            scale=scale,
            dropout_p=dropout_p,
            return_lse=True,
        )
        outs.append(out_BHTK)
        lses.append(lse_BHT)
    out_BHTK = outs[0] if len(outs) == 1 else merge_attention(outs, lses)[0]
    if q_order_BT is not None and real_BS is not None:
        back_BT = q_order_BT.argsort(dim=-1)
        out_BHTK = _taken(out_BHTK, back_BT).masked_fill(~real_BS[:, None, S - T :, None], 0.0)
    return out_BHTK


def _taken(x_BHSK: Tensor, order_BS: Tensor) -> Tensor:
    return x_BHSK.gather(2, order_BS[:, None, :, None].expand_as(x_BHSK))
