"""One chunk of the running softmax for logits of any size: no exponent is positive, none a difference of large sums.

With m_t = max_{s <= t} k_s and z_t = sum_{s <= t} exp(k_s - m_t), the weight of token j for row i is
exp(k_j - m_i) / z_i. The decays telescope, so a chunk needs k, m and z alone. Derivation:
docs/decisions/0002-running-softmax.md.

Shape letters: N batch times heads, C rows of the chunk, L latents, V value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch.pairs import (
    decayed_sum,
    pair_backward,
    pair_scores,
    power_of_two,
    reverse_decayed_sum,
    running_max,
)

EMPTY = -(2.0**100)
"""The log-normaliser of nothing: finite, so that differences are, and the same number in float32 and float64."""


class ChunkGradients(NamedTuple):
    """Of a chunk's p, k and v, and of the state before it: `r` of its mean, `u` of minus its log-normaliser."""

    p: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    u: Tensor


class _Normalisers:
    """m and z of the rows `[N, C, L]`, and of the row before the chunk `[N, 1, L]`."""

    def __init__(self, k_NCL: Tensor, a_NL: Tensor) -> None:
        self.m_before = a_NL.to(k_NCL.dtype)[:, None]
        self.z_before = (a_NL[:, None] - self.m_before).exp().to(k_NCL.dtype)
        self.m = torch.maximum(running_max(k_NCL), self.m_before)
        self.z = decayed_sum((k_NCL - self.m).exp_(), self.m)
        self.z.addcmul_((self.m_before - self.m).exp_(), self.z_before)

    @property
    def carry(self) -> Tensor:
        """What the state before the chunk still weighs at each row."""
        return (self.m_before - self.m).exp_().mul_(self.z_before).div_(self.z)

    def source(self, k_NCL: Tensor) -> Tensor:
        """What each token weighs at the chunk's end."""
        return (k_NCL - self.m[:, -1:]).exp_().div_(self.z[:, -1:])


def _whole(x_NCL: Tensor, fill: float = 0.0) -> Tensor:
    """The rows, filled up to a power of two."""
    missing = power_of_two(x_NCL.shape[1]) - x_NCL.shape[1]
    return F.pad(x_NCL, (0, 0, 0, missing), value=fill) if missing else x_NCL


def forward(p_NCL: Tensor, k_NCL: Tensor, v_NCV: Tensor, a_NL: Tensor, s_NLV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the log-normaliser (float64) and mean after the chunk."""
    C = k_NCL.shape[1]
    p, k, v = _whole(p_NCL), _whole(k_NCL, EMPTY), _whole(v_NCV)
    norm = _Normalisers(k, a_NL)
    carry = norm.carry
    after = torch.baddbmm(s_NLV * carry[:, -1, :, None], norm.source(k).mT, v)
    out = torch.bmm(carry * p, s_NLV).baddbmm_(pair_scores(p / norm.z, None, k, norm.m), v)
    return out[:, :C], norm.m[:, -1].to(a_NL.dtype) + norm.z[:, -1].to(a_NL.dtype).log(), after


def backward(
    do_NCV: Tensor,
    p_NCL: Tensor,
    k_NCL: Tensor,
    v_NCV: Tensor,
    a_NL: Tensor,
    s_NLV: Tensor,
    r_NLV: Tensor,
    u_NL: Tensor,
) -> ChunkGradients:
    """Gradients, given `r` and `u` of the state after the chunk. A bar: divided by z."""
    C = k_NCL.shape[1]
    do, p, k, v = _whole(do_NCV), _whole(p_NCL), _whole(k_NCL, EMPTY), _whole(v_NCV)
    norm = _Normalisers(k, a_NL)
    carry, source = norm.carry, norm.source(k)
    dp, dk, scores = pair_backward(p / norm.z, None, k, norm.m, torch.bmm(do, v.mT).tril_())
    dp.div_(norm.z).add_(torch.bmm(do, s_NLV.mT).mul_(carry))
    dv = torch.bmm(scores.mT, do).baddbmm_(source, r_NLV)
    dk.add_(torch.bmm(v, r_NLV.mT).mul_(source))
    u_bar = reverse_decayed_sum((p * dp).div_(norm.z), norm.m)
    u_bar.add_((norm.m - norm.m[:, -1:]).exp_().mul_(u_NL[:, None] / norm.z[:, -1:]))
    dk.sub_((k - norm.m).exp_().mul_(u_bar))
    r = torch.baddbmm(r_NLV * carry[:, -1, :, None], (carry * p).mT, do)
    u = ((norm.m_before - norm.m[:, :1]).exp_() * norm.z_before * u_bar[:, :1])[:, 0]
    return ChunkGradients(dp[:, :C], dk[:, :C], dv[:, :C], r, u)
