"""Sums of exponentials by halves: no exponent is positive, and a sum over T rows takes log2(T) roundings.

Scores inside a chunk whose decays differ by channel:

    scores_ij = sum_l a_il b_jl exp(k_jl - A_il)   for j <= i, else 0,     with k_j <= A_j and A nondecreasing in time

One matmul would need exp(-A), which overflows. So the chunk is halved again and again: between the rows of a second
half and the columns of the first, r = A at the second half's first row splits the exponent into k_j - r <= 0 and
r - A_i <= 0. A factor that underflows belongs to a product that underflows too. No r suits both sides of a block on the
diagonal, so blocks of `SUB` rows there are computed element by element.

The running logsumexp, with m and z kept apart (k - lse would be a difference of rounded large numbers):

    m_i = max(a, max_{j <= i} k_j),     z_i = exp(a - m_i) + sum_{j <= i} exp(k_j - m_i),     lse_i = m_i + log z_i
    dk_j = exp(k_j - m_j) sum_{i >= j} exp(m_j - m_i) dz_i

Shape letters: M chunks, C rows of a chunk (a power of two), L channels or latents, H blocks of 2h rows; N batch times
heads, T tokens, R rows of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.memory import empty_like
from subquad.ops.backends import without_autocast
from subquad.tracing import without_tangents

SUB = 4
EMPTY = -(2.0**100)
"""The log-normaliser of no tokens: finite, so differences are too, and the same number in float32 and float64."""
LIMIT = 40.0
"""Rows with logits above the reference by more take the safe form: exp(40) leaves products room in float32."""


def halvings(C: int) -> Iterator[int]:
    """Yield the half sizes h above the diagonal blocks."""
    h = min(SUB, C)
    while h < C:
        yield h
        h *= 2


def _halves(x_MCL: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Return the first and second halves `[M, H, h, L]` of the blocks of 2h rows."""
    x_MHRL = x_MCL.unflatten(1, (-1, 2 * h))
    return x_MHRL[:, :, :h], x_MHRL[:, :, h:]


def _corner(x_MCC: Tensor, h: int) -> Tensor:
    """Return the blocks `[M, H, h, h]` of second-half rows and first-half columns, as a view."""
    blocks = x_MCC.unflatten(2, (-1, 2 * h)).unflatten(1, (-1, 2 * h)).diagonal(dim1=1, dim2=3)
    return blocks.movedim(-1, 1)[:, :, h:, :h]


