"""The gated scan in chunks, with a hand-written backward: memory linear in T, one state a chunk.

Inside a chunk G_t = sum of log f up to t, so exp(G_i - G_j) decays column j to row i; the state links the chunks.

Shape letters: N batch times heads, T tokens, K key channels, V value channels, F = 1 or K decays, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops._torch.pairs import chunk_spans, padded, pair_backward, pair_scores, power_of_two
from subquad.ops.backends import without_autocast

CHUNK = 64


class _Decay:
    """The decays inside one chunk: none, one a row (F = 1) or one a channel (F = K)."""

    def __init__(self, log_f_NCF: Tensor | None, like: Tensor) -> None:
        self.G = self.to_row = self.to_end = self.whole = None
        if log_f_NCF is None:
            return
        # float64: neighbours differ little, their sums are large.
        self.G = log_f_NCF.double().cumsum(1)
        self.to_row = self.G.exp().to(like.dtype)
        self.to_end = (self.G[:, -1:] - self.G).exp_().to(like.dtype)
        self.whole = self.to_row[:, -1, :, None]

    def rows(self, q_NCK: Tensor) -> Tensor:
        """Queries that meet the state of the chunk's start."""
        return q_NCK if self.to_row is None else q_NCK * self.to_row

    def columns(self, i_NCK: Tensor) -> Tensor:
        """Inputs as they reach the state of the chunk's end."""
        return i_NCK if self.to_end is None else i_NCK * self.to_end

    def carry(self, state_NKV: Tensor) -> Tensor:
        """What a state at the chunk's start is worth at its end (also backward)."""
        return state_NKV.clone(memory_format=torch.contiguous_format) if self.whole is None else state_NKV * self.whole

    def scores(self, q_NCK: Tensor, i_NCK: Tensor) -> Tensor:
        """`[N, C, C]`: how much of value j row i receives."""
        if self.G is None:
            return torch.bmm(q_NCK, i_NCK.mT).tril_()
        if self.G.shape[-1] == 1:
            return torch.bmm(q_NCK, i_NCK.mT).mul_(self._between(q_NCK)).tril_()
        return pair_scores(q_NCK, i_NCK, -self.G, -self.G)

    def backward(self, q_NCK: Tensor, i_NCK: Tensor, grad_NCC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q and i through the scores, and the scores."""
        if self.G is not None and self.G.shape[-1] > 1:
            return pair_backward(q_NCK, i_NCK, -self.G, -self.G, grad_NCC)
        if self.G is not None:
            grad_NCC = grad_NCC * self._between(q_NCK)
        return torch.bmm(grad_NCC, i_NCK), torch.bmm(grad_NCC.mT, q_NCK), self.scores(q_NCK, i_NCK)

    def _between(self, like: Tensor) -> Tensor:
        assert self.G is not None
        return (self.G - self.G.mT).clamp_(max=0).to(like.dtype).exp_()


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the final state, the normalisers `[N, T]` (if any) and the states before each chunk (if `save`).

    With `normalise` the state has one more value channel: the sum of the inputs.
    """
    N, T, V = v_NTV.shape
    out_NTV, total_NT = v_NTV.new_empty(N, T, V), v_NTV.new_empty(N, T if normalise else 0)
    state_NKV, states = state_NKV.clone(memory_format=torch.contiguous_format), []
    for span in _spans(T, chunk, log_f_NTF):
        q, i, v = (padded(x, span) for x in (q_NTK, i_NTK, v_NTV))
        decay = _Decay(None if log_f_NTF is None else padded(log_f_NTF, span), q)
        start, stop, _ = span
        if save:
            states.append(state_NKV.clone(memory_format=torch.contiguous_format))
        scores = decay.scores(q, i)
        out = torch.bmm(decay.rows(q), state_NKV)
        out[..., :V].baddbmm_(scores, v)
        columns = decay.columns(i)
        if decay.whole is not None:
            state_NKV.mul_(decay.whole)
        state_NKV[..., :V].baddbmm_(columns.mT, v)
        if normalise:
            total = out[..., V] + scores.sum(-1)
            state_NKV[..., V].add_(columns.sum(1))
            total_NT[:, start:stop] = total[:, : stop - start]
            out = out[..., :V] / _divisor(total, eps)
        out_NTV[:, start:stop] = out[:, : stop - start]
    kept = torch.stack(states) if states else state_NKV.new_empty(0, *state_NKV.shape)
    return out_NTV, state_NKV, total_NT, kept


def _spans(tokens: int, chunk: int, log_f: Tensor | None) -> list[tuple[int, int, int]]:
    if log_f is not None:
        return chunk_spans(tokens, power_of_two(chunk))
    return [(start, stop, stop - start) for start in range(0, tokens, chunk) for stop in [min(start + chunk, tokens)]]


def _divisor(total_NC: Tensor, eps: float) -> Tensor:
    """`total + eps`, and infinity where that is zero: a token whose weights are all zero gives zero."""
    divisor = total_NC[..., None] + eps
    return divisor.masked_fill(divisor == 0, torch.inf)


@gated_scan_op.register_fake
def _(q, i, v, log_f, state, normalise, eps, chunk, save):  # type: ignore[no-untyped-def]
    N, T, _ = v.shape
    states = len(_spans(T, chunk, log_f)) if save else 0
    return (
        v.new_empty(v.shape),
        state.new_empty(state.shape),
        v.new_empty(N, T if normalise else 0),
        state.new_empty(states, *state.shape),
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
    out_NTV: Tensor,
    end_NKV: Tensor,
    total_NT: Tensor,
    states: Tensor,
    normalise: bool,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, i, v, log f (empty if none) and the initial state; `r` is that of a chunk's last state."""
    V = v_NTV.shape[-1]
    dq_NTK, di_NTK, dv_NTV = q_NTK.new_empty(q_NTK.shape), i_NTK.new_empty(i_NTK.shape), v_NTV.new_empty(v_NTV.shape)
    dlog_f = q_NTK.new_empty(0) if log_f_NTF is None else log_f_NTF.new_empty(log_f_NTF.shape)
    r = (
        end_NKV.new_zeros(end_NKV.shape)
        if grad_state_NKV is None
        else grad_state_NKV.clone(memory_format=torch.contiguous_format)
    )
    spans, after = _spans(v_NTV.shape[1], chunk, log_f_NTF), end_NKV
    for span, state in zip(reversed(spans), states.flip(0), strict=True):
        q, i, v, do = (padded(x, span) for x in (q_NTK, i_NTK, v_NTV, grad_NTV))
        decay = _Decay(None if log_f_NTF is None else padded(log_f_NTF, span), q)
        start, stop, _ = span
        rows = slice(0, stop - start)
        if normalise:
            do = do / _divisor(padded(total_NT[..., None], span)[..., 0], eps)
            dtotal = -(do * padded(out_NTV, span)).sum(-1, keepdim=True)
            grad = torch.baddbmm(dtotal, do, v.mT).tril_()
            do_all = torch.cat([do, dtotal], -1)
        else:
            grad, do_all = torch.bmm(do, v.mT).tril_(), do
        dq, di, scores = decay.backward(q, i, grad)
        columns, from_state = decay.columns(i), torch.bmm(do_all, state.mT)
        to_state = torch.bmm(v, r[..., :V].mT)
        if normalise:
            to_state += r[:, None, :, V]
        dq += decay.rows(from_state)
        di += decay.columns(to_state)
        dv_NTV[:, start:stop] = torch.bmm(scores.mT, do).baddbmm_(columns, r[..., :V])[:, rows]
        dq_NTK[:, start:stop], di_NTK[:, start:stop] = dq[:, rows], di[:, rows]
        if log_f_NTF is not None:
            dG, dG_end = q * dq - i * di, (after * r).sum(-1)[:, None]
            if log_f_NTF.shape[-1] == 1:
                dG, dG_end = dG.sum(-1, keepdim=True), dG_end.sum(-1, keepdim=True)
            dlog_f[:, start:stop] = (dG.flip(1).cumsum(1).flip(1) + dG_end)[:, rows]
        r = decay.carry(r).baddbmm_(decay.rows(q).mT, do_all)
        after = state
    return dq_NTK, di_NTK, dv_NTV, dlog_f, r


@gated_scan_backward_op.register_fake
def _(grad, grad_state, q, i, v, log_f, out, end, total, states, normalise, eps, chunk):  # type: ignore[no-untyped-def]
    dlog_f = q.new_empty(0) if log_f is None else log_f.new_empty(log_f.shape)
    return q.new_empty(q.shape), i.new_empty(i.shape), v.new_empty(v.shape), dlog_f, end.new_empty(end.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, i, v, log_f, _, normalise, eps, chunk, _ = inputs
    out, end, total, states = output
    ctx.save_for_backward(q, i, v, log_f, out, end, total, states)
    ctx.options = (normalise, eps, chunk)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(total, states)


def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    *gradients, dlog_f, dstate = gated_scan_backward_op(grad, grad_state, *tensors, *ctx.options)
    return *gradients, (None if tensors[3] is None else dlog_f), dstate, None, None, None, None


gated_scan_op.register_autograd(_backward, setup_context=_setup_context)
