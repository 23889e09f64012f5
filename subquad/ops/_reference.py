"""Definitions of the engines: dense softmax over the allowed keys, and the recurrences one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def softmax_weights(
    q_BHTK: Tensor, k_BHSK: Tensor, allowed_BTS: Tensor, scale: float, sink_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights `[B, H, T, S]` and the scores' logsumexp `[B, H, T]`; zeros and -inf if no key is allowed.

    A `sink` joins each softmax as the score of one more key, whose weight is left out.
    """
    scores_BHTS = (q_BHTK @ k_BHSK.mT) * scale
    forbidden = ~allowed_BTS[:, None]
    lse_BHT = scores_BHTS.masked_fill(forbidden, -torch.inf).logsumexp(-1)
    # A finite floor below all real scores: the softmax of a row of -inf and its gradient would be NaN.
    floor = torch.finfo(scores_BHTS.dtype).min
    scores_BHTS = scores_BHTS.masked_fill(forbidden, floor)
    if sink_H is None:
        return scores_BHTS.softmax(-1).masked_fill(forbidden, 0.0), lse_BHT
    sink_BHT1 = sink_H.to(scores_BHTS.dtype)[:, None, None].expand(*scores_BHTS.shape[:3], 1)
    return torch.cat([scores_BHTS, sink_BHT1], -1).softmax(-1)[..., :-1].masked_fill(forbidden, 0.0), lse_BHT


def attend(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, allowed_BTS: Tensor, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """`softmax(scale q k^T) v` over the allowed keys, and the scores' logsumexp."""
    weights_BHTS, lse_BHT = softmax_weights(q_BHTK, k_BHSK, allowed_BTS, scale)
    return F.dropout(weights_BHTS, dropout_p) @ v_BHSV, lse_BHT


def gated_scan(
    q_NTK: Tensor,
    i_NTK: Tensor,
    v_NTV: Tensor,
    log_f_NTKV: Tensor | None,
    state_NKV: Tensor,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`S_t = f_t * S_{t-1} + i_t (x) v_t`, `o_t = q_t S_t`; with `normalise` the last state column sums the weights.

    The decays have size 1 along the channels that share them.
    """
    out = []
    if normalise:
        v_NTV = F.pad(v_NTV, (0, 1), value=1.0)
    for t in range(v_NTV.shape[1]):
        if log_f_NTKV is not None:
            state_NKV = log_f_NTKV[:, t].exp() * state_NKV
        state_NKV = state_NKV + i_NTK[:, t, :, None] * v_NTV[:, t, None]
        out.append((q_NTK[:, t, None] @ state_NKV).squeeze(1))
    out_NTV = torch.stack(out, 1) if out else v_NTV
    return (divide(out_NTV[..., :-1], out_NTV[..., -1], eps) if normalise else out_NTV), state_NKV


def delta_scan(
    q_NTK: Tensor, k_NTK: Tensor, v_NTV: Tensor, beta_NT1: Tensor, log_f_NTF: Tensor | None, state_NKV: Tensor
) -> tuple[Tensor, Tensor]:
    """`S_t = (I - b_t k_t k_t^T) (f_t * S_{t-1}) + b_t k_t (x) v_t`, `o_t = q_t S_t`."""
    out = []
    for t in range(v_NTV.shape[1]):
        if log_f_NTF is not None:
            state_NKV = log_f_NTF[:, t, :, None].exp() * state_NKV
        k_NK1, b_N11 = k_NTK[:, t, :, None], beta_NT1[:, t, :, None]
        state_NKV = state_NKV - b_N11 * k_NK1 * (k_NK1.mT @ state_NKV) + b_N11 * k_NK1 * v_NTV[:, t, None]
        out.append((q_NTK[:, t, None] @ state_NKV).squeeze(1))
    return (torch.stack(out, 1) if out else v_NTV), state_NKV


def divide(numerator_NTV: Tensor, total_NT: Tensor, eps: float) -> Tensor:
    """`numerator / (total + eps)`, or zero if the divisor is zero: all weights of such a token are zero."""
    total_NT1 = total_NT[..., None] + eps
    nothing = total_NT1 == 0
    # Masked before the division too: 0 / 0 would send NaN into the gradient.
    return (numerator_NTV / total_NT1.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def running_logsumexp(k_NTL: Tensor, a_NL: Tensor) -> Tensor:
    """`a_t = log(exp a_{t-1} + exp k_t)`, every one, in the dtype of k; `a` is float64."""
    lse = []
    for k_NL in k_NTL.unbind(1):
        a_NL = torch.logaddexp(a_NL, k_NL.to(a_NL.dtype))
        lse.append(a_NL.to(k_NTL.dtype))
    return torch.stack(lse, 1) if lse else k_NTL


def running_softmax(
    p_NTL: Tensor, k_NTL: Tensor, v_NTV: Tensor, a_NL: Tensor, s_NLV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`a_t = log(exp a_{t-1} + exp k_t)`, `S_t = exp(a_{t-1} - a_t) S_{t-1} + exp(k_t - a_t) (x) v_t`, `o_t = p_t S_t`.

    Returns the outputs, every `a_t`, and the last `a` and `S`. `a` is float64: see `subquad.ops._torch.log_space_sums`.
    """
    out, lse = [], []
    for t in range(v_NTV.shape[1]):
        after_NL = torch.logaddexp(a_NL, k_NTL[:, t].to(a_NL.dtype))
        keep_NL, take_NL = (a_NL - after_NL).exp(), (k_NTL[:, t] - after_NL).exp()
        s_NLV = keep_NL[..., None].to(s_NLV.dtype) * s_NLV + take_NL[..., None].to(s_NLV.dtype) * v_NTV[:, t, None]
        a_NL = after_NL
        out.append((p_NTL[:, t, None] @ s_NLV).squeeze(1))
        lse.append(a_NL.to(k_NTL.dtype))
    return (torch.stack(out, 1) if out else v_NTV), (torch.stack(lse, 1) if lse else k_NTL), a_NL, s_NLV
