"""Compute the delta scan in chunks, with a hand-written backward pass: memory linear in T, one state per chunk.

With `u_t = b_t (v_t - k_t (f_t * S_{t-1}))` the delta scan is the gated scan of the values u:

    S_t = f_t * S_{t-1} + k_t (x) u_t

In a chunk that begins with the state S, G the sums of log f, `<x, y>` the product over key channels and A the scores
`A_ij = <k_i, k_j exp(G_i - G_j)>` for j < i, u solves a triangular system:

    (I + diag(b) A) u = b (v - (k exp(G)) S)

It is solved row by row (substitution). Powers or the inverse of A would be wrong by many orders of magnitude for equal
keys and b = 2, where u is bounded and they are not. Nothing dampens an error there either, so the system is float64
from its products on: the scores of keys and k S, and those of queries and keys, which are rounded afterwards. (Decays
by channel keep products of float32, which lose two digits more if keys differ by 1e-4: with the exponentials of all
channels in float64 the forward pass takes 1.6 times as long.) With du the gradient of u, and g of the right-hand side:

    (I + diag(b) A)^T g = du,    dv = b g,    db = g (v - (k exp(G)) S - A u),    dA = -(b g) u^T

Only states, u and g follow one another from chunk to chunk: everything else is computed for a piece of several chunks
in one call (Yang et al. 2024, arXiv:2406.06484; with decays arXiv:2412.06464).

Shape letters: N batch times heads (of q and k: batch times groups), T tokens, K key channels, V value channels, F = 1
or K decays, C rows of a chunk, M = P N chunks of a piece.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.memory import empty, empty_like
from subquad.ops._torch.decays import Decay
from subquad.ops._torch.pieces import Piece
from subquad.ops._torch.scan import chunks_of, pieces
from subquad.ops.backends import without_autocast
from subquad.tracing import without_tangents

CHUNK = 32
"""Rows of a chunk: in larger ones the systems and scores, products of float64, cost more than a state for each."""


def _solve(A_NCC: Tensor, x_NCV: Tensor, *, transposed: bool = False) -> Tensor:
    """Solve `(I + A) y = x`, or `(I + A)^T y = x`, in float64; A is read below the diagonal only; x may be overwritten.

    The rows of y are solved as columns, `y^T (I + A)^T = x^T`: LAPACK reads these where they are, without copies.
    """
    A, x_NVC = A_NCC.double(), x_NCV.double().mT
    A, upper = (A, False) if transposed else (A.mT, True)
    solved = torch.linalg.solve_triangular(A, x_NVC, upper=upper, left=False, unitriangular=True, out=x_NVC)
    return solved.mT


def _wide(q_NTK: Tensor, log_f_NTF: Tensor | None) -> torch.dtype:
    """Return the type of the system's products: float64, with decays by channel that of the inputs."""
    return q_NTK.dtype if log_f_NTF is not None and log_f_NTF.shape[-1] > 1 else torch.float64