def _diagonal(x_MCC: Tensor, h: int) -> Tensor:
    """Return the blocks `[M, H, h, h]` on the diagonal, as a view."""
    return x_MCC.unflatten(2, (-1, h)).unflatten(1, (-1, h)).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _exp(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """`exp` of exponents at most 0, except for rounding and in entries masked later, whose inf * 0 would be NaN."""
    return exponent.clamp_(max=0).to(dtype).exp_()


class PairWeights:
    """`w_ij = exp(k_j - A_i)` for the rows and columns of chunks, kept as the factors that products by halves take."""

    def __init__(self, k_MCL: Tensor, A_MCL: Tensor, dtype: torch.dtype) -> None:
        C = k_MCL.shape[1]
        self.sub = min(SUB, C)
        k, A = (x.unflatten(1, (-1, self.sub)) for x in (k_MCL, A_MCL))
        self.inside = _exp(k[:, :, None] - A[:, :, :, None], dtype)
        """`[M, H, i, j, L]` of the blocks on the diagonal; entries with j > i are unused."""
        self.halves = [(h, *_factors(k_MCL, A_MCL, h, dtype)) for h in halvings(C)]

    def scores(self, a_MCL: Tensor, b_MCL: Tensor | None) -> Tensor:
        """Return lower-triangular scores `[M, C, C]`; b = 1 if None."""
        M, C, _ = a_MCL.shape
        scores_MCC = a_MCL.new_zeros(M, C, C)
        w = self.inside * a_MCL.unflatten(1, (-1, self.sub))[:, :, :, None]
        if b_MCL is not None:
            w.mul_(b_MCL.unflatten(1, (-1, self.sub))[:, :, None])
        _diagonal(scores_MCC, self.sub).copy_(w.sum(-1).tril_())
        for h, near, far in self.halves:
            near, source = near * _halves(a_MCL, h)[1], _source(far, b_MCL, h)
            _corner(scores_MCC, h).copy_(near @ source.mT)
        return scores_MCC

    def over_columns(self, x_MCC: Tensor, b_MCL: Tensor | None) -> Tensor:
        """Return `sum_j x_ij b_j w_ij` for a lower-triangular x; b = 1 if None."""
        w = self.inside * _diagonal(x_MCC, self.sub)[..., None]
        if b_MCL is not None:
            w.mul_(b_MCL.unflatten(1, (-1, self.sub))[:, :, None])
        sums_MCL = w.sum(-2).flatten(1, 2)
        for h, near, far in self.halves:
            _halves(sums_MCL, h)[1].add_((_corner(x_MCC, h) @ _source(far, b_MCL, h)).mul_(near))
        return sums_MCL

    def over_rows(self, x_MCC: Tensor, a_MCL: Tensor) -> Tensor:
        """Return `sum_i x_ij a_i w_ij` for a lower-triangular x."""
        w = self.inside * _diagonal(x_MCC, self.sub)[..., None]
        sums_MCL = w.mul_(a_MCL.unflatten(1, (-1, self.sub))[:, :, :, None]).sum(-3).flatten(1, 2)
        for h, near, far in self.halves:
            _halves(sums_MCL, h)[0].add_((_corner(x_MCC, h).mT @ (near * _halves(a_MCL, h)[1])).mul_(far))
        return sums_MCL

    def backward(self, a_MCL: Tensor, b_MCL: Tensor | None, grad_MCC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a and b through `scores`, from a lower-triangular one.

        The exponents' gradients follow from these: `k` gets `b db`, `A` gets `-a da`.
        """
        return self.over_columns(grad_MCC, b_MCL), self.over_rows(grad_MCC, a_MCL)


def _factors(k: Tensor, A: Tensor, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `exp(r - A_i)` for rows of the second halves and `exp(k_j - r)` for rows of the first."""
    (k_first, _), (_, A_second) = _halves(k, h), _halves(A, h)
    r = A_second[:, :, :1]
    return _exp(r - A_second, dtype), _exp(k_first - r, dtype)


def _source(far: Tensor, b_MCL: Tensor | None, h: int) -> Tensor:
    return far if b_MCL is None else far * _halves(b_MCL, h)[0]


def running_max(k_MCL: Tensor) -> Tensor:
    """Return the maximum of the rows up to each, `[M, C, L]`, by halves."""
    m_MCL, h = k_MCL.clone(memory_format=torch.contiguous_format), 1
    while h < m_MCL.shape[1]:
        first, second = _halves(m_MCL, h)
        torch.maximum(first[:, :, -1:], second, out=second)
        h *= 2
    return m_MCL


def decayed_sum(x_MCL: Tensor, m_MCL: Tensor) -> Tensor:
    """`s_i = sum_{j <= i} x_j exp(m_j - m_i)` for nondecreasing m, by halves: log2(C) roundings."""
    s_MCL, h = x_MCL.clone(memory_format=torch.contiguous_format), 1
    while h < s_MCL.shape[1]:
        (s_first, s_second), (m_first, m_second) = _halves(s_MCL, h), _halves(m_MCL, h)
        s_second.addcmul_((m_first[:, :, -1:] - m_second).exp_(), s_first[:, :, -1:])
        h *= 2
    return s_MCL


def reverse_decayed_sum(x_MCL: Tensor, m_MCL: Tensor) -> Tensor:
    """`u_j = sum_{i >= j} x_i exp(m_j - m_i)`, by halves and in reverse: a total minus a prefix would cancel."""
    u_MCL, h = x_MCL.clone(memory_format=torch.contiguous_format), 1
    while h < u_MCL.shape[1]:
        (u_first, u_second), (m_first, m_second) = _halves(u_MCL, h), _halves(m_MCL, h)
        u_first.addcmul_((m_first - m_second[:, :, :1]).exp_(), u_second[:, :, :1])
        h *= 2
    return u_MCL


def spans(tokens: int, chunk: int) -> list[slice]:
    """Return the chunks; the last one may be shorter."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()


PIECE_ENTRIES = 1 << 17
"""Rough number of entries `[N, R, L]` of a piece, which fit into a cache."""
LEAST_ROWS = 128


def _piece_spans(k_NTL: Tensor) -> list[slice]:
    N, T, L = k_NTL.shape
    return spans(T, power_of_two(max(LEAST_ROWS, PIECE_ENTRIES // max(1, N * L))))


def _with_last_row_repeated(x_NRL: Tensor) -> Tensor:
    """Return `x` with its last row repeated up to a power of two of rows."""
    missing = power_of_two(x_NRL.shape[1]) - x_NRL.shape[1]
    return torch.cat([x_NRL, x_NRL[:, -1:].expand(-1, missing, -1)], 1) if missing else x_NRL


def reference(k_NRL: Tensor, a_NL: Tensor) -> Tensor:
    """Return what a piece's logits are compared with: the log-normaliser before it or, without one, its first token.

    It depends on the past only: otherwise a later token would change the bits of earlier rows.
    """
    return torch.where(a_NL <= EMPTY, k_NRL[:, 0].clamp(min=EMPTY), a_NL.to(k_NRL.dtype))


def _safe(k_NRL: Tensor, a_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Return m and z of a piece with any logits, by halves."""
    rows, k_NRL = k_NRL.shape[1], _with_last_row_repeated(k_NRL)
    m_NRL = torch.maximum(running_max(k_NRL), a_NL.to(k_NRL.dtype)[:, None])
    z_NRL = decayed_sum((k_NRL - m_NRL).exp_(), m_NRL)
    z_NRL.add_((a_NL[:, None] - m_NRL).exp_().to(k_NRL.dtype))
    return m_NRL[:, :rows], z_NRL[:, :rows]


@torch.library.custom_op("subquad::running_logsumexp", mutates_args=())
@without_autocast
def running_logsumexp_op(k_NTL: Tensor, a_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Return m and z in the dtype of k; `a` is float64, as it would stop growing at a million tokens in float32.

    On a CPU m is the piece's reference for all rows, which takes one sum instead of sums by halves, up to the first
    logit above it by more than `LIMIT`.
    """
    m_NTL, z_NTL = empty_like(k_NTL), empty_like(k_NTL)
    for piece in _piece_spans(k_NTL):
        k_NRL, m_NRL, z_NRL = (x[:, piece] for x in (k_NTL, m_NTL, z_NTL))
        if k_NTL.device.type != "cpu":  # the test of the logits would wait for the device
            m, z = _safe(k_NRL, a_NL)
        else:
            m = reference(k_NRL, a_NL)[:, None]
            x_NRL = k_NRL - m
            late_NRL = None if x_NRL.numel() and x_NRL.amax() <= LIMIT else ~(x_NRL.cummax(1).values <= LIMIT)
            z = x_NRL.clamp_(max=LIMIT).exp_().cumsum(1).add_((a_NL[:, None] - m).exp_().to(k_NTL.dtype))
            if late_NRL is not None:
                safe = _safe(k_NRL, a_NL)
                m, z = torch.where(late_NRL, safe[0], m), torch.where(late_NRL, safe[1], z)
        m_NRL.copy_(m)
        z_NRL.copy_(z)
        a_NL = m_NRL[:, -1].to(a_NL.dtype) + z_NRL[:, -1].to(a_NL.dtype).log()
    return m_NTL, z_NTL


@running_logsumexp_op.register_fake
def _(k, a):  # type: ignore[no-untyped-def]
    return k.new_empty(k.shape), k.new_empty(k.shape)


@torch.library.custom_op("subquad::running_logsumexp_backward", mutates_args=())
@without_autocast
def running_logsumexp_backward_op(
    grad_NTL: Tensor, k_NTL: Tensor, a_NL: Tensor, m_NTL: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and the initial log-normaliser from that of z; the result does not depend on m."""
    dk_NTL = empty_like(k_NTL)
    u_NL = first_NL = None
    for piece in reversed(_piece_spans(k_NTL)):
        rows = piece.stop - piece.start
        m_NRL, grad_NRL = m_NTL[:, piece], grad_NTL[:, piece]
        u_NRL = grad_NRL.flip(1).cumsum(1).flip(1)
        varies_NL = m_NRL[:, 0] < m_NRL[:, -1]
        if m_NRL.device.type != "cpu" or varies_NL.any():
            whole_NRL = _with_last_row_repeated(m_NRL)
            safe_NRL = reverse_decayed_sum(F.pad(grad_NRL, (0, 0, 0, whole_NRL.shape[1] - rows)), whole_NRL)[:, :rows]
            u_NRL = torch.where(varies_NL[:, None], safe_NRL, u_NRL)
        if u_NL is not None and first_NL is not None:
            u_NRL.addcmul_((m_NRL - first_NL[:, None]).exp_(), u_NL[:, None])
        u_NL, first_NL = u_NRL[:, 0], m_NRL[:, 0]
        dk_NTL[:, piece] = u_NRL * (k_NTL[:, piece] - m_NRL).exp_()
    if u_NL is None or first_NL is None:
        return dk_NTL, torch.zeros_like(a_NL)
    return dk_NTL, (a_NL - first_NL).exp() * u_NL


@running_logsumexp_backward_op.register_fake
def _(grad, k, a, m):  # type: ignore[no-untyped-def]
    return k.new_empty(k.shape), a.new_empty(a.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])
    ctx.mark_non_differentiable(output[0])


@without_tangents
def _backward(ctx: Any, _: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor]:
    return running_logsumexp_backward_op(grad, *ctx.saved_tensors)


running_logsumexp_op.register_autograd(_backward, setup_context=_setup_context)


def running_logsumexp(k_NTL: Tensor, a_NL: Tensor) -> Tensor:
    """Return the running logsumexp `[N, T, L]` in the dtype of k."""
    m_NTL, z_NTL = running_logsumexp_op(k_NTL, a_NL)
    return m_NTL + z_NTL.log()
