"""Causal Latte's recurrence in chunks, with a hand-written backward: memory linear in T, one state a chunk.

With A_t = logsumexp_{s <= t} k_s and S_t = sum_{s <= t} exp(k_s - A_t) v_s, the output is o_t = p_t S_t. The decays
telescope, so a chunk needs k and A alone, and no exponent is positive. Derivation and backward:
docs/decisions/0002-running-softmax.md.

Shape letters: N batch times heads, T tokens, L latents, V value channels, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops._torch.pairs import (
    chunk_spans,
    padded,
    pair_backward,
    pair_scores,
    power_of_two,
    reverse_decayed_sum,
    running_logsumexp,
)
from subquad.ops.backends import without_autocast

CHUNK = 64
EMPTY = -1e30
"""The log-normaliser of nothing: finite, so that differences stay finite."""


def _exp(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return exponent.clamp_(max=0).to(dtype).exp_()


@torch.library.custom_op("subquad::running_softmax", mutates_args=())
def running_softmax_op(
    p_NTL: Tensor, k_NTL: Tensor, v_NTV: Tensor, a_NL: Tensor, s_NLV: Tensor, chunk: int, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, lse `[N, T, L]`, the last log-normaliser (float64) and state, the states before chunks (if `save`)."""
    N, T, V = v_NTV.shape
    out_NTV, lse_NTL, states = v_NTV.new_empty(N, T, V), k_NTL.new_empty(k_NTL.shape), []
    a_NL, s_NLV = a_NL.clone(memory_format=torch.contiguous_format), s_NLV.clone(memory_format=torch.contiguous_format)
    for span in chunk_spans(T, power_of_two(chunk)):
        p, k, v = padded(p_NTL, span), padded(k_NTL, span, EMPTY), padded(v_NTV, span)
        start, stop, _ = span
        rows = stop - start
        if save:
            states.append(s_NLV.clone(memory_format=torch.contiguous_format))
        before = a_NL.to(k.dtype)[:, None]
        inside = running_logsumexp(k)
        A = torch.logaddexp(before, inside)
        lse_NTL[:, start:stop] = A[:, :rows]
        out = torch.bmm(_exp(before - A, p.dtype).mul_(p), s_NLV)
        out.baddbmm_(pair_scores(p, None, k, A), v)
        out_NTV[:, start:stop] = out[:, :rows]
        after = torch.logaddexp(a_NL, inside[:, -1].to(a_NL.dtype))
        s_NLV.mul_(_exp(a_NL - after, s_NLV.dtype)[..., None])
        s_NLV.baddbmm_(_exp(k - after[:, None].to(k.dtype), v.dtype).mT, v)
        a_NL = after
    kept = torch.stack(states) if states else s_NLV.new_empty(0, *s_NLV.shape)
    return out_NTV, lse_NTL, a_NL, s_NLV, kept


@running_softmax_op.register_fake
def _(p, k, v, a, s, chunk, save):  # type: ignore[no-untyped-def]
    states = len(chunk_spans(k.shape[1], power_of_two(chunk))) if save else 0
    return (
        v.new_empty(v.shape),
        k.new_empty(k.shape),
        a.new_empty(a.shape),
        s.new_empty(s.shape),
        s.new_empty(states, *s.shape),
    )


@torch.library.custom_op("subquad::running_softmax_backward", mutates_args=())
@without_autocast
def running_softmax_backward_op(
    grad_NTV: Tensor,
    grad_lse_NTL: Tensor | None,
    grad_a_NL: Tensor | None,
    grad_s_NLV: Tensor | None,
    p_NTL: Tensor,
    k_NTL: Tensor,
    v_NTV: Tensor,
    a_NL: Tensor,
    lse_NTL: Tensor,
    s_end_NLV: Tensor,
    states: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of p, k, v and of the initial log-normaliser and state.

    `r` is the gradient of the state at the chunk's end, `u` that of minus its log-normaliser.
    """
    dp_NTL, dk_NTL, dv_NTV = p_NTL.new_empty(p_NTL.shape), k_NTL.new_empty(k_NTL.shape), v_NTV.new_empty(v_NTV.shape)
    r_NLV = (
        s_end_NLV.new_zeros(s_end_NLV.shape)
        if grad_s_NLV is None
        else grad_s_NLV.clone(memory_format=torch.contiguous_format)
    )
    u_NL = (s_end_NLV * r_NLV).sum(-1)
    if grad_a_NL is not None:
        u_NL = u_NL - grad_a_NL.to(u_NL.dtype)
    spans = chunk_spans(k_NTL.shape[1], power_of_two(chunk))
    for span, s_NLV in zip(reversed(spans), states.flip(0), strict=True):
        start, stop, _ = span
        rows = stop - start
        p, k, v, do = (padded(x, span, fill) for x, fill in ((p_NTL, 0), (k_NTL, EMPTY), (v_NTV, 0), (grad_NTV, 0)))
        A = lse_NTL[:, start:stop]
        if rows < k.shape[1]:
            A = torch.cat([A, A[:, -1:].expand(-1, k.shape[1] - rows, -1)], 1)
        before = (a_NL.to(A.dtype) if start == 0 else lse_NTL[:, start - 1])[:, None]
        end = A[:, -1:]
        carry, source = _exp(before - A, p.dtype), _exp(k - end, p.dtype)
        dp, dk, scores = pair_backward(p, None, k, A, torch.bmm(do, v.mT).tril_())
        dp.add_(torch.bmm(do, s_NLV.mT).mul_(carry))
        dv_NTV[:, start:stop] = torch.bmm(scores.mT, do).baddbmm_(source, r_NLV)[:, :rows]
        dk.add_(torch.bmm(v, r_NLV.mT).mul_(source))
        x = p * dp
        if grad_lse_NTL is not None:
            x -= padded(grad_lse_NTL, span)
        u = reverse_decayed_sum(x, A).add_(_exp(A - end, p.dtype).mul_(u_NL[:, None]))
        dk.sub_(_exp(k - A, p.dtype).mul_(u))
        dp_NTL[:, start:stop], dk_NTL[:, start:stop] = dp[:, :rows], dk[:, :rows]
        r_NLV = (r_NLV * _exp(before - end, p.dtype).mT).baddbmm_(carry.mul_(p).mT, do)
        u_NL = u[:, 0] * _exp(before - A[:, :1], p.dtype)[:, 0]
    s_start = states[0] if spans else s_end_NLV
    da_NL = (s_start * r_NLV).sum(-1) - u_NL
    return dp_NTL, dk_NTL, dv_NTV, da_NL.to(a_NL.dtype), r_NLV


@running_softmax_backward_op.register_fake
def _(grad, grad_lse, grad_a, grad_s, p, k, v, a, lse, s_end, states, chunk):  # type: ignore[no-untyped-def]
    return (*(x.new_empty(x.shape) for x in (p, k, v, a)), s_end.new_empty(s_end.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    p, k, v, a, _, chunk, _ = inputs
    _, lse, _, s_end, states = output
    ctx.save_for_backward(p, k, v, a, lse, s_end, states)
    ctx.chunk = chunk
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(states)


def _backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    p, k, v, a, lse, s_end, states = ctx.saved_tensors
    grad_lse, grad_a, grad_s, _ = rest
    grad = torch.zeros_like(v) if grad is None else grad
    gradients = running_softmax_backward_op(grad, grad_lse, grad_a, grad_s, p, k, v, a, lse, s_end, states, ctx.chunk)
    return *gradients, None, None


running_softmax_op.register_autograd(_backward, setup_context=_setup_context)
