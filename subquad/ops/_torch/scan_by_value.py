"""Compute the gated scan whose value channels decay, in chunks, with a hand-written backward pass.

With G the sums of log g in a chunk that begins with the state S, c a value channel and P the products of queries and
inputs, undecayed and lower-triangular,

    o_ic = exp(G_ic) (q_i S)_c + sum_j P_ij v_jc exp(G_ic - G_jc),    P_ij = q_i . i_j  for j <= i

This is the scan of `scan.py` with the pairs (q, i) and (do, v) exchanged, where do is the gradient of the outputs: both
are derivatives of one sum that is symmetric in the two pairs. So the products by channel of `Decay` are used here too:
its scores are the gradient of P, and its gradient of queries is the outputs.

Shape letters: N batch times heads (of q and i: batch times groups), T tokens, K key channels, V value channels, C rows
of a chunk, M = P N chunks of a `ChunkGroup`.
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
from subquad.ops.groups import by_groups, by_heads
from subquad.tracing import without_tangents


class _Inputs:
    """The queries and inputs of all heads of a group of chunks, their products and the decays of its values."""

    def __init__(self, group: ChunkGroup, q_NTK: Tensor, i_NTK: Tensor, v_NTV: Tensor, log_g_NTV: Tensor) -> None:
        q, i, self.v = (group.gather(x) for x in (q_NTK, i_NTK, v_NTV))
        self.share = len(self.v) // max(1, len(q)) or 1
        self.q, self.i = by_heads(q, self.share), by_heads(i, self.share)
        self.products = by_heads(torch.bmm(q, i.mT).tril_(), self.share)
        self.decay = Decay(group.gather(log_g_NTV), self.v, self.v)
        assert self.decay.to_row is not None
        self.to_row, self.whole_M1V = self.decay.to_row, self.decay.to_row[:, -1:]


@torch.library.custom_op("subquad::gated_scan_by_value", mutates_args=())
def gated_scan_by_value_op(
    q_NTK: Tensor, i_NTK: Tensor, v_NTV: Tensor, log_g_NTV: Tensor, state_NKV: Tensor, chunk: int, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, final state, and with `save` the state before each chunk."""
    groups, out_NTV = scan_groups(q_NTK, v_NTV, log_g_NTV, chunk), empty_like(v_NTV)
    # Without `save` each group of chunks overwrites the states of the one before.
    counts = [group.chunks for group in groups]
    states = empty(state_NKV, sum(counts) if save else max(counts, default=0), *state_NKV.shape)
    end_NKV = state_NKV.clone(memory_format=torch.contiguous_format)
    for group in groups:
        x = _Inputs(group, q_NTK, i_NTK, v_NTV, log_g_NTV)
        here = group.places if save else slice(0, group.chunks)
        state = group.states_before(end_NKV, torch.bmm(x.i.mT, x.decay.columns(x.v)), x.whole_M1V, states[here])
        out = x.decay.over_columns(x.products, x.v)
        group.scatter(out.addcmul_(torch.bmm(x.q, state), x.to_row), out_NTV)
    return out_NTV, end_NKV, states[: len(states) if save else 0]


@gated_scan_by_value_op.register_fake
def _(q, i, v, log_g, state, chunk, save):  # type: ignore[no-untyped-def]
    chunks = chunks_of(v.shape[1], chunk, log_g) if save else 0
    return v.new_empty(v.shape), state.new_empty(state.shape), state.new_empty(chunks, *state.shape)


@torch.library.custom_op("subquad::gated_scan_by_value_backward", mutates_args=())
@without_autocast
def gated_scan_by_value_backward_op(
    grad_NTV: Tensor,
    grad_state_NKV: Tensor | None,
    q_NTK: Tensor,
    i_NTK: Tensor,
    v_NTV: Tensor,
    log_g_NTV: Tensor,
    out_NTV: Tensor,
    states: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, i, v, log g and the initial state.

    Chunks are visited from the last to the first; `r` is the gradient of the state at the current chunk's end.
    """
    dq_NTK, di_NTK, dv_NTV, dlog_g_NTV = (empty_like(x) for x in (q_NTK, i_NTK, v_NTV, log_g_NTV))
    r_NKV = states.new_zeros(states.shape[1:]) if grad_state_NKV is None else grad_state_NKV
    r_NKV = r_NKV.clone(memory_format=torch.contiguous_format)

    def visit(group: ChunkGroup) -> None:
        """Write the gradients of a group of chunks. The return frees its tensors before those of the next are made."""
        x = _Inputs(group, q_NTK, i_NTK, v_NTV, log_g_NTV)
        do, out, state = group.gather(grad_NTV), group.gather(out_NTV), group.states_of(states)
        rows = x.decay.rows(do)
        r = group.gradients_after(r_NKV, torch.bmm(x.q.mT, rows), x.whole_M1V)
        grad = x.decay.scores(do, x.v)
        dq = torch.bmm(grad, x.i).baddbmm_(rows, state.mT)
        di = torch.bmm(grad.mT, x.q).baddbmm_(x.decay.columns(x.v), r.mT)
        group.scatter(by_groups(dq, x.share), dq_NTK)
        group.scatter(by_groups(di, x.share), di_NTK)
        to_rows, to_end = x.decay.over_rows(x.products, do), x.decay.columns(torch.bmm(x.i, r))
        group.scatter(to_rows + to_end, dv_NTV)
        # d/dG of exp(G_i - G_j) is the term itself with sign +1 in row i and -1 in column j: no division by g, which
        # may be zero.
        found = x.decay.log_gradient(do * out - x.v * to_rows, x.v * to_end, (state * r).sum(1))
        group.scatter(found, dlog_g_NTV)

    for group in reversed(scan_groups(q_NTK, v_NTV, log_g_NTV, chunk)):
        visit(group)
    return dq_NTK, di_NTK, dv_NTV, dlog_g_NTV, r_NKV


@gated_scan_by_value_backward_op.register_fake
def _(grad, grad_state, q, i, v, log_g, out, states, chunk):  # type: ignore[no-untyped-def]
    return *(x.new_empty(x.shape) for x in (q, i, v, log_g)), states.new_empty(states.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, ctx.chunk, _ = inputs
    out, _, states = output
    ctx.save_for_backward(*tensors, out, states)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(states)


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    return *gated_scan_by_value_backward_op(grad, grad_state, *tensors, ctx.chunk), None, None


gated_scan_by_value_op.register_autograd(_backward, setup_context=_setup_context)
