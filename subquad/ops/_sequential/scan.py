"""The scans token by token, in the memory of one state (as in the Latte paper, arXiv:2402.17512, section 3.3).

For the backward pass the state is kept every `block` tokens, about sqrt(T) of them, and a block's states are recomputed
from there, so training holds 2 sqrt(T) states. They are float64: in float32 the rounding errors of T additions would
add up.

Shape letters: N batch times heads (of queries and inputs: batch times groups), T tokens, K key channels, V value
channels, L latents, C tokens of a block. Log decays `[N, T, K, V]` have size 1 along the channels that share them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subquad.ops.backends import without_autocast
from subquad.ops.groups import by_groups, by_heads
from subquad.tracing import saves, without_tangents


def scan(
    q_NTK: Tensor,
    i_NTK: Tensor,
    v_NTV: Tensor,
    beta_NT1: Tensor | None,
    log_f_NTKV: Tensor | None,
    state_NKV: Tensor,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """`S_t = f_t * S_{t-1} + i_t (x) u_t`, `o_t = q_t S_t`; return the outputs and the last state.

    u is v in the gated scan, and `b_t (v_t - i_t (f_t * S_{t-1}))` in the delta scan.
    """
    inputs = [x for x in (q_NTK, i_NTK, v_NTV, beta_NT1, log_f_NTKV, state_NKV) if x is not None]
    block, save = _blocks(v_NTV.shape[1], chunk_size, inputs)
    out_NTV, after_NKV, _ = scan_op(q_NTK, i_NTK, v_NTV, beta_NT1, log_f_NTKV, state_NKV.double(), block, save)
    return out_NTV, after_NKV.to(state_NKV.dtype)


def running_softmax(
    p_NTL: Tensor, k_NTL: Tensor, v_NTV: Tensor, a_NL: Tensor, s_NLV: Tensor, chunk_size: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, every log-normaliser `a_t`, and the last `a` and `S`, as `_reference.running_softmax` does."""
    block, save = _blocks(v_NTV.shape[1], chunk_size, [p_NTL, k_NTL, v_NTV, a_NL, s_NLV])
    out_NTV, lse_NTL, a_NL, after_NLV, _, _ = running_softmax_op(p_NTL, k_NTL, v_NTV, a_NL, s_NLV.double(), block, save)
    return out_NTV, lse_NTL, a_NL, after_NLV.to(s_NLV.dtype)


def _blocks(tokens: int, chunk_size: int | None, inputs: list[Tensor]) -> tuple[int, bool]:
    """Return the tokens between kept states, and True if states must be kept at all."""
    return chunk_size or max(1, math.isqrt(tokens)), saves(*inputs)


