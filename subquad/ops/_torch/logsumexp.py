"""The running logsumexp, by halves: no exponent is positive, and a row passes log2 of as many roundings as tokens.

    m_i = max(a, max_{j <= i} k_j),     z_i = exp(a - m_i) + sum_{j <= i} exp(k_j - m_i),     lse_i = m_i + log z_i
    dk_j = exp(k_j - m_j) sum_{i >= j} exp(m_j - m_i) dz_i

m and z are kept apart: k - lse would be a difference of rounded large numbers.

Shape letters: N batch times heads, T tokens, L latents; R rows of a piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops._torch.memory import empty_like
from subquad.ops._torch.pairs import decayed_sum, power_of_two, reverse_decayed_sum, running_max
from subquad.ops.backends import without_autocast

PIECE_ENTRIES = 1 << 17
"""About so many entries `[N, R, L]` are worked on at once: few pieces of many rows, or what caches hold."""
LEAST_ROWS = 128


def _pieces(k_NTL: Tensor) -> list[slice]:
    N, T, L = k_NTL.shape
    rows = power_of_two(max(LEAST_ROWS, PIECE_ENTRIES // max(1, N * L)))
    return [slice(start, min(start + rows, T)) for start in range(0, T, rows)]


def _whole(x_NRL: Tensor) -> Tensor:
    """The last row repeated up to a power of two."""
    missing = power_of_two(x_NRL.shape[1]) - x_NRL.shape[1]
    return torch.cat([x_NRL, x_NRL[:, -1:].expand(-1, missing, -1)], 1) if missing else x_NRL


@torch.library.custom_op("subquad::running_logsumexp", mutates_args=())
@without_autocast
def running_logsumexp_op(k_NTL: Tensor, a_NL: Tensor) -> tuple[Tensor, Tensor]:
    """m and z in the dtype of k; `a` is float64: in float32 it would stop growing at a million tokens."""
    m_NTL, z_NTL = empty_like(k_NTL), empty_like(k_NTL)
    for piece in _pieces(k_NTL):
        rows = piece.stop - piece.start
        k_NRL = _whole(k_NTL[:, piece])
        m_NRL = torch.maximum(running_max(k_NRL), a_NL.to(k_NRL.dtype)[:, None])
        z_NRL = decayed_sum((k_NRL - m_NRL).exp_(), m_NRL)
        z_NRL.add_((a_NL[:, None] - m_NRL).exp_().to(k_NRL.dtype))
        m_NTL[:, piece], z_NTL[:, piece] = m_NRL[:, :rows], z_NRL[:, :rows]
        a_NL = m_NRL[:, rows - 1].to(a_NL.dtype) + z_NRL[:, rows - 1].to(a_NL.dtype).log()
    return m_NTL, z_NTL


@running_logsumexp_op.register_fake
def _(k, a):  # type: ignore[no-untyped-def]
    return k.new_empty(k.shape), k.new_empty(k.shape)


@torch.library.custom_op("subquad::running_logsumexp_backward", mutates_args=())
@without_autocast
def running_logsumexp_backward_op(
    grad_NTL: Tensor, k_NTL: Tensor, a_NL: Tensor, m_NTL: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of k and of the initial log-normaliser, given that of z; m, a shift, has none."""
    dk_NTL = empty_like(k_NTL)
    u_NL = first_NL = None
    for piece in reversed(_pieces(k_NTL)):
        rows = piece.stop - piece.start
        m_NRL = _whole(m_NTL[:, piece])
        u_NRL = reverse_decayed_sum(F.pad(grad_NTL[:, piece], (0, 0, 0, m_NRL.shape[1] - rows)), m_NRL)
        if u_NL is not None and first_NL is not None:
            u_NRL.addcmul_((m_NRL - first_NL[:, None]).exp_(), u_NL[:, None])
        u_NL, first_NL = u_NRL[:, 0], m_NRL[:, 0]
        dk_NTL[:, piece] = u_NRL[:, :rows] * (k_NTL[:, piece] - m_NTL[:, piece]).exp_()
    if u_NL is None or first_NL is None:
        return dk_NTL, torch.zeros_like(a_NL)
    return dk_NTL, (a_NL - first_NL).exp() * u_NL


@running_logsumexp_backward_op.register_fake
def _(grad, k, a, m):  # type: ignore[no-untyped-def]
    return k.new_empty(k.shape), a.new_empty(a.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])
    ctx.mark_non_differentiable(output[0])


def _backward(ctx: Any, _: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    return running_logsumexp_backward_op(grad, *ctx.saved_tensors)


running_logsumexp_op.register_autograd(_backward, setup_context=_setup_context)


def running_logsumexp(k_NTL: Tensor, a_NL: Tensor) -> Tensor:
    """`lse` `[N, T, L]`, in the dtype of k."""
    m_NTL, z_NTL = running_logsumexp_op(k_NTL, a_NL)
    return m_NTL + z_NTL.log()
