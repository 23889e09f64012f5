"""The delta scan by Triton kernels, with a hand-written backward pass: memory linear in T, one state a chunk.

For the backward pass the errors e, the states before the chunks and the chunks' triangles X are kept (see
delta_kernels.py); u is computed again from e. Outputs and gradients are the gated scan's, of the values u.

Shape letters: B batch, H heads, G groups of heads, T tokens, K key channels, V value channels, F = 1 or K decays, C
rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops._triton import common
from subquad.ops._triton.delta_kernels import delta_step_kernel, triangle_kernel, walk_back_kernel, walk_kernel
from subquad.ops._triton.scan import (
    TILES,
    Inputs,
    by_groups,
    by_token,
    chunk_gradients,
    fit,
    launch_outputs,
    precision_of,
    state_dtype,
    value_gradients,
)
from subquad.tracing import saves, without_tangents

STEP = ("K", "V", "DECAY", "SHARE", "BLOCK_K", "BLOCK_V", "num_warps")
"""Constants of the kernel of a single token."""


def triangle_shape(precision: str) -> tuple[int, int]:
    """Return the shape of a chunk's saved triangle: X, followed by A in float32."""
    rows = TILES[precision, False].rows
    return (2 if precision == "ieee" else 1) * rows, rows


class DeltaInputs(Inputs):
    """Tensors of a delta scan. Once u is known it replaces `v`, and they are those of a gated scan."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_f: Tensor | None, mask: Tensor | None
    ) -> None:
        super().__init__(q, k, v, log_f, mask, normalise=False)
        self.beta, self.kept = beta[..., 0].float().contiguous(), state_dtype(self.precision)
        plain = self.constants()["PRECISION"] == "ieee"
        most = 32 if self.K <= 128 and not plain else 16
        self.block_v = min(common.tile(self.V), most)
        # Without tensor cores (`ieee`) the operands of a product are in registers.
        self.warps = (8 if self.K > 128 else 4) * (2 if plain else 1)
        self.v_tiles = -(-self.V // self.block_v)

    def walk(self, *others: Tensor, ahead: int = 0) -> dict[str, Any]:
        """Return the constants of the kernels that walk over the chunks.

        In bfloat16, with up to `ahead` key channels, they load the next chunk early. With more channels, and in other
        dtypes, the registers for it spill.
        """
        values = self.delta_constants(*others)
        return values | {
            "BLOCK_K": common.tile(self.K),
            "BLOCK_V": self.block_v,
            "num_warps": self.warps,
            "num_stages": 2 if self.precision == "bf16" and ahead >= self.K else 1,
        }

    def delta_constants(self, *others: Tensor) -> dict[str, Any]:
        """Return the constants of a delta scan's kernels."""
        values = {name: value for name, value in self.constants(*others).items() if name != "NORMALISE"}
        return values | {"REFINE": self.precision == "ieee"}

    def per_chunk(self, rows: int, columns: int) -> Tensor:
        """Return an empty matrix for each chunk, as products read it."""
        return self.v.new_empty(self.B, self.H, self.chunks, rows, columns, dtype=self.kept)

    def per_token(self) -> Tensor:
        """Return an empty `[B, H, T, V]`, as products read it."""
        return by_token(self.v, self.B, self.H, self.T, self.V, self.kept)


