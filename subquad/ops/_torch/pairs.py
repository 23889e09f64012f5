"""Scores inside a chunk whose decays differ by channel, without a positive exponent.

    scores_ij = sum_l a_il b_jl exp(k_jl - A_il)   for j <= i, else 0,     with k_j <= A_j and A nondecreasing in time

One matmul would need exp(-A), which overflows. So the chunk is halved again and again: between the rows of a second
half and the columns of the first, r = A at the second half's first row parts the exponent into k_j - r <= 0 and
r - A_i <= 0; blocks of `SUB` rows on the diagonal are taken element by element.

Shape letters: M chunks, C rows of a chunk (a power of two), L channels, N blocks of 2h rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SUB = 4


def halvings(C: int) -> Iterator[int]:
    """The half sizes h above the diagonal blocks."""
    h = min(SUB, C)
    while h < C:
        yield h
        h *= 2


def _halves(x_MCL: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """First and second halves `[M, N, h, L]` of the blocks of 2h rows."""
    x_MNRL = x_MCL.unflatten(1, (-1, 2 * h))
    return x_MNRL[:, :, :h], x_MNRL[:, :, h:]


def _corner(x_MCC: Tensor, h: int) -> Tensor:
    """The blocks `[M, N, h, h]` of second-half rows and first-half columns, as a view."""
    blocks = x_MCC.unflatten(2, (-1, 2 * h)).unflatten(1, (-1, 2 * h)).diagonal(dim1=1, dim2=3)
    return blocks.movedim(-1, 1)[:, :, h:, :h]


def _diagonal(x_MCC: Tensor, h: int) -> Tensor:
    """The blocks `[M, N, h, h]` on the diagonal, as a view."""
    return x_MCC.unflatten(2, (-1, h)).unflatten(1, (-1, h)).diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _exp(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """`exp` of what is at most zero but for rounding."""
    return exponent.clamp_(max=0).to(dtype).exp_()


def _factors(k: Tensor, A: Tensor, h: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`exp(r - A_i)` for rows of the second halves and `exp(k_j - r)` for those of the first."""
    (k_first, _), (_, A_second) = _halves(k, h), _halves(A, h)
    r = A_second[:, :, :1]
    return _exp(r - A_second, dtype), _exp(k_first - r, dtype)


def _inside(k: Tensor, A: Tensor, dtype: torch.dtype) -> Tensor:
    """`exp(k_j - A_i)`, `[M, N, i, j, L]`, of the diagonal blocks; entries with j > i hold rubbish in [0, 1]."""
    h = min(SUB, k.shape[1])
    k, A = k.unflatten(1, (-1, h)), A.unflatten(1, (-1, h))
    return _exp(k[:, :, None] - A[:, :, :, None], dtype)


def pair_scores(a_MCL: Tensor, b_MCL: Tensor | None, k_MCL: Tensor, A_MCL: Tensor) -> Tensor:
    """`scores` `[M, C, C]`, lower triangular; `b` None is one."""
    M, C, _ = a_MCL.shape
    h = min(SUB, C)
    scores_MCC = a_MCL.new_zeros(M, C, C)
    w = _inside(k_MCL, A_MCL, a_MCL.dtype).mul_(a_MCL.unflatten(1, (-1, h))[:, :, :, None])
    if b_MCL is not None:
        w.mul_(b_MCL.unflatten(1, (-1, h))[:, :, None])
    _diagonal(scores_MCC, h).copy_(w.sum(-1).tril_())
    for h in halvings(C):
        near, far = _factors(k_MCL, A_MCL, h, a_MCL.dtype)
        near.mul_(_halves(a_MCL, h)[1])
        if b_MCL is not None:
            far.mul_(_halves(b_MCL, h)[0])
        _corner(scores_MCC, h).copy_(near @ far.mT)
    return scores_MCC


