"""Causal Latte's recurrence in chunks, with a hand-written backward: memory linear in T, one state a chunk.

With m_t = max_{s <= t} k_s and z_t = sum_{s <= t} exp(k_s - m_t), the weight of token j for row i is
exp(k_j - m_i) / z_i; the state S_t is the mean of the values so weighted, and o_t = p_t S_t. The decays telescope, so a
chunk needs k, m and z alone; no exponent is positive, and none is a difference of large rounded numbers, since m is one
of the k. Derivation: docs/decisions/0002-running-softmax.md.

Shape letters: N batch times heads, T tokens, L latents, V value channels, M chunks of a slab, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from subquad.ops.backends import without_autocast

CHUNK = 64
SLAB_ENTRIES = 1 << 18
SLAB_CHUNKS = 32
"""What is worked on at once: about so many entries `[N, rows, L]`, enough for several threads and few enough for their
caches, but no more chunks than this."""
EMPTY = -(2.0**100)
"""The log-normaliser of nothing: finite, so that differences are, and the same number in float32 and float64."""


class Slab(NamedTuple):
    """Neighbouring chunks that are worked on together, `[M, C, .]` with M = N times chunks: small chunks alone would
    leave threads idle. Only the states pass from chunk to chunk, one after another.
    """

    start: int
    stop: int
    chunks: int
    size: int

    def rows(self, x_NTL: Tensor, fill: float = 0.0) -> Tensor:
        """The slab's rows of a tensor, filled up to its size."""
        missing = self.chunks * self.size - (self.stop - self.start)
        x = x_NTL[:, self.start : self.stop]
        x = F.pad(x, (0, 0, 0, missing), value=fill) if missing else x
        return x.unflatten(1, (self.chunks, self.size)).flatten(0, 1)

    def repeated(self, x_NTL: Tensor) -> Tensor:
        """The slab's rows, the last one repeated up to its size."""
        missing = self.chunks * self.size - (self.stop - self.start)
        x = x_NTL[:, self.start : self.stop]
        x = torch.cat([x, x[:, -1:].expand(-1, missing, -1)], 1) if missing else x
        return x.unflatten(1, (self.chunks, self.size)).flatten(0, 1)

    def back(self, x_MCL: Tensor) -> Tensor:
        """The real rows `[N, rows, L]` of what was computed for the slab."""
        return x_MCL.unflatten(0, (-1, self.chunks)).flatten(1, 2)[:, : self.stop - self.start]

    def split(self, x_MCL: Tensor) -> Tensor:
        """`[M, ...]` as `[N, chunks, ...]`."""
        return x_MCL.unflatten(0, (-1, self.chunks))


