"""Causal Latte's recurrence in chunks, with a hand-written backward: memory linear in T, one state a chunk.

With m_t = max_{s <= t} k_s and z_t = sum_{s <= t} exp(k_s - m_t), the weight of token j for row i is
exp(k_j - m_i) / z_i; the state S_t is the mean of the values so weighted, and o_t = p_t S_t. The decays telescope, so a
chunk needs k, m and z alone; no exponent is positive, and none is a difference of large rounded numbers, since m is one
of the k. Derivation: docs/decisions/0002-running-softmax.md.

Shape letters: N batch times heads, T tokens, L latents, V value channels, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.ops._torch.pairs import (
    chunk_spans,
    decayed_sum,
    padded,
    pair_backward,
    pair_scores,
    power_of_two,
    repeat_last,
    reverse_decayed_sum,
    running_max,
)
from subquad.ops.backends import without_autocast

CHUNK = 64
EMPTY = -(2.0**100)
"""The log-normaliser of nothing: finite, so that differences are, and the same number in float32 and float64."""


class Carry(NamedTuple):
    """The log-normaliser at a chunk's start, `m + log z`, `[N, 1, L]` each: m in the dtype of k, z near 1."""

    m: Tensor
    z: Tensor

    @staticmethod
    def of(a_NL: Tensor, dtype: torch.dtype) -> Carry:
        """Of a float64 log-normaliser."""
        m = a_NL.to(dtype)
        return Carry(m[:, None], (a_NL - m).exp().to(dtype)[:, None])


@torch.library.custom_op("subquad::running_softmax", mutates_args=())
@without_autocast
def running_softmax_op(
    p_NTL: Tensor, k_NTL: Tensor, v_NTV: Tensor, a_NL: Tensor, s_NLV: Tensor, chunk: int, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs; m and z, `[N, T, L]`; the last log-normaliser (float64) and state; states before chunks (if `save`)."""
    N, T, V = v_NTV.shape
    out_NTV, m_NTL, z_NTL = v_NTV.new_empty(N, T, V), k_NTL.new_empty(k_NTL.shape), k_NTL.new_empty(k_NTL.shape)
    a_NL, s_NLV = (x.clone(memory_format=torch.contiguous_format) for x in (a_NL, s_NLV))
    states = []
    for span in chunk_spans(T, power_of_two(chunk)):
        p, k, v = padded(p_NTL, span), padded(k_NTL, span, EMPTY), padded(v_NTV, span)
        start, stop, _ = span
        rows = slice(0, stop - start)
        if save:
            states.append(s_NLV.clone())
        before = Carry.of(a_NL, k.dtype)
        m = torch.maximum(running_max(k), before.m)
        old = (before.m - m).exp_().mul_(before.z)
        z = decayed_sum((k - m).exp_(), m).add_(old)
        m_NTL[:, start:stop], z_NTL[:, start:stop] = m[:, rows], z[:, rows]
        p = p / z
        out = torch.bmm(old.mul_(p), s_NLV)
        out.baddbmm_(pair_scores(p, None, k, m), v)
        out_NTV[:, start:stop] = out[:, rows]
        m_end, z_end = m[:, -1:], z[:, -1:]
        s_NLV.mul_(((before.m - m_end).exp_() * before.z / z_end).mT)
        s_NLV.baddbmm_((k - m_end).exp_().div_(z_end).mT, v)
        a_NL = m_end[:, 0].to(a_NL.dtype) + _log_normaliser(a_NL, k, m_end)
    kept = torch.stack(states) if states else s_NLV.new_empty(0, *s_NLV.shape)
    return out_NTV, m_NTL, z_NTL, a_NL, s_NLV, kept


def _log_normaliser(a_NL: Tensor, k_NCL: Tensor, m_N1L: Tensor) -> Tensor:
    """log z at the chunk's end in float64: in float32 it would stop growing after some million tokens."""
    m_N1L = m_N1L.to(a_NL.dtype)
    return ((k_NCL.to(a_NL.dtype) - m_N1L).exp_().sum(1) + (a_NL - m_N1L[:, 0]).exp()).log()


@running_softmax_op.register_fake
def _(p, k, v, a, s, chunk, save):  # type: ignore[no-untyped-def]
    states = s.new_empty(len(chunk_spans(k.shape[1], power_of_two(chunk))) if save else 0, *s.shape)
    return (*(x.new_empty(x.shape) for x in (v, k, k, a, s)), states)


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

    `r` is the gradient of the state at the chunk's end, `u` that of minus its log-normaliser. Tensors named with a bar
    are divided by z.
    """
    dp_NTL, dk_NTL, dv_NTV = p_NTL.new_empty(p_NTL.shape), k_NTL.new_empty(k_NTL.shape), v_NTV.new_empty(v_NTV.shape)
    r_NLV = torch.zeros_like(s_end_NLV) if grad_s_NLV is None else grad_s_NLV.clone()
    u_N1L = (s_end_NLV * r_NLV).sum(-1)[:, None]
    if grad_a_NL is not None:
        u_N1L = u_N1L - grad_a_NL.to(u_N1L.dtype)[:, None]
    spans = chunk_spans(k_NTL.shape[1], power_of_two(chunk))
    for span, s_NLV in zip(reversed(spans), states.flip(0), strict=True):
        start, stop, _ = span
        rows = slice(0, stop - start)
        p, k, v, do = (padded(x, span, fill) for x, fill in ((p_NTL, 0), (k_NTL, EMPTY), (v_NTV, 0), (grad_NTV, 0)))
        m, z = (repeat_last(x, span) for x in (m_NTL, z_NTL))
        first = start == 0
        before = Carry.of(a_NL, k.dtype) if first else Carry(m_NTL[:, start - 1, None], z_NTL[:, start - 1, None])
        m_end, z_end = m[:, -1:], z[:, -1:]
        carry = (before.m - m).exp_().mul_(before.z).div_(z)
        source = (k - m_end).exp_().div_(z_end)
        dp, dk, scores = pair_backward(p / z, None, k, m, torch.bmm(do, v.mT).tril_())
        dp.div_(z).add_(torch.bmm(do, s_NLV.mT).mul_(carry))
        dv_NTV[:, start:stop] = torch.bmm(scores.mT, do).baddbmm_(source, r_NLV)[:, rows]
        dk.add_(torch.bmm(v, r_NLV.mT).mul_(source))
        x_bar = (p * dp).div_(z)
        if grad_z_NTL is not None:
            x_bar -= padded(grad_z_NTL, span)
        u_bar = reverse_decayed_sum(x_bar, m).add_((m - m_end).exp_().mul_(u_N1L / z_end))
        dk.sub_((k - m).exp_().mul_(u_bar))
        dp_NTL[:, start:stop], dk_NTL[:, start:stop] = dp[:, rows], dk[:, rows]
        whole = (before.m - m_end).exp_() * before.z / z_end
        r_NLV = (r_NLV * whole.mT).baddbmm_(carry.mul_(p).mT, do)
        u_N1L = u_bar[:, :1] * (before.m - m[:, :1]).exp_() * before.z
    s_start = states[0] if spans else s_end_NLV
    da_NL = (s_start * r_NLV).sum(-1) - u_N1L[:, 0]
    return dp_NTL, dk_NTL, dv_NTV, da_NL.to(a_NL.dtype), r_NLV


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
