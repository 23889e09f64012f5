"""The gated scan by Triton kernels, with a hand-written backward pass: memory linear in T, one state a chunk.

Shape letters: B batch, H heads, T tokens, K key channels, V value channels, F = 1 or K decays; W = V, or V + 1 where
normalised: states then hold the sums of the inputs as a last channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops._triton import common, scan_launch
from subquad.ops._triton.scan_launch import TILES, Inputs, by_token, precision_of, state_dtype


def gated_scan(
    q_BHTK: Tensor,
    i_BHTK: Tensor,
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    state_BHKW: Tensor | None,
    mask_BT: Tensor | None,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`S_t = f_t * S_{t-1} + i_t (x) v_t`, `o_t = q_t S_t`, or over `q_t . z_t + eps`, `z_t = f_t * z_{t-1} + i_t`.

    Arguments as those of `subquad.ops.gated_scan`, in float32, bfloat16 or float16, with any strides. Returns outputs
    `[B, H, T, V]` in the dtype of v and the state `[B, H, K, W]` in float32. Matrix products take their operands as
    the narrowest of q, i and v is. A decay of at most exp(-1e4) forgets all and has no gradient.

    Raises `ValueError` for other dtypes and for devices without Triton.
    """
    tensors = [x for x in (q_BHTK, i_BHTK, v_BHTV, log_f_BHTF) if x is not None]
    common.check_device("gated_scan", *tensors)
    state = None if state_BHKW is None else state_BHKW.float()
    tensors += [] if state is None else [state]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out, after, *_ = gated_scan_triton(q_BHTK, i_BHTK, v_BHTV, log_f_BHTF, state, mask_BT, normalise, eps, save)
    return out, after


@torch.library.custom_op("subquad::gated_scan_triton", mutates_args=())
def gated_scan_triton(
    q_BHTK: Tensor,
    i_BHTK: Tensor,
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    state_BHKW: Tensor | None,
    mask_BT: Tensor | None,
    normalise: bool,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the final state and, if `save`: totals, states and sums of inputs before each chunk; else empty ones."""
    x = Inputs(q_BHTK, i_BHTK, v_BHTV, log_f_BHTF, mask_BT, normalise)
    first = None if state_BHKW is None else state_BHKW.contiguous()
    out, last = by_token(x.v, *x.v.shape), x.v.new_empty(x.B, x.H, x.K, x.V + normalise, dtype=torch.float32)
    if x.T == 1 and not save:
        scan_launch.step(x, first, out, last, eps)
    else:
        total = last.new_empty(x.B, x.H, x.T if normalise else 0)
        states, z_states = scan_launch.states(x, x.i, x.v, first, last)
        scan_launch.outputs(x, states, z_states, out, total, eps)
        if save:
            return out, last, total, states, z_states
    return out, last, last.new_empty(0), last.new_empty(0, dtype=state_dtype(x.precision)), last.new_empty(0)


@gated_scan_triton.register_fake
def _(q, i, v, log_f, state, mask, normalise, eps, save):  # type: ignore[no-untyped-def]
    (B, H, T, V), K, precision = v.shape, q.shape[-1], precision_of(q, i, v)
    chunks = -(-T // TILES[precision, False].rows)
    shapes = (B, H, T if normalise else 0), (B, H, chunks, K, V), (B, H, chunks, K if normalise else 0)
    total, states, z_states = shapes if save else ((0,),) * 3
    last = v.new_empty(B, H, K, V + normalise, dtype=torch.float32)
    kept = last.new_empty(total), last.new_empty(states, dtype=state_dtype(precision)), last.new_empty(z_states)
    return by_token(v, *v.shape), last, *kept


@torch.library.custom_op("subquad::gated_scan_triton_backward", mutates_args=())
def gated_scan_triton_backward(
    grad_BHTV: Tensor,
    grad_state_BHKW: Tensor | None,
    q_BHTK: Tensor,
    i_BHTK: Tensor,
    v_BHTV: Tensor,
    log_f_BHTF: Tensor | None,
    mask_BT: Tensor | None,
    out_BHTV: Tensor | None,
    total_BHT: Tensor,
    states: Tensor,
    z_states: Tensor,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, i, v, log f (empty if none) and the initial state."""
    x, grad = Inputs(q_BHTK, i_BHTK, v_BHTV, log_f_BHTF, mask_BT, normalise), scan_launch.rows(grad_BHTV)
    dstate = grad.new_empty(x.B, x.H, x.K, x.V + normalise, dtype=torch.float32)
    dlast = None if grad_state_BHKW is None else grad_state_BHKW.contiguous()
    totals = total_BHT, scan_launch.total_gradients(x, grad, out_BHTV, total_BHT)
    ends = scan_launch.states(x, x.q, grad, dlast, dstate, totals)
    return *scan_launch.gradients(x, grad, totals, (states, z_states), ends), dstate


@gated_scan_triton_backward.register_fake
def _(grad, grad_state, q, i, v, log_f, mask, out, total, states, z_states, normalise):  # type: ignore[no-untyped-def]
    B, H, _, V = v.shape
    dlog_f = grad.new_empty(0) if log_f is None else by_token(log_f, *log_f.shape)
    dstate = grad.new_empty(B, H, q.shape[-1], V + normalise, dtype=torch.float32)
    return *(by_token(x, *x.shape) for x in (q, i, v)), dlog_f, dstate


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, i, v, log_f, state, mask, normalise, _, _ = inputs
    out, _, total, states, z_states = output
    ctx.save_for_backward(q, i, v, log_f, mask, out if normalise else None, total, states, z_states)
    ctx.normalise, ctx.with_state = normalise, state is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(total, states, z_states)


def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, i, v, log_f, mask, out, *kept = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    *gradients, dlog_f, dstate = gated_scan_triton_backward(
        grad, grad_state, q, i, v, log_f, mask, out, *kept, ctx.normalise
    )
    dlog_f, dstate = None if log_f is None else dlog_f, dstate if ctx.with_state else None
    return *gradients, dlog_f, dstate, None, None, None, None


gated_scan_triton.register_autograd(_backward, setup_context=_setup_context)