def slabs(tokens: int, chunk: int, width: int) -> list[Slab]:
    """Slabs of about `SLAB_ENTRIES` entries, at most `SLAB_CHUNKS` chunks; the last tokens make a smaller one."""
    size = power_of_two(chunk)
    whole = tokens // size
    together = max(1, min(SLAB_CHUNKS, SLAB_ENTRIES // max(1, size * width)))  # an empty batch has no width
    out = [
        Slab(first * size, min(first + together, whole) * size, min(together, whole - first), size)
        for first in range(0, whole, together)
    ]
    done = whole * size
    return out if done == tokens else [*out, Slab(done, tokens, 1, power_of_two(tokens - done))]


class Normalisers(NamedTuple):
    """m and z of a slab's rows, `[M, C, L]`, and of the row before each chunk, `[M, 1, L]`."""

    m: Tensor
    z: Tensor
    m_before: Tensor
    z_before: Tensor

    @property
    def carry(self) -> Tensor:
        """What a state before the chunk still weighs at each row."""
        return (self.m_before - self.m).exp_().mul_(self.z_before).div_(self.z)

    def source(self, k_MCL: Tensor) -> Tensor:
        """What each token weighs at the chunk's end."""
        return (k_MCL - self.m[:, -1:]).exp_().div_(self.z[:, -1:])


def _normalisers(k_MCL: Tensor, a_NL: Tensor, slab: Slab) -> tuple[Normalisers, Tensor]:
    """m and z, and the float64 log-normaliser after the slab: in float32 it would stop growing at a million tokens."""
    local_m = running_max(k_MCL)
    ends = slab.split(local_m[:, -1])
    befores, m_NL = [], a_NL.to(k_MCL.dtype)
    for chunk in range(slab.chunks):
        befores.append(m_NL)
        m_NL = torch.maximum(m_NL, ends[:, chunk])
    m_before = torch.stack(befores, 1).flatten(0, 1)[:, None]
    m = torch.maximum(local_m, m_before)
    z = decayed_sum((k_MCL - m).exp_(), m)
    z_ends, m_ends, z_befores = slab.split(z[:, -1]).to(a_NL.dtype), slab.split(m[:, -1]).to(a_NL.dtype), []
    m_starts = slab.split(m_before[:, 0]).to(a_NL.dtype)
    for chunk in range(slab.chunks):
        z_befores.append((a_NL - m_starts[:, chunk]).exp())
        a_NL = m_ends[:, chunk] + ((a_NL - m_ends[:, chunk]).exp() + z_ends[:, chunk]).log()
    z_before = torch.stack(z_befores, 1).flatten(0, 1).to(k_MCL.dtype)[:, None]
    z.addcmul_((m_before - m).exp_(), z_before)
    return Normalisers(m, z, m_before, z_before), a_NL


@torch.library.custom_op("subquad::running_softmax", mutates_args=())
@without_autocast
def running_softmax_op(
    p_NTL: Tensor, k_NTL: Tensor, v_NTV: Tensor, a_NL: Tensor, s_NLV: Tensor, chunk: int, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs; m and z, `[N, T, L]`; the last log-normaliser (float64) and state; states before chunks (if `save`)."""
    N, T, L = k_NTL.shape
    out_NTV, m_NTL, z_NTL = (x.new_empty(x.shape) for x in (v_NTV, k_NTL, k_NTL))
    a_NL, s_NLV = (x.clone(memory_format=torch.contiguous_format) for x in (a_NL, s_NLV))
    kept = []
    for slab in slabs(T, chunk, N * L):
        p, k, v = slab.rows(p_NTL), slab.rows(k_NTL, EMPTY), slab.rows(v_NTV)
        norm, a_NL = _normalisers(k, a_NL, slab)
        m_NTL[:, slab.start : slab.stop], z_NTL[:, slab.start : slab.stop] = slab.back(norm.m), slab.back(norm.z)
        carry = norm.carry
        added, whole = slab.split(torch.bmm(norm.source(k).mT, v)), slab.split(carry[:, -1])
        befores = []
        for n in range(slab.chunks):
            befores.append(s_NLV)
            s_NLV = torch.addcmul(added[:, n], s_NLV, whole[:, n, :, None])
        s_MLV = torch.stack(befores, 1).flatten(0, 1)
        out = torch.bmm(carry.mul_(p), s_MLV)
        out.baddbmm_(pair_scores(p.div(norm.z), None, k, norm.m), v)
        out_NTV[:, slab.start : slab.stop] = slab.back(out)
        if save:
            kept += befores
    states = torch.stack(kept, 1) if kept else s_NLV.new_empty(N, 0, *s_NLV.shape[1:])
    return out_NTV, m_NTL, z_NTL, a_NL, s_NLV, states


@running_softmax_op.register_fake
def _(p, k, v, a, s, chunk, save):  # type: ignore[no-untyped-def]
    N, T, L = k.shape
    count = sum(slab.chunks for slab in slabs(T, chunk, N * L)) if save else 0
    return (*(x.new_empty(x.shape) for x in (v, k, k, a, s)), s.new_empty(N, count, *s.shape[1:]))


@torch.library.custom_op("subquad::running_softmax_backward", mutates_args=())
@without_autocast
def running_softmax_backward_op(
    grad_NTV: Tensor,
    grad_z_NTL: Tensor | None,
    grad_a_NL: Tensor | None,
    grad_s_NLV: Tensor | None,
    p_NTL: Tensor,
    k_NTL: Tensor,
    v_NTV: Tensor,
    a_NL: Tensor,
    m_NTL: Tensor,
    z_NTL: Tensor,
    s_end_NLV: Tensor,
    states: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of p, k, v and of the initial log-normaliser and state.

    `r` is the gradient of the state at a chunk's end, `u` that of minus its log-normaliser; `_bar` is divided by z.
    """
    N, T, L = k_NTL.shape
    dp_NTL, dk_NTL, dv_NTV = (x.new_empty(x.shape) for x in (p_NTL, k_NTL, v_NTV))
    r_NLV = torch.zeros_like(s_end_NLV) if grad_s_NLV is None else grad_s_NLV
    u_NL = (s_end_NLV * r_NLV).sum(-1)
    if grad_a_NL is not None:
        u_NL = u_NL - grad_a_NL.to(u_NL.dtype)
    last = states.shape[1]
    for slab in reversed(slabs(T, chunk, N * L)):
        span, last = slice(slab.start, slab.stop), last - slab.chunks
        p, k, v, do = slab.rows(p_NTL), slab.rows(k_NTL, EMPTY), slab.rows(v_NTV), slab.rows(grad_NTV)
        norm = _saved_normalisers(m_NTL, z_NTL, a_NL, slab)
        m, z = norm.m, norm.z
        carry, source = norm.carry, norm.source(k)
        s_MLV = states[:, last : last + slab.chunks].flatten(0, 1)
        dp, dk, scores = pair_backward(p / z, None, k, m, torch.bmm(do, v.mT).tril_())
        dp.div_(z).add_(torch.bmm(do, s_MLV.mT).mul_(carry))
        added, whole = slab.split(torch.bmm((carry * p).mT, do)), slab.split(carry[:, -1])
        afters = []
        for n in reversed(range(slab.chunks)):
            afters.append(r_NLV)
            r_NLV = torch.addcmul(added[:, n], r_NLV, whole[:, n, :, None])
        r_MLV = torch.stack(afters[::-1], 1).flatten(0, 1)
        dv_NTV[:, span] = slab.back(torch.bmm(scores.mT, do).baddbmm_(source, r_MLV))
        dk.add_(torch.bmm(v, r_MLV.mT).mul_(source))
        x_bar = (p * dp).div_(z)
        if grad_z_NTL is not None:
            x_bar -= slab.rows(grad_z_NTL)
        u_bar = reverse_decayed_sum(x_bar, m)
        u_NL = _carry_u(u_bar, u_NL, norm, slab)
        dk.sub_((k - m).exp_().mul_(u_bar))
        dp_NTL[:, span], dk_NTL[:, span] = slab.back(dp), slab.back(dk)
    s_start = states[:, 0] if T else s_end_NLV
    da_NL = (s_start * r_NLV).sum(-1) - u_NL
    return dp_NTL, dk_NTL, dv_NTV, da_NL.to(a_NL.dtype), r_NLV.clone()


def _saved_normalisers(m_NTL: Tensor, z_NTL: Tensor, a_NL: Tensor, slab: Slab) -> Normalisers:
    m, z = slab.repeated(m_NTL), slab.repeated(z_NTL)
    if slab.start:
        first = m_NTL[:, slab.start - 1], z_NTL[:, slab.start - 1]
    else:
        m_NL = a_NL.to(m.dtype)
        first = m_NL, (a_NL - m_NL).exp().to(m.dtype)
    ends = (slab.split(x[:, -1])[:, :-1] for x in (m, z))
    m_before, z_before = (
        torch.cat([x[:, None], end], 1).flatten(0, 1)[:, None] for x, end in zip(first, ends, strict=True)
    )
    return Normalisers(m, z, m_before, z_before)


def _carry_u(u_bar_MCL: Tensor, u_NL: Tensor, norm: Normalisers, slab: Slab) -> Tensor:
    """Add to each row what later chunks take off the normaliser; returns what passes to the slab before."""
    m_end, z_end = norm.m[:, -1:], norm.z[:, -1:]
    to_start, from_end = norm.m_before - norm.m[:, :1], norm.m[:, :1] - m_end
    local, to_start = slab.split(u_bar_MCL[:, 0]), slab.split((to_start.exp_() * norm.z_before)[:, 0])
    from_end = slab.split((from_end.exp_() / z_end)[:, 0])
    afters = []
    for n in reversed(range(slab.chunks)):
        afters.append(u_NL)
        u_NL = to_start[:, n] * torch.addcmul(local[:, n], u_NL, from_end[:, n])
    after = torch.stack(afters[::-1], 1).flatten(0, 1)[:, None] / z_end
    u_bar_MCL.add_((norm.m - m_end).exp_().mul_(after))
    return u_NL


@running_softmax_backward_op.register_fake
def _(grad, grad_z, grad_a, grad_s, p, k, v, a, m, z, s_end, states, chunk):  # type: ignore[no-untyped-def]
    return (*(x.new_empty(x.shape) for x in (p, k, v, a)), s_end.new_empty(s_end.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    p, k, v, a, _, chunk, _ = inputs
    _, m, z, _, s_end, states = output
    ctx.save_for_backward(p, k, v, a, m, z, s_end, states)
    ctx.chunk = chunk
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(m, states)


def _backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    p, k, v, a, m, z, s_end, states = ctx.saved_tensors
    _, grad_z, grad_a, grad_s, _ = rest
    grad = torch.zeros_like(v) if grad is None else grad
    gradients = running_softmax_backward_op(grad, grad_z, grad_a, grad_s, p, k, v, a, m, z, s_end, states, ctx.chunk)
    return *gradients, None, None


running_softmax_op.register_autograd(_backward, setup_context=_setup_context)
