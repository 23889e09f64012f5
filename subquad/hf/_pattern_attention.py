"""Attention of a transformers model's own queries, keys and values over the patterns of a mechanism.

Shape letters: B batch, H query heads, G key heads, T queries, S key slots, K channels of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.hf._forms import Part
from subquad.hf._standing import Standing
from subquad.ops import block_attention_with_lse, merge_attention
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
    T, S = q_BHTK.shape[2], standing.before + q_BHTK.shape[2]
    # Of a row with padding, which its real tokens follow here, those out of reach of its first query are not read.
    drop = max(0, S - T - _reach(parts)) if T < S else 0
    q_start: int | Tensor = standing.before
    k_start: int | Tensor = drop
    mask_BT = back_BT = None
    real_BS = None if standing.real_BS is None else standing.real_BS.to(q_BHTK.device)
    if real_BS is not None and T < S:
        lengths_B = real_BS.sum(-1)
        q_start, k_start = lengths_B - T, lengths_B - S + drop
        q_order_BT, k_order_BS = (x.byte().argsort(dim=-1, stable=True) for x in (real_BS[:, S - T :], real_BS))
        q_BHTK, back_BT = _taken(q_BHTK, q_order_BT), q_order_BT.argsort(dim=-1)
        k_BGSK, v_BGSK = (_taken(x, k_order_BS[:, drop:]) for x in (k_BGSK, v_BGSK))
    else:
        mask_BT = real_BS
        k_BGSK, v_BGSK = k_BGSK[:, :, drop:S], v_BGSK[:, :, drop:S]
    if len(parts) > 1:
        shared = q_BHTK.shape[1] // k_BGSK.shape[1]
        k_BGSK, v_BGSK = (x.repeat_interleave(shared, 1) for x in (k_BGSK, v_BGSK))
    heads = [part.heads for part in parts]
    places: dict[str, Any] = {
        "q_start": q_start,
        "k_start": k_start,
        "mask": mask_BT,
        "scale": scale,
        "dropout_p": dropout_p,
    }
    split = [(q_BHTK, k_BGSK, v_BGSK)]
    if len(parts) > 1:
        split = list(zip(*(x.split(heads, 1) for x in (q_BHTK, k_BGSK, v_BGSK)), strict=True))
    outs = [_union(*qkv, part.patterns, **places) for qkv, part in zip(split, parts, strict=True)]
    out_BHTK = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    if back_BT is not None and real_BS is not None:
        out_BHTK = _taken(out_BHTK, back_BT).masked_fill(~real_BS[:, None, S - T :, None], 0.0)
    return out_BHTK


def _reach(parts: Sequence[Part]) -> int:
    """Tokens that a query sees before itself, at most."""
    reaches = [pattern.reach for part in parts for pattern in part.patterns]
    return max(sys.maxsize if reach is None else reach for reach in reaches)


def _union(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, patterns: Sequence[Pattern], **places: Any) -> Tensor:
    """Softmax over the union of disjoint patterns."""
    parts = [block_attention_with_lse(q_BHTK, k_BGSK, v_BGSK, pattern, **places) for pattern in patterns]
    outs, lses = zip(*parts, strict=True)
    return outs[0] if len(outs) == 1 else merge_attention(outs, lses)[0]


def _taken(x_BHSK: Tensor, order_BS: Tensor) -> Tensor:
    return x_BHSK.gather(2, order_BS[:, None, :, None].expand(*x_BHSK.shape[:2], -1, x_BHSK.shape[3]))