def delta_scan(
    q_BGTK: Tensor,
    k_BGTK: Tensor,
    v_BHTV: Tensor,
    beta_BHT1: Tensor,
    log_f_BHTF: Tensor | None,
    state_BHKV: Tensor | None,
    mask_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`S_t = (I - b_t k_t k_t^T) (f_t * S_{t-1}) + b_t k_t (x) v_t`, `o_t = q_t S_t`.

    Arguments as in `subquad.ops.delta_scan`, in float32, bfloat16 or float16, with any strides. Returns outputs
    `[B, H, T, V]` in the dtype of v and the state `[B, H, K, V]` in float32. Operands of matrix products have the
    precision of the narrowest of q, k and v; the triangles are solved in float32. A decay of at most exp(-1e4) forgets
    everything and has no gradient.

    Raises `ValueError` for other dtypes and for devices without Triton.
    """
    common.check_device("delta_scan", q_BGTK, k_BGTK, v_BHTV, beta_BHT1, log_f_BHTF)
    state = None if state_BHKV is None else state_BHKV.float()
    save = saves(q_BGTK, k_BGTK, v_BHTV, beta_BHT1, log_f_BHTF, state)
    out, after, *_ = delta_scan_triton(q_BGTK, k_BGTK, v_BHTV, beta_BHT1, log_f_BHTF, state, mask_BT, save)
    return out, after


@torch.library.custom_op("subquad::delta_scan_triton", mutates_args=())
def delta_scan_triton(
    q_BGTK: Tensor,
    k_BGTK: Tensor,
    v_BHTV: Tensor,
    beta_BHT1: Tensor,
    log_f_BHTF: Tensor | None,
    state_BHKV: Tensor | None,
    mask_BT: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, final state and, if `save`, errors, states before each chunk and triangles (else empty)."""
    x = DeltaInputs(q_BGTK, k_BGTK, v_BHTV, beta_BHT1, log_f_BHTF, mask_BT)
    first = None if state_BHKV is None else state_BHKV.contiguous()
    out, last = by_token(x.v, *x.v.shape), x.v.new_empty(x.B, x.H, x.K, x.V, dtype=torch.float32)
    nothing = last.new_empty(0, dtype=x.kept)
    if x.T == 1 and not save:
        common.launch(
            delta_step_kernel,
            (x.heads * x.v_tiles,),
            *(x.q, x.i, x.v, x.log_f, x.beta, x.mask, first, out, last, x.H),
            *common.strides(x.q, x.i, x.v, x.log_f, dims=2),
            **{name: value for name, value in x.walk().items() if name in STEP},
        )
        return out, last, nothing, nothing.clone(), nothing.clone()
    X, states = x.per_chunk(*triangle_shape(x.precision)), x.per_chunk(x.K, x.V)
    u, e = x.per_token(), x.per_token() if save else None
    common.launch(
        triangle_kernel,
        (x.heads * x.chunks,),
        *(x.i, x.log_f, x.beta, x.mask, X, x.H, x.T),
        *common.strides(x.i, x.log_f),
        **x.delta_constants(),
        BLOCK_K=min(common.tile(x.K), x.tiles.outputs_k),
        num_warps=4,
        num_stages=2,
    )
    common.launch(
        walk_kernel,
        (x.heads * x.v_tiles,),
        *(x.i, x.v, x.log_f, x.beta, x.mask, X, first, states, e, u, last, x.H, x.T),
        *common.strides(x.i, x.v, x.log_f),
        **x.walk(ahead=64 if x.decay == "channel" else 128),
    )
    x.v = u
    launch_outputs(x, states, last, out, last, 0.0, delta=True)
    if e is not None:
        return out, last, e, states, X
    return out, last, nothing, nothing.clone(), nothing.clone()


@delta_scan_triton.register_fake
def _(q, k, v, beta, log_f, state, mask, save):  # type: ignore[no-untyped-def]
    (B, H, T, V), K, precision = v.shape, q.shape[-1], precision_of(q, k, v)
    chunks = -(-T // TILES[precision, False].rows)
    shapes = ((B, H, chunks, *matrix) for matrix in ((K, V), triangle_shape(precision)))
    kept = state_dtype(precision)
    e = by_token(v, B, H, T, V, kept) if save else v.new_empty(0, dtype=kept)
    matrices = (v.new_empty(shape if save else 0, dtype=kept) for shape in shapes)
    return by_token(v, *v.shape), v.new_empty(B, H, K, V, dtype=torch.float32), e, *matrices


@torch.library.custom_op("subquad::delta_scan_triton_backward", mutates_args=())
def delta_scan_triton_backward(
    grad_BHTV: Tensor,
    grad_state_BHKV: Tensor | None,
    q_BGTK: Tensor,
    k_BGTK: Tensor,
    v_BHTV: Tensor,
    beta_BHT1: Tensor,
    log_f_BHTF: Tensor | None,
    mask_BT: Tensor | None,
    e_BHTV: Tensor,
    states: Tensor,
    X: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log f (empty if None) and the initial state."""
    x, grad = DeltaInputs(q_BGTK, k_BGTK, v_BHTV, beta_BHT1, log_f_BHTF, mask_BT), common.rows(grad_BHTV)
    dstate = grad.new_empty(x.B, x.H, x.K, x.V, dtype=torch.float32)
    dlast = None if grad_state_BHKV is None else grad_state_BHKV.contiguous()
    dv, dbeta = by_token(x.v, *x.v.shape), x.beta.new_empty(x.v_tiles, *x.beta.shape)
    du, u, ends = x.per_token(), x.per_token(), x.per_chunk(x.K, x.V)
    value_gradients(x, grad, None, None, du)
    common.launch(
        walk_back_kernel,
        (x.heads * x.v_tiles,),
        *(x.q, x.i, grad, x.log_f, x.beta, x.mask, X, e_BHTV, du, dlast, ends, u, dv, dbeta, dstate, x.H, x.T),
        *common.strides(x.q, x.i, grad, x.log_f),
        **x.walk(grad, ahead=64),
    )
    x.v = u
    dq, dk, dlog_f = _key_gradients(x, grad, dv, states, ends)
    return dq, dk, dv, dbeta.sum(0)[..., None].to(beta_BHT1.dtype), dlog_f, dstate


def _key_gradients(
    x: DeltaInputs, grad: Tensor, dv: Tensor, states: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and log f: those of the gated scan of u, then with the triangle's added."""
    # Sums over the heads of a group, and over both launches, are made in float32.
    wide = by_token(x.i, x.B, x.H, x.T, x.K, torch.float32)
    dq = by_token(x.q, x.B, x.H, x.T, x.K, x.q.dtype if x.share == 1 else torch.float32)
    dk = by_token(x.i, *x.i.shape) if x.share == 1 else wide
    g_wide = dlog_f = grad.new_empty(0)
    if x.log_f is not None and x.decay == "channel":
        dlog_f = by_token(x.log_f, *x.log_f.shape)
        g_wide = torch.empty_like(dlog_f, dtype=torch.float32)
    elif x.log_f is not None:
        parts = grad.new_empty(2, fit(x.K, x.tiles.gradients_k)[1], x.B, x.T, x.H, dtype=torch.float32)
        g_wide, dlog_f = parts
    chunk_gradients(x, x.q, grad, None, None, states, None, ends, None, None, None, dq, wide, None, g_wide)
    chunk_gradients(x, x.i, dv, None, None, states, None, None, None, wide, g_wide, None, dk, None, dlog_f)
    if x.log_f is not None and x.decay == "head":
        dlog_f = parts.sum((0, 1))[..., None].to(x.log_f.dtype).transpose(1, 2)
    return by_groups(dq, x.q), by_groups(dk, x.i), dlog_f


@delta_scan_triton_backward.register_fake
def _(grad, grad_state, q, k, v, beta, log_f, mask, e, states, X):  # type: ignore[no-untyped-def]
    dlog_f = grad.new_empty(0) if log_f is None else by_token(log_f, *log_f.shape)
    dstate = grad.new_empty(*v.shape[:2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    return *(by_token(x, *x.shape) for x in (q, k, v)), beta.new_empty(beta.shape), dlog_f, dstate


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, beta, log_f, state, mask, _ = inputs
    ctx.save_for_backward(q, k, v, beta, log_f, mask, *output[2:])
    ctx.with_state = state is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    *gradients, dlog_f, dstate = delta_scan_triton_backward(grad, grad_state, *tensors)
    dlog_f, dstate = None if tensors[4] is None else dlog_f, dstate if ctx.with_state else None
    return *gradients, dlog_f, dstate, None, None


delta_scan_triton.register_autograd(_backward, setup_context=_setup_context)
