"""Compute the delta scan in chunks, with a hand-written backward pass: memory linear in T, one state per chunk.

With `u_t = b_t (v_t - k_t (f_t * S_{t-1}))` the delta scan is the gated scan of the values u:

    S_t = f_t * S_{t-1} + k_t (x) u_t

In a chunk that begins with the state S, G the sums of log f, `<x, y>` the product over key channels and A the scores
`A_ij = <k_i, k_j exp(G_i - G_j)>` for j < i, u solves a triangular system:

    (I + diag(b) A) u = b (v - (k exp(G)) S)

whose inverse, made by substitution, is applied to v and to k exp(G):

    u = inverse b v - (inverse b k exp(G)) S

While b |k|^2 is at most 2, so is each entry of the inverse. But the sums in these products cancel, and with b = 2 an
error does not decay in later rows. So the products are float64, from the scores of the keys on, and are rounded at the
end: with keys that differ by 1e-4 the error is no larger than token by token. (With decays by channel the scores are
float32, which loses two more digits in that case: the exponentials of all channels in float64 would make the forward
pass 1.6 times as slow.) A series of powers of A would be wrong by many orders of magnitude. With du the gradient of u,
and g of the right-hand side:

    (I + diag(b) A)^T g = du,    dv = b g,    db = g (v - (k exp(G)) S - A u),    dA = -(b g) u^T

Only states, u and g are computed chunk after chunk: everything else is computed for a `ChunkGroup` of several chunks in
one call (Yang et al. 2024, arXiv:2406.06484; with decays arXiv:2412.06464).

Shape letters: N batch times heads (of q and k: batch times groups), T tokens, K key channels, V value channels, F = 1
or K decays, C rows of a chunk, M = P N chunks of a `ChunkGroup`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.memory import empty, empty_like
from subquad.ops._torch.chunk_groups import ChunkGroup
from subquad.ops._torch.decays import Decay
from subquad.ops._torch.scan import chunks_of, scan_groups
from subquad.ops.backends import without_autocast
from subquad.tracing import without_tangents

CHUNK = 32
"""Rows of a chunk: with more rows the float64 systems cost more than the states that are saved."""


def _inverse(A_MCC: Tensor) -> Tensor:
    """Return `(I + A)^-1` in float64; A is read below the diagonal only."""
    A = A_MCC.double()
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A).contiguous()
    # The transpose is solved: LAPACK reads its columns where they are, without copies.
    return torch.linalg.solve_triangular(A.mT, identity, upper=True, left=False, unitriangular=True, out=identity).mT


def _times(inverse_MCC: Tensor, x_MCV: Tensor, *, careful: bool = False) -> Tensor:
    """Return the product, made in float64; if `careful`, rows from the first on that is not finite are NaN."""
    x, lost = _without_lost(x_MCV) if careful else (x_MCV, None)
    y = torch.bmm(inverse_MCC, x.double()).to(x.dtype)
    return y if lost is None else y.masked_fill_(lost, torch.nan)


def _wide(q_NTK: Tensor, log_f_NTF: Tensor | None) -> torch.dtype:
    """Return the type of the keys' products: float64, with decays by channel that of the inputs."""
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the final state and, with `save`, the state before each chunk and u."""
    tensors = (q_NTK, k_NTK, v_NTV, beta_NT1, log_f_NTF, state_NKV)
    # What is not finite in u stays in the state to the end. On an accelerator the test would wait for the device.
    careful = state_NKV.device.type != "cpu"
    result = _forward(*tensors, chunk, save=save, careful=careful)
    if not careful and not result[1].isfinite().all():
        return _forward(*tensors, chunk, save=save, careful=True)
    return result


def _forward(
    q_NTK: Tensor,
    k_NTK: Tensor,
    v_NTV: Tensor,
    beta_NT1: Tensor,
    log_f_NTF: Tensor | None,
    state_NKV: Tensor,
    chunk: int,
    *,
    save: bool,
    careful: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what the operation returns; if `careful`, rows before one that is not finite have their usual bits."""
    out_NTV, groups, wide = empty_like(v_NTV), scan_groups(q_NTK, v_NTV, log_f_NTF, chunk), _wide(q_NTK, log_f_NTF)
    # Without `save` each group of chunks overwrites the states of the one before.
    counts = [group.chunks for group in groups]
    kept = sum(counts) if save else max(counts, default=0)
    states, end_NKV = empty(state_NKV, kept, *state_NKV.shape), state_NKV.clone(memory_format=torch.contiguous_format)
    u_NTV = empty_like(v_NTV) if save else v_NTV.new_empty(0)
    for group in groups:
        q, k, v, b = (group.gather(x) for x in (q_NTK, k_NTK, v_NTV, beta_NT1))
        decay, k_wide = Decay(None if log_f_NTF is None else group.gather(log_f_NTF), q, v), k.to(wide)
        inverse = _inverse(decay.scores(k_wide, k_wide).mul_(b)).mul_(b.mT)
        if careful:
            inverse = inverse.tril_()  # where b is not finite, its product with zero is NaN
        u, reads = (_times(inverse, x, careful=careful) for x in (v, decay.rows(k)))
        here = states[group.places if save else slice(0, group.chunks)]
        here[0].copy_(end_NKV)
        befores, afters = here.unbind(), [*here[1:].unbind(), end_NKV]
        each = _chunks(group, u, reads, decay.columns(k), decay.whole)
        for (u_NCV, read_NCK, column_NCK, whole), before_NKV, after_NKV in zip(each, befores, afters, strict=True):
            u_NCV.baddbmm_(read_NCK, before_NKV, alpha=-1)
            torch.baddbmm(before_NKV if whole is None else before_NKV * whole, column_NCK.mT, u_NCV, out=after_NKV)
        if save:
            group.scatter(u, u_NTV)
        u, lost = _without_lost(u) if careful else (u, None)
        scores = decay.scores(q.to(wide), k_wide).to(u.dtype)
        out = torch.bmm(scores, u).baddbmm_(decay.rows(q), here.flatten(0, 1))
        group.scatter(out if lost is None else out.masked_fill_(lost, torch.nan), out_NTV)
    return out_NTV, end_NKV, states[: len(states) if save else 0], u_NTV


