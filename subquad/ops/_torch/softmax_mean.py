"""One chunk of the running softmax with one latent (ELiTA): a running sum takes the place of the scores, of rank one.

    o_i = q_i (z s + sum_{j <= i} E_j v_j),   q_i = p_i / Z_i,   Z_i = z + sum_{j <= i} E_j,   E_j = exp(k_j - r)

Shape letters: N batch times heads, C rows of the chunk, V value channels; L = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.ops._torch.softmax_safe import ChunkGradients


def forward(p_NC1: Tensor, e_NC1: Tensor, v_NCV: Tensor, z_N1: Tensor, s_N1V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and after the chunk the normaliser `[N, 1]` and the sum, not the mean, of the values `[N, 1, V]`."""
    total_NC1 = e_NC1.cumsum(1).add_(z_N1[:, None])
    sums_NCV = (e_NC1 * v_NCV).cumsum(1).add_(s_N1V * z_N1[:, None])
    end_N1V = sums_NCV[:, -1:].clone()
    return sums_NCV.mul_(p_NC1 / total_NC1), total_NC1[:, -1], end_N1V


def backward(
    do_NCV: Tensor,
    p_NC1: Tensor,
    e_NC1: Tensor,
    v_NCV: Tensor,
    z_N1: Tensor,
    s_N1V: Tensor,
    r_N1V: Tensor,
    u_N1: Tensor,
) -> ChunkGradients:
    """Gradients of p, k, v and the state before, given `r` and `u` of the state after."""
    total_NC1 = e_NC1.cumsum(1).add_(z_N1[:, None])
    q_NC1 = p_NC1 / total_NC1
    end_N1 = total_NC1[:, -1]
    sums_NCV = (e_NC1 * v_NCV).cumsum(1).add_(s_N1V * z_N1[:, None])
    dp_NC1 = sums_NCV.mul_(do_NCV).sum(-1, keepdim=True).div_(total_NC1)
    # Sums over later rows are made from the end: a total minus a prefix would cancel.
    dx_NCV = (do_NCV * q_NC1).flip(1).cumsum(1).flip(1).add_(r_N1V / end_N1[..., None])
    taken_NC1 = (q_NC1 * dp_NC1).flip(1).cumsum(1).flip(1).add_((u_N1 / end_N1)[:, None])
    dk_NC1 = torch.mul(dx_NCV, v_NCV, out=sums_NCV).sum(-1, keepdim=True).sub_(taken_NC1).mul_(e_NC1)
    r_N1V = dx_NCV[:, :1] * z_N1[:, None]
    return ChunkGradients(dp_NC1, dk_NC1, dx_NCV.mul_(e_NC1), r_N1V, taken_NC1[:, 0] * z_N1)