@torch.library.custom_op("subquad::delta_scan", mutates_args=())
def delta_scan_op(
    q_NTK: Tensor,
    k_NTK: Tensor,
    v_NTV: Tensor,
    beta_NT1: Tensor,
    log_f_NTF: Tensor | None,
    state_NKV: Tensor,
    chunk: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, the final state and, with `save`, the state before each chunk."""
    out_NTV, parts, wide = empty_like(v_NTV), pieces(q_NTK, v_NTV, log_f_NTF, chunk), _wide(q_NTK, log_f_NTF)
    # Without `save` each piece overwrites the states of the one before.
    counts = [part.chunks for part in parts]
    kept = sum(counts) if save else max(counts, default=0)
    states, end_NKV = empty(state_NKV, kept, *state_NKV.shape), state_NKV.clone(memory_format=torch.contiguous_format)
    for part in parts:
        q, k = part.take(q_NTK), part.take(k_NTK)
        log_f = None if log_f_NTF is None else part.take(log_f_NTF)
        v, b, k_wide = (*(part.take(x, wide) for x in (v_NTV, beta_NT1)), k.to(wide))
        decay = Decay(log_f, q, v)
        exact = decay if wide == q.dtype else Decay(log_f, k_wide, v)
        here, u = states[part.places if save else slice(0, part.chunks)], torch.empty_like(v, dtype=v_NTV.dtype)
        here[0].copy_(end_NKV)
        befores, afters = here.unbind(), [*here[1:].unbind(), end_NKV]
        each = _chunks(
            part, exact.scores(k_wide, k_wide).mul_(b), v, b, exact.rows(k_wide), decay.columns(k), decay.whole, u
        )
        for (A, v_NCV, b_NC1, row_NCK, column_NCK, whole, u_NCV), before_NKV, after_NKV in zip(
            each, befores, afters, strict=True
        ):
            error_NCV = torch.baddbmm(v_NCV, row_NCK, before_NKV.to(wide), alpha=-1)
            u_NCV.copy_(_solve(A, error_NCV.mul_(b_NC1)))
            torch.baddbmm(before_NKV if whole is None else before_NKV * whole, column_NCK.mT, u_NCV, out=after_NKV)
        u, lost = _without_lost(u)
        scores, state = exact.scores(q.to(wide), k_wide).to(u.dtype), here.flatten(0, 1)
        out = torch.bmm(scores, u).baddbmm_(decay.rows(q), state)
        part.put(out if lost is None else out.masked_fill_(lost, torch.nan), out_NTV)
    return out_NTV, end_NKV, states[: len(states) if save else 0]


def _chunks(part: Piece, *tensors: Tensor | None) -> Any:
    """Yield the tensors `[M, ...]` (or None) of each chunk, `[N, ...]`."""
    P = part.chunks
    each = ([None] * P if x is None else x.unflatten(0, (P, len(x) // P)).unbind() for x in tensors)
    return zip(*each, strict=True)


def _without_lost(u_MCV: Tensor) -> tuple[Tensor, Tensor | None]:
    """Replace by zeros the rows from the first on that is not finite, and return which these are, `[M, C, 1]`.

    If `b |k|^2` exceeds 2 the state may overflow. In the product with the scores, zero times infinity would turn the
    rows before it into NaN.
    """
    # Elsewhere than on a CPU the test would wait for the device. One pass: the extremes of NaN are NaN.
    if u_MCV.device.type == "cpu" and (not u_MCV.numel() or all(x.isfinite() for x in u_MCV.aminmax())):
        return u_MCV, None
    lost_MC1 = (~u_MCV.isfinite()).any(-1, keepdim=True).to(torch.uint8).cummax(1).values.bool()
    return u_MCV.masked_fill(lost_MC1, 0.0), lost_MC1


@delta_scan_op.register_fake
def _(q, k, v, beta, log_f, state, chunk, save):  # type: ignore[no-untyped-def]
    chunks = chunks_of(v.shape[1], chunk, log_f) if save else 0
    return v.new_empty(v.shape), state.new_empty(state.shape), state.new_empty(chunks, *state.shape)


@torch.library.custom_op("subquad::delta_scan_backward", mutates_args=())
@without_autocast
def delta_scan_backward_op(
    grad_NTV: Tensor,
    grad_state_NKV: Tensor | None,
    q_NTK: Tensor,
    k_NTK: Tensor,
    v_NTV: Tensor,
    beta_NT1: Tensor,
    log_f_NTF: Tensor | None,
    states: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log f (empty if none) and the initial state.

    Chunks are visited from the last to the first; `r` is the gradient of the state after a chunk.
    """
    dq_NTK, dk_NTK, dv_NTV, dbeta_NT1 = (empty_like(x) for x in (q_NTK, k_NTK, v_NTV, beta_NT1))
    dlog_f = q_NTK.new_empty(0) if log_f_NTF is None else log_f_NTF.new_empty(log_f_NTF.shape)
    wide = _wide(q_NTK, log_f_NTF)
    r_NKV = states.new_zeros(states.shape[1:]) if grad_state_NKV is None else grad_state_NKV

    def visit(part: Piece) -> None:
        """Write the gradients of a piece; at its return what it held is free before the next one begins."""
        nonlocal r_NKV
        q, k, v, b, do = (part.take(x) for x in (q_NTK, k_NTK, v_NTV, beta_NT1, grad_NTV))
        log_f = None if log_f_NTF is None else part.take(log_f_NTF)
        decay, k_wide = Decay(log_f, q, v), k.to(wide)
        exact = decay if wide == q.dtype else Decay(log_f, k_wide, v)
        state, rows, columns = part.of(states), decay.rows(k), decay.columns(k)
        weights, scores = exact.scores(k_wide, k_wide), decay.scores(q, k)
        A, weights = weights * b, weights.to(v.dtype).tril_(-1)
        # The error of the values that the state predicts.
        error = torch.baddbmm(v.to(wide), exact.rows(k_wide), state.to(wide), alpha=-1)
        u, error = _solve(A, error * b).to(v.dtype), error.to(v.dtype)
        g, r, du = torch.empty_like(v), torch.empty_like(state), torch.bmm(scores.mT, do)
        to_state = torch.bmm(decay.rows(q).mT, do)
        each = _chunks(part, A, b, rows, columns, decay.whole, du, to_state, g, r)
        for A_NCC, b_NC1, row_NCK, column_NCK, whole, du_NCV, added_NKV, g_NCV, after_NKV in reversed([*each]):
            after_NKV.copy_(r_NKV)
            g_NCV.copy_(_solve(A_NCC, torch.baddbmm(du_NCV, column_NCK, r_NKV), transposed=True))
            added_NKV.add_(r_NKV if whole is None else r_NKV * whole)
            r_NKV = torch.baddbmm(added_NKV, row_NCK.mT, g_NCV * b_NC1, alpha=-1)
        part.put((error.baddbmm_(weights, u, alpha=-1) * g).sum(-1, keepdim=True), dbeta_NT1)
        dv = g.mul_(b)
        part.put(dv, dv_NTV)
        reads = decay.gradients(q, k, scores, torch.bmm(do, u.mT).tril_(), torch.bmm(do, state.mT), torch.bmm(u, r.mT))
        dv_minus = -dv
        grad = torch.bmm(dv_minus, u.mT).tril_(-1)
        deltas = decay.gradients(k, k, weights, grad, torch.bmm(dv_minus, state.mT))
        part.put(reads.q_NCK, dq_NTK)
        part.put(reads.k_NCK + deltas.q_NCK + deltas.k_NCK, dk_NTK)
        if reads.rows_MCF is not None and reads.columns_MCF is not None and deltas.rows_MCF is not None:
            grad = decay.log_gradient(reads.rows_MCF + deltas.rows_MCF, reads.columns_MCF, (state * r).sum(-1))
            part.put(grad, dlog_f)

    for part in reversed(pieces(q_NTK, v_NTV, log_f_NTF, chunk)):
        visit(part)
    return dq_NTK, dk_NTK, dv_NTV, dbeta_NT1, dlog_f, r_NKV.clone() if r_NKV is grad_state_NKV else r_NKV


@delta_scan_backward_op.register_fake
def _(grad, grad_state, q, k, v, beta, log_f, states, chunk):  # type: ignore[no-untyped-def]
    dlog_f = q.new_empty(0) if log_f is None else log_f.new_empty(log_f.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, beta)), dlog_f, states.new_empty(states.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.chunk, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    *gradients, dlog_f, dstate = delta_scan_backward_op(grad, grad_state, *tensors, ctx.chunk)
    return *gradients, (None if tensors[4] is None else dlog_f), dstate, None, None


delta_scan_op.register_autograd(_backward, setup_context=_setup_context)
