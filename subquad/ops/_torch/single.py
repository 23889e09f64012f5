"""The scans of a single token, as in a decoding step, in few operations: chunks gain nothing there.

Shape letters: N = B * H, K key channels, L latents, V value channels, F = 1 or K decays.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_scan(
    q_N1K: Tensor,
    i_N1K: Tensor,
    v_N1V: Tensor,
    log_f_N1KV: Tensor | None,
    state_NKV: Tensor,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`S = f * S + i (x) v`, `o = q S`; with `normalise` the last state column sums the weights.

    The decays have size 1 along the channels that share them.
    """
    if normalise:
        v_N1V = F.pad(v_N1V, (0, 1), value=1.0)
    if log_f_N1KV is not None:
        state_NKV = log_f_N1KV[:, 0].exp() * state_NKV
    state_NKV = torch.baddbmm(state_NKV, i_N1K.mT, v_N1V)
    out_N1V = torch.bmm(q_N1K, state_NKV)
    if not normalise:
        return out_N1V, state_NKV
    total_N11 = out_N1V[..., -1:] + eps
    # If a token's weights sum to zero they are all zero, and so is its output.
    return out_N1V[..., :-1] / total_N11.masked_fill(total_N11 == 0, torch.inf), state_NKV


def delta_scan(
    q_NTK: Tensor, k_NTK: Tensor, v_NTV: Tensor, beta_NT1: Tensor, log_f_NTF: Tensor | None, state_NKV: Tensor
) -> tuple[Tensor, Tensor]:
    """`S = (I - b k k^T) (f * S) + b k (x) v`, `o = q S`, for a token or a few, one after another."""
    outs = []
    for t in range(v_NTV.shape[1]):
        q_N1K, k_N1K, v_N1V, beta_N11 = (x[:, t : t + 1] for x in (q_NTK, k_NTK, v_NTV, beta_NT1))
        if log_f_NTF is not None:
            state_NKV = log_f_NTF[:, t : t + 1].exp().mT * state_NKV
        u_N1V = torch.baddbmm(v_N1V, k_N1K, state_NKV, alpha=-1) * beta_N11
        state_NKV = torch.baddbmm(state_NKV, k_N1K.mT, u_N1V)
        outs.append(torch.bmm(q_N1K, state_NKV))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1), state_NKV


def running_softmax(
    p_N1L: Tensor, k_N1L: Tensor, v_N1V: Tensor, a_NL: Tensor, s_NLV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`a' = log(exp a + exp k)`, `S' = exp(a - a') S + exp(k - a') (x) v`, `o = p S'`; return o, a', and both again.

    The first a' has the dtype of k; the state's is float64: see `subquad.ops._torch.log_space_sums`.
    """
    k_NL = k_N1L[:, 0].double()
    after_NL = torch.logaddexp(a_NL, k_NL)
    shares_2NL = torch.stack([a_NL, k_NL]).sub_(after_NL).exp().to(s_NLV.dtype)
    s_NLV = torch.baddbmm(shares_2NL[0, ..., None] * s_NLV, shares_2NL[1, ..., None], v_N1V)
    return torch.bmm(p_N1L, s_NLV), after_NL[:, None].to(k_N1L.dtype), after_NL, s_NLV