def pair_backward(
    a_MCL: Tensor, b_MCL: Tensor | None, k_MCL: Tensor, A_MCL: Tensor, grad_MCC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`da_i = sum_j grad_ij b_j w_ij`, `db_j = sum_i grad_ij a_i w_ij` with `w_ij = exp(k_j - A_i)`, and the scores.

    `grad` must be lower triangular. The exponents' gradients follow from these: `k` gets `b db`, `A` gets `-a da`.
    """
    M, C, _ = a_MCL.shape
    h = min(SUB, C)
    scores_MCC = a_MCL.new_zeros(M, C, C)
    a, grad = a_MCL.unflatten(1, (-1, h)), _diagonal(grad_MCC, h)[..., None]
    w = _inside(k_MCL, A_MCL, a_MCL.dtype)
    wb = w if b_MCL is None else w * b_MCL.unflatten(1, (-1, h))[:, :, None]
    da = (wb * grad).sum(-2).flatten(1, 2)
    _diagonal(scores_MCC, h).copy_((wb * a[:, :, :, None]).sum(-1).tril_())
    db = w.mul_(a[:, :, :, None]).mul_(grad).sum(-3).flatten(1, 2)
    for h in halvings(C):
        near, far = _factors(k_MCL, A_MCL, h, a_MCL.dtype)
        grad = _corner(grad_MCC, h)
        source = far if b_MCL is None else far * _halves(b_MCL, h)[0]
        _halves(da, h)[1].add_((grad @ source).mul_(near))
        near.mul_(_halves(a_MCL, h)[1])
        _halves(db, h)[0].add_((grad.mT @ near).mul_(far))
        _corner(scores_MCC, h).copy_(near @ source.mT)
    return da, db, scores_MCC


def running_max(k_MCL: Tensor) -> Tensor:
    """The largest of the rows up to each, `[M, C, L]`, by halves."""
    m_MCL, h = k_MCL.clone(memory_format=torch.contiguous_format), 1
    while h < m_MCL.shape[1]:
        first, second = _halves(m_MCL, h)
        torch.maximum(first[:, :, -1:], second, out=second)
        h *= 2
    return m_MCL


def decayed_sum(x_MCL: Tensor, m_MCL: Tensor) -> Tensor:
    """`s_i = sum_{j <= i} x_j exp(m_j - m_i)` for m nondecreasing: by halves, so a row passes log2(C) roundings."""
    s_MCL, h = x_MCL.clone(memory_format=torch.contiguous_format), 1
    while h < s_MCL.shape[1]:
        (s_first, s_second), (m_first, m_second) = _halves(s_MCL, h), _halves(m_MCL, h)
        s_second.addcmul_((m_first[:, :, -1:] - m_second).exp_(), s_first[:, :, -1:])
        h *= 2
    return s_MCL


def reverse_decayed_sum(x_MCL: Tensor, m_MCL: Tensor) -> Tensor:
    """`u_j = sum_{i >= j} x_i exp(m_j - m_i)`: by halves and in reverse, never a total minus a prefix."""
    u_MCL, h = x_MCL.clone(memory_format=torch.contiguous_format), 1
    while h < u_MCL.shape[1]:
        (u_first, u_second), (m_first, m_second) = _halves(u_MCL, h), _halves(m_MCL, h)
        u_first.addcmul_((m_first - m_second[:, :, :1]).exp_(), u_second[:, :, :1])
        h *= 2
    return u_MCL


def chunk_spans(tokens: int, chunk: int) -> list[tuple[int, int, int]]:
    """`(start, stop, size)` of each chunk; the last one's rows are padded up to `size`, a power of two."""
    spans = [(start, start + chunk, chunk) for start in range(0, tokens - chunk + 1, chunk)]
    done = len(spans) * chunk
    if done < tokens:
        spans.append((done, tokens, power_of_two(tokens - done)))
    return spans


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()


def padded(x_NTL: Tensor, span: tuple[int, int, int], fill: float = 0.0) -> Tensor:
    """The rows of a chunk, filled up to its size; a view where nothing is missing."""
    start, stop, size = span
    rows = x_NTL[:, start:stop]
    if stop - start == size:
        return rows
    return torch.nn.functional.pad(rows, (0, 0, 0, size - (stop - start)), value=fill)
