"""Compute the gated scan in chunks, with a hand-written backward pass: memory linear in T, one state per chunk.

Rows of a chunk read earlier chunks through one state, so the work per chunk is three matrix products of C rows. Only
the states are computed chunk after chunk: everything else is computed for a `ChunkGroup` of several chunks in one call.

Shape letters: N batch times heads (of q and i: batch times groups), T tokens, K key channels, V value channels, F = 1
or K decays, C rows of a chunk, M = P N chunks of a `ChunkGroup`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.memory import empty, empty_like
from subquad.ops._torch.chunk_groups import ChunkGroup, chunk_groups
from subquad.ops._torch.decays import Decay
from subquad.ops._torch.log_space_sums import power_of_two
from subquad.ops.backends import without_autocast
from subquad.tracing import without_tangents

CHUNK = 64
"""Rows of a chunk: large enough for efficient products, small enough that C x C scores cost less than the state."""


@torch.library.custom_op("subquad::gated_scan", mutates_args=())
def gated_scan_op(
    q_NTK: Tensor,
    i_NTK: Tensor,
    v_NTV: Tensor,
    log_f_NTF: Tensor | None,
    state_NKV: Tensor,
    normalise: bool,
    eps: float,
    chunk: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, final state, normalisers `[N, T]`, and with `save` the state and its sums before each chunk.

    With `normalise` the state has one more value channel, the sum of the inputs; without it there are no normalisers.
    The backward pass computes everything else again from the saved states.
    """
    (N, T, V), K = v_NTV.shape, q_NTK.shape[-1]
    groups = scan_groups(q_NTK, v_NTV, log_f_NTF, chunk)
    out_NTV, total_NT = empty(v_NTV, N, T, V), v_NTV.new_empty(N, T if normalise else 0)
    # Without `save` each group of chunks overwrites the states of the one before.
    counts = [group.chunks for group in groups]
    kept = sum(counts) if save else max(counts, default=0)
    states, sums = empty(state_NKV, kept, N, K, V), state_NKV.new_empty(kept, N, K, int(normalise))
    end_NKV, end_NK1 = (
        x.clone(memory_format=torch.contiguous_format) for x in state_NKV.split([V, int(normalise)], -1)
    )
    for group in groups:
        q, i, v = (group.gather(x) for x in (q_NTK, i_NTK, v_NTV))
        decay = Decay(None if log_f_NTF is None else group.gather(log_f_NTF), q, v)
        scores, rows, columns = decay.scores(q, i), decay.rows(q), decay.columns(i)
        here = group.places if save else slice(0, group.chunks)
        state = group.states_before(end_NKV, torch.bmm(columns.mT, v), decay.whole, states[here])
        out = torch.bmm(scores, v).baddbmm_(rows, state)
        if normalise:
            z = group.states_before(end_NK1, columns.sum(1)[..., None], decay.whole, sums[here])
            divisor = (rows * z.mT).sum(-1, keepdim=True).add_(scores.sum(-1, keepdim=True))
            group.scatter(divisor, total_NT[..., None])
            out.div_(_divisor(divisor, eps))
        group.scatter(out, out_NTV)
    kept = len(states) if save else 0
    return out_NTV, torch.cat([end_NKV, end_NK1], -1), total_NT, states[:kept], sums[:kept]


