"""One chunk of the running softmax as linear attention, with E_j = exp(k_j - r) and Z_i = z + sum_{j <= i} E_j:

    o_i = q_i . (z s + sum_{j <= i} E_j (x) v_j),   q_i = p_i / Z_i

where z and s are the normaliser, in units of exp(r), and the mean before the chunk.

Shape letters: N batch times heads, C rows of the chunk, L latents, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops._torch.softmax_safe import ChunkGradients


def forward(p_NCL: Tensor, e_NCL: Tensor, v_NCV: Tensor, z_NL: Tensor, s_NLV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and after the chunk the normaliser `[N, L]` and the sum, not the mean, of the values `[N, L, V]`."""
    total_NCL = e_NCL.cumsum(1).add_(z_NL[:, None])
    q_NCL = p_NCL / total_NCL
    before_NLV = s_NLV * z_NL[..., None]
    out_NCV = torch.bmm(torch.bmm(q_NCL, e_NCL.mT).tril_(), v_NCV).baddbmm_(q_NCL, before_NLV)
    return out_NCV, total_NCL[:, -1], before_NLV.baddbmm_(e_NCL.mT, v_NCV)


def backward(
    do_NCV: Tensor,
    p_NCL: Tensor,
    e_NCL: Tensor,
    v_NCV: Tensor,
    z_NL: Tensor,
    s_NLV: Tensor,
    r_NLV: Tensor,
    u_NL: Tensor,
) -> ChunkGradients:
    """Gradients of p, k, v and the state before, given `r` and `u` of the state after."""
    total_NCL = e_NCL.cumsum(1).add_(z_NL[:, None])
    q_NCL = p_NCL / total_NCL
    end_NL = total_NCL[:, -1]
    r_NLV, u_NL = r_NLV / end_NL[..., None], u_NL / end_NL
    grad_NCC = torch.bmm(do_NCV, v_NCV.mT).tril_()
    scores_NCC = torch.bmm(q_NCL, e_NCL.mT).tril_()
    dv_NCV = torch.bmm(scores_NCC.mT, do_NCV).baddbmm_(e_NCL, r_NLV)
    dp_NCL = torch.bmm(grad_NCC, e_NCL).baddbmm_(do_NCV, (s_NLV * z_NL[..., None]).mT).div_(total_NCL)
    de_NCL = torch.bmm(grad_NCC.mT, q_NCL).baddbmm_(v_NCV, r_NLV.mT)
    # What later rows take off the normaliser, summed from the end: a total minus a prefix would cancel.
    taken_NCL = (q_NCL * dp_NCL).flip(1).cumsum(1).flip(1).add_(u_NL[:, None])
    dk_NCL = de_NCL.sub_(taken_NCL).mul_(e_NCL)
    r_NLV = torch.baddbmm(r_NLV, q_NCL.mT, do_NCV).mul_(z_NL[..., None])
    return ChunkGradients(dp_NCL, dk_NCL, dv_NCV, r_NLV, taken_NCL[:, 0] * z_NL)