def _chunks(group: ChunkGroup, *tensors: Tensor | None) -> Any:
    """Yield the tensors `[M, ...]` (or None) of each chunk, `[N, ...]`."""
    P = group.chunks
    each = ([None] * P if x is None else x.unflatten(0, (P, len(x) // P)).unbind() for x in tensors)
    return zip(*each, strict=True)


def _without_lost(x_MCV: Tensor) -> tuple[Tensor, Tensor]:
    """Replace by zeros the rows from the first on that is not finite, and return which these are, `[M, C, 1]`.

    If `b |k|^2` exceeds 2 the state may overflow. In a product with the rows before, zero times infinity would turn
    these into NaN.
    """
    lost_MC1 = (~x_MCV.isfinite()).any(-1, keepdim=True).to(torch.uint8).cummax(1).values.bool()
    return x_MCV.masked_fill(lost_MC1, 0.0), lost_MC1


@delta_scan_op.register_fake
def _(q, k, v, beta, log_f, state, chunk, save):  # type: ignore[no-untyped-def]
    chunks = chunks_of(v.shape[1], chunk, log_f) if save else 0
    u = v.new_empty(v.shape if save else 0)
    return v.new_empty(v.shape), state.new_empty(state.shape), state.new_empty(chunks, *state.shape), u


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
    u_NTV: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log f (empty if none) and the initial state.

    Chunks are visited from the last to the first; `r` is the gradient of the state after a chunk.
    """
    dq_NTK, dk_NTK, dv_NTV, dbeta_NT1 = (empty_like(x) for x in (q_NTK, k_NTK, v_NTV, beta_NT1))
    dlog_f = q_NTK.new_empty(0) if log_f_NTF is None else log_f_NTF.new_empty(log_f_NTF.shape)
    wide = _wide(q_NTK, log_f_NTF)
    r_NKV = states.new_zeros(states.shape[1:]) if grad_state_NKV is None else grad_state_NKV

    def visit(group: ChunkGroup) -> None:
        """Write the gradients of a group of chunks. The return frees its tensors before those of the next are made."""
        nonlocal r_NKV
        q, k, v, b, do, u = (group.gather(x) for x in (q_NTK, k_NTK, v_NTV, beta_NT1, grad_NTV, u_NTV))
        decay, k_wide = Decay(None if log_f_NTF is None else group.gather(log_f_NTF), q, v), k.to(wide)
        state, rows = group.states_of(states), decay.rows(k)
        weights, scores = decay.scores(k_wide, k_wide), decay.scores(q, k)
        inverse, weights = _inverse(weights * b).mT, weights.to(v.dtype).tril_(-1)
        # The error of the values that the state predicts.
        error = torch.baddbmm(v, rows, state, alpha=-1)
        r, to_state = torch.empty_like(state), torch.bmm(decay.rows(q).mT, do)
        g, columns = (_times(inverse, x) for x in (torch.bmm(scores.mT, do), decay.columns(k)))
        each = _chunks(group, b, rows, columns, decay.whole, to_state, g, r)
        for b_NC1, row_NCK, column_NCK, whole, added_NKV, g_NCV, after_NKV in reversed([*each]):
            after_NKV.copy_(r_NKV)
            g_NCV.baddbmm_(column_NCK, r_NKV)
            added_NKV.add_(r_NKV if whole is None else r_NKV * whole)
            r_NKV = torch.baddbmm(added_NKV, row_NCK.mT, g_NCV * b_NC1, alpha=-1)
        group.scatter((error.baddbmm_(weights, u, alpha=-1) * g).sum(-1, keepdim=True), dbeta_NT1)
        dv = g.mul_(b)
        group.scatter(dv, dv_NTV)
        reads = decay.gradients(q, k, scores, torch.bmm(do, u.mT).tril_(), torch.bmm(do, state.mT), torch.bmm(u, r.mT))
        dv_minus = -dv
        grad = torch.bmm(dv_minus, u.mT).tril_(-1)
        deltas = decay.gradients(k, k, weights, grad, torch.bmm(dv_minus, state.mT))
        group.scatter(reads.q_NCK, dq_NTK)
        group.scatter(reads.k_NCK + deltas.q_NCK + deltas.k_NCK, dk_NTK)
        if reads.rows_MCF is not None and reads.columns_MCF is not None and deltas.rows_MCF is not None:
            grad = decay.log_gradient(reads.rows_MCF + deltas.rows_MCF, reads.columns_MCF, (state * r).sum(-1))
            group.scatter(grad, dlog_f)

    for group in reversed(scan_groups(q_NTK, v_NTV, log_f_NTF, chunk)):
        visit(group)
    return dq_NTK, dk_NTK, dv_NTV, dbeta_NT1, dlog_f, r_NKV.clone() if r_NKV is grad_state_NKV else r_NKV


@delta_scan_backward_op.register_fake
def _(grad, grad_state, q, k, v, beta, log_f, states, u, chunk):  # type: ignore[no-untyped-def]
    dlog_f = q.new_empty(0) if log_f is None else log_f.new_empty(log_f.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, beta)), dlog_f, states.new_empty(states.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.chunk, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    *gradients, dlog_f, dstate = delta_scan_backward_op(grad, grad_state, *tensors, ctx.chunk)
    return *gradients, (None if tensors[4] is None else dlog_f), dstate, None, None


delta_scan_op.register_autograd(_backward, setup_context=_setup_context)