def chunks_of(tokens: int, chunk: int, log_f: Tensor | None) -> int:
    """Return the number of chunks."""
    return -(-tokens // (chunk if log_f is None else power_of_two(chunk)))


def scan_groups(q_NTK: Tensor, v_NTV: Tensor, log_f: Tensor | None, chunk: int) -> list[ChunkGroup]:
    """Cut the tokens; with decays a chunk has a power of two rows."""
    chunk = chunk if log_f is None else power_of_two(chunk)
    return chunk_groups(v_NTV, chunk, max(chunk, q_NTK.shape[-1], v_NTV.shape[-1]), whole=log_f is not None)


def _divisor(total_NC1: Tensor, eps: float) -> Tensor:
    """Return `total + eps`, or infinity if that is zero: a token whose weights are all zero then has output zero."""
    divisor = total_NC1 + eps
    return divisor.masked_fill_(divisor == 0, torch.inf)


@gated_scan_op.register_fake
def _(q, i, v, log_f, state, normalise, eps, chunk, save):  # type: ignore[no-untyped-def]
    N, T, V = v.shape
    chunks = chunks_of(T, chunk, log_f) if save else 0
    return (
        v.new_empty(v.shape),
        state.new_empty(state.shape),
        v.new_empty(N, T if normalise else 0),
        state.new_empty(chunks, N, q.shape[-1], V),
        state.new_empty(chunks, N, q.shape[-1], int(normalise)),
    )


@torch.library.custom_op("subquad::gated_scan_backward", mutates_args=())
@without_autocast
def gated_scan_backward_op(
    grad_NTV: Tensor,
    grad_state_NKV: Tensor | None,
    q_NTK: Tensor,
    i_NTK: Tensor,
    v_NTV: Tensor,
    log_f_NTF: Tensor | None,
    out_NTV: Tensor | None,
    total_NT: Tensor,
    states: Tensor,
    sums: Tensor,
    normalise: bool,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, i, v, log f (empty if none) and the initial state.

    Chunks are visited from the last to the first; `r` is the gradient of the state at the current chunk's end.
    """
    (N, _, V), K = v_NTV.shape, q_NTK.shape[-1]
    dq_NTK, di_NTK, dv_NTV = empty_like(q_NTK), empty_like(i_NTK), empty_like(v_NTV)
    dlog_f = q_NTK.new_empty(0) if log_f_NTF is None else log_f_NTF.new_empty(log_f_NTF.shape)
    r_end = states.new_zeros(N, K, V + int(normalise)) if grad_state_NKV is None else grad_state_NKV
    r_NKV, r_NK1 = (x.clone(memory_format=torch.contiguous_format) for x in r_end.split([V, int(normalise)], -1))

    def visit(group: ChunkGroup) -> None:
        """Write the gradients of a group of chunks. The return frees its tensors before those of the next are made."""
        q, i, v, do = (group.gather(x) for x in (q_NTK, i_NTK, v_NTV, grad_NTV))
        decay = Decay(None if log_f_NTF is None else group.gather(log_f_NTF), q, v)
        rows = decay.rows(q)
        state, z = (group.states_of(x) for x in (states, sums))
        if normalise:
            assert out_NTV is not None
            do = do / _divisor(group.gather(total_NT[..., None]), eps)
            dtotal = (do * group.gather(out_NTV)).sum(-1, keepdim=True).neg_()
        r = group.gradients_after(r_NKV, torch.bmm(rows.mT, do), decay.whole)
        grad, from_state, to_state = torch.bmm(do, v.mT), torch.bmm(do, state.mT), torch.bmm(v, r.mT)
        if normalise:
            rz = group.gradients_after(r_NK1, (rows * dtotal).sum(1)[..., None], decay.whole)
            grad.add_(dtotal)
            from_state.addcmul_(dtotal, z.mT)
            to_state.add_(rz.mT)
        scores = decay.scores(q, i)
        group.scatter(torch.bmm(scores.mT, do).baddbmm_(decay.columns(i), r), dv_NTV)
        found = decay.gradients(q, i, scores, grad.tril_(), from_state, to_state)
        group.scatter(found.q_NCK, dq_NTK)
        group.scatter(found.k_NCK, di_NTK)
        if found.rows_MCF is not None and found.columns_MCF is not None:
            grad_state_MK = (state * r).sum(-1)
            if normalise:
                grad_state_MK.add_((z * rz).sum(-1))
            group.scatter(decay.log_gradient(found.rows_MCF, found.columns_MCF, grad_state_MK), dlog_f)

    for group in reversed(scan_groups(q_NTK, v_NTV, log_f_NTF, chunk)):
        visit(group)
    return dq_NTK, di_NTK, dv_NTV, dlog_f, torch.cat([r_NKV, r_NK1], -1)


@gated_scan_backward_op.register_fake
def _(grad, grad_state, q, i, v, log_f, out, total, states, sums, normalise, eps, chunk):  # type: ignore[no-untyped-def]
    dlog_f = q.new_empty(0) if log_f is None else log_f.new_empty(log_f.shape)
    dstate = states.new_empty(len(v), q.shape[-1], v.shape[-1] + int(normalise))
    return q.new_empty(q.shape), i.new_empty(i.shape), v.new_empty(v.shape), dlog_f, dstate


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, i, v, log_f, _, normalise, eps, chunk, _ = inputs
    out, _, *kept = output
    ctx.save_for_backward(q, i, v, log_f, out if normalise else None, *kept)
    ctx.options = (normalise, eps, chunk)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    *gradients, dlog_f, dstate = gated_scan_backward_op(grad, grad_state, *tensors, *ctx.options)
    return *gradients, (None if tensors[3] is None else dlog_f), dstate, None, None, None, None


gated_scan_op.register_autograd(_backward, setup_context=_setup_context)