@torch.library.custom_op("subquad::scan_sequential", mutates_args=())
def scan_op(
    q_NTK: Tensor,
    i_NTK: Tensor,
    v_NTV: Tensor,
    beta_NT1: Tensor | None,
    log_f_NTKV: Tensor | None,
    state_NKV: Tensor,
    block: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, the final state and, if `save`, the states before each block."""
    T = v_NTV.shape[1]
    out_NTV, state_NKV = v_NTV.new_empty(v_NTV.shape), state_NKV.clone(memory_format=torch.contiguous_format)
    kept = state_NKV.new_empty(math.ceil(T / block) if save else 0, *state_NKV.shape)
    tokens = _Tokens(q_NTK, i_NTK, v_NTV, beta_NT1, log_f_NTKV)
    for t in range(T):
        if save and t % block == 0:
            kept[t // block] = state_NKV
        tokens.decay(state_NKV, t)
        state_NKV.addcmul_(tokens.i(t)[..., None], tokens.written(state_NKV, t)[:, None])
        out_NTV[:, t] = _row_times(tokens.q(t), state_NKV)
    return out_NTV, state_NKV, kept


class _Tokens:
    """The inputs of a scan, one token at a time for all heads, in float64."""

    def __init__(
        self, q_NTK: Tensor, i_NTK: Tensor, v_NTV: Tensor, beta_NT1: Tensor | None, log_f_NTKV: Tensor | None
    ) -> None:
        self.tensors, self.beta, self.log_f = (q_NTK, i_NTK, v_NTV), beta_NT1, log_f_NTKV
        self.share = len(v_NTV) // max(1, len(q_NTK)) or 1

    def q(self, t: int) -> Tensor:
        return by_heads(self.tensors[0][:, t].double(), self.share)

    def i(self, t: int) -> Tensor:
        return by_heads(self.tensors[1][:, t].double(), self.share)

    def v(self, t: int) -> Tensor:
        return self.tensors[2][:, t].double()

    def decay(self, x_NKV: Tensor, t: int) -> None:
        """Multiply by the decays, in place."""
        if self.log_f is not None:
            x_NKV.mul_(self.log_f[:, t].double().exp())

    def written(self, decayed_NKV: Tensor, t: int) -> Tensor:
        """Return u `[N, V]`: the values, or how far the decayed state is from them, times beta."""
        if self.beta is None:
            return self.v(t)
        return self.beta[:, t] * (self.v(t) - _row_times(self.i(t), decayed_NKV))


def _row_times(x_NK: Tensor, y_NKV: Tensor) -> Tensor:
    """Return `x_n y_n` in float64, `[N, V]`."""
    return (x_NK[:, None].double() @ y_NKV).squeeze(1)


@scan_op.register_fake
def _(q, i, v, beta, log_f, state, block, save):  # type: ignore[no-untyped-def]
    blocks = -(-v.shape[1] // block) if save else 0
    return v.new_empty(v.shape), state.new_empty(state.shape), state.new_empty(blocks, *state.shape)


@torch.library.custom_op("subquad::scan_sequential_backward", mutates_args=())
@without_autocast
def scan_backward_op(
    grad_NTV: Tensor,
    grad_state_NKV: Tensor | None,
    q_NTK: Tensor,
    i_NTK: Tensor,
    v_NTV: Tensor,
    beta_NT1: Tensor | None,
    log_f_NTKV: Tensor | None,
    kept: Tensor,
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, i, v, beta and log f (empty if None) and the initial state.

    `r` is the gradient of the state after a token, then of the decayed state before it.
    """
    dq_NTK, di_NTK, dv_NTV = (x.new_empty(x.shape) for x in (q_NTK, i_NTK, v_NTV))
    dbeta, dlog_f = (q_NTK.new_empty(0) if x is None else x.new_empty(x.shape) for x in (beta_NT1, log_f_NTKV))
    N, T, V = v_NTV.shape
    r_NKV = kept.new_zeros(N, q_NTK.shape[2], V) if grad_state_NKV is None else grad_state_NKV.clone()
    tokens = _Tokens(q_NTK, i_NTK, v_NTV, beta_NT1, log_f_NTKV)
    for n in reversed(range(kept.shape[0])):
        start, stop = n * block, min((n + 1) * block, T)
        state_NKV, before = kept[n].clone(), []
        for t in range(start, stop):
            tokens.decay(state_NKV, t)
            before.append(state_NKV.clone())
            state_NKV.addcmul_(tokens.i(t)[..., None], tokens.written(state_NKV, t)[:, None])
        for t in reversed(range(start, stop)):
            do_NV, decayed_NKV, i_NK = grad_NTV[:, t].double(), before.pop(), tokens.i(t)
            u_NV = tokens.written(decayed_NKV, t)
            r_NKV.addcmul_(tokens.q(t)[..., None], do_NV[:, None])
            dq_NK = _row_times(do_NV, decayed_NKV.mT) + (u_NV * do_NV).sum(-1, keepdim=True) * i_NK
            di_NK, du_NV = _row_times(u_NV, r_NKV.mT), _row_times(i_NK, r_NKV)
            if beta_NT1 is not None:
                dbeta[:, t] = (du_NV * (tokens.v(t) - _row_times(i_NK, decayed_NKV))).sum(-1, keepdim=True)
                du_NV = beta_NT1[:, t] * du_NV
                di_NK -= _row_times(du_NV, decayed_NKV.mT)
                r_NKV.addcmul_(i_NK[..., None], du_NV[:, None], value=-1)
            dv_NTV[:, t] = du_NV
            dq_NTK[:, t], di_NTK[:, t] = (by_groups(x, tokens.share) for x in (dq_NK, di_NK))
            if log_f_NTKV is None:
                continue
            # f r S from the known f S, without a division by f, which may be zero.
            dlog_f[:, t] = (r_NKV * decayed_NKV).sum_to_size(N, *log_f_NTKV.shape[2:])
            tokens.decay(r_NKV, t)
    return dq_NTK, di_NTK, dv_NTV, dbeta, dlog_f, r_NKV


@scan_backward_op.register_fake
def _(grad, grad_state, q, i, v, beta, log_f, kept, block):  # type: ignore[no-untyped-def]
    dbeta, dlog_f = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (beta, log_f))
    state = kept.new_empty(v.shape[0], q.shape[2], v.shape[2])
    return q.new_empty(q.shape), i.new_empty(i.shape), v.new_empty(v.shape), dbeta, dlog_f, state


def _setup_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.block, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


@without_tangents
def _scan_backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    *gradients, dbeta, dlog_f, dstate = scan_backward_op(grad, grad_state, *tensors, ctx.block)
    beta, log_f = tensors[3:5]
    return *gradients, None if beta is None else dbeta, None if log_f is None else dlog_f, dstate, None, None


scan_op.register_autograd(_scan_backward, setup_context=_setup_scan)


@torch.library.custom_op("subquad::running_softmax_sequential", mutates_args=())
@without_autocast
def running_softmax_op(
    p_NTL: Tensor, k_NTL: Tensor, v_NTV: Tensor, a_NL: Tensor, s_NLV: Tensor, block: int, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, all log-normalisers `[N, T, L]`, the last one (float64) and state, and both before each block."""
    T = v_NTV.shape[1]
    out_NTV, lse_NTL = v_NTV.new_empty(v_NTV.shape), k_NTL.new_empty(k_NTL.shape)
    s_NLV = s_NLV.clone(memory_format=torch.contiguous_format)
    a_NL = a_NL.clone(memory_format=torch.contiguous_format)
    blocks = math.ceil(T / block) if save else 0
    kept_a, kept_s = a_NL.new_empty(blocks, *a_NL.shape), s_NLV.new_empty(blocks, *s_NLV.shape)
    for t in range(T):
        if save and t % block == 0:
            kept_a[t // block], kept_s[t // block] = a_NL, s_NLV
        a_NL, _, _ = _soft_step(a_NL, s_NLV, k_NTL[:, t], v_NTV[:, t])
        lse_NTL[:, t] = a_NL
        out_NTV[:, t] = _row_times(p_NTL[:, t], s_NLV)
    return out_NTV, lse_NTL, a_NL, s_NLV, kept_a, kept_s


def _soft_step(a_NL: Tensor, s_NLV: Tensor, k_NL: Tensor, v_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next log-normaliser and the weights of the old state (f) and the token (i); update `S` in place."""
    after_NL = torch.logaddexp(a_NL, k_NL.to(a_NL.dtype))
    f_NL, i_NL = ((x - after_NL).exp_() for x in (a_NL, k_NL))
    s_NLV.mul_(f_NL[..., None]).addcmul_(i_NL[..., None], v_NV[:, None].double())
    return after_NL, f_NL, i_NL


@running_softmax_op.register_fake
def _(p, k, v, a, s, block, save):  # type: ignore[no-untyped-def]
    blocks = -(-v.shape[1] // block) if save else 0
    results = (x.new_empty(x.shape) for x in (v, k, a, s))
    return *results, a.new_empty(blocks, *a.shape), s.new_empty(blocks, *s.shape)


@torch.library.custom_op("subquad::running_softmax_sequential_backward", mutates_args=())
@without_autocast
def running_softmax_backward_op(
    grad_NTV: Tensor,
    grad_lse_NTL: Tensor | None,
    grad_a_NL: Tensor | None,
    grad_s_NLV: Tensor | None,
    p_NTL: Tensor,
    k_NTL: Tensor,
    v_NTV: Tensor,
    kept_a: Tensor,
    kept_s: Tensor,
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of p, k, v and of the initial log-normaliser and state.

    `r` and `u` are the gradients of the state and the log-normaliser after a token. Since f + i = 1,
    `S_t - S_{t-1} = i (v_t - S_{t-1})`, and with `w = r . (v_t - S_{t-1})`: `dk_t = i (f w + u)`, `u <- f (u - i w)`.
    """
    (N, T, L), V = k_NTL.shape, v_NTV.shape[2]
    dp_NTL, dk_NTL, dv_NTV = (x.new_empty(x.shape) for x in (p_NTL, k_NTL, v_NTV))
    r_NLV = kept_s.new_zeros(N, L, V) if grad_s_NLV is None else grad_s_NLV.clone()
    u_NL = kept_a.new_zeros(N, L) if grad_a_NL is None else grad_a_NL.clone()
    for n in reversed(range(kept_a.shape[0])):
        start, stop = n * block, min((n + 1) * block, T)
        states, gates, a_NL = [kept_s[n]], [], kept_a[n]
        for t in range(start, stop):
            states.append(states[-1].clone())
            a_NL, *gate = _soft_step(a_NL, states[-1], k_NTL[:, t], v_NTV[:, t])
            gates.append(gate)
        for t in reversed(range(start, stop)):
            do_NV, after_NLV, (f_NL, i_NL) = grad_NTV[:, t].double(), states.pop(), gates.pop()
            r_NLV.addcmul_(p_NTL[:, t, :, None].double(), do_NV[:, None])
            if grad_lse_NTL is not None:
                u_NL += grad_lse_NTL[:, t]
            dp_NTL[:, t] = _row_times(do_NV, after_NLV.mT)
            dv_NTV[:, t] = _row_times(i_NL, r_NLV)
            w_NL = (r_NLV * (v_NTV[:, t, None] - states[-1])).sum(-1)
            dk_NTL[:, t] = i_NL * (f_NL * w_NL + u_NL)
            u_NL = f_NL * (u_NL - i_NL * w_NL)
            r_NLV.mul_(f_NL[..., None])
    return dp_NTL, dk_NTL, dv_NTV, u_NL, r_NLV


@running_softmax_backward_op.register_fake
def _(grad, grad_lse, grad_a, grad_s, p, k, v, kept_a, kept_s, block):  # type: ignore[no-untyped-def]
    a, s = kept_a.new_empty(k.shape[0], k.shape[2]), kept_s.new_empty(k.shape[0], k.shape[2], v.shape[2])
    return *(x.new_empty(x.shape) for x in (p, k, v)), a, s


def _setup_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    p, k, v, _, _, ctx.block, _ = inputs
    ctx.save_for_backward(p, k, v, *output[4:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[4:])


@without_tangents
def _softmax_backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    return *running_softmax_backward_op(grad, *rest[:3], *tensors, ctx.block), None, None


running_softmax_op.register_autograd(_softmax_backward, setup_context=_setup_softmax)
