"""The gated scan in chunks, with a hand-written backward: memory linear in T, one state a chunk.

Inside a chunk G_t = sum of log f up to t, and exp(G_i - G_j) is the decay from row j to row i; the state links chunks.

Shape letters: N batch times heads, T tokens, K key channels, V value channels, F = 1 or K decays, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.memory import empty, empty_like
from subquad.ops._torch.halves import chunk_spans, padded, pair_backward, pair_scores, power_of_two, spans
from subquad.ops.backends import without_autocast

CHUNK = 64


class _Decay:
    """Decays inside one chunk: none, one per row (F = 1) or one per channel (F = K)."""

    def __init__(self, log_f_NCF: Tensor | None, like: Tensor) -> None:
        self.G = self.to_row = self.to_end = self.whole = None
        if log_f_NCF is None:
            return
        # float64: exponents are differences of sums, which are large where neighbours differ little.
        self.G = log_f_NCF.double().cumsum(1)
        self.to_row = self.G.exp().to(like.dtype)
        self.to_end = (self.G[:, -1:] - self.G).exp_().to(like.dtype)
        self.whole = self.to_row[:, -1, :, None]

    def rows(self, q_NCK: Tensor) -> Tensor:
        """Return the queries as they meet the state at the chunk's start."""
        return q_NCK if self.to_row is None else q_NCK * self.to_row

    def columns(self, i_NCK: Tensor) -> Tensor:
        """Return the inputs as they reach the state at the chunk's end."""
        return i_NCK if self.to_end is None else i_NCK * self.to_end

    def carry(self, state_NKV: Tensor) -> Tensor:
        """Decay the state from the chunk's start to its end, or its gradient back; return it itself without decays."""
        return state_NKV if self.whole is None else state_NKV * self.whole

    def scores(self, q_NCK: Tensor, i_NCK: Tensor) -> Tensor:
        """Return the weight of value j for row i, `[N, C, C]`."""
        if self.G is None:
            return torch.bmm(q_NCK, i_NCK.mT).tril_()
        if self.G.shape[-1] == 1:
            return torch.bmm(q_NCK, i_NCK.mT).mul_(self._between(q_NCK)).tril_()
        return pair_scores(q_NCK, i_NCK, -self.G, -self.G)

    def backward(self, q_NCK: Tensor, i_NCK: Tensor, grad_NCC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q and i through the scores, and the scores."""
        if self.G is not None and self.G.shape[-1] > 1:
            return pair_backward(q_NCK, i_NCK, -self.G, -self.G, grad_NCC)
        if self.G is not None:
            grad_NCC = grad_NCC * self._between(q_NCK)
        return torch.bmm(grad_NCC, i_NCK), torch.bmm(grad_NCC.mT, q_NCK), self.scores(q_NCK, i_NCK)

    def _between(self, like: Tensor) -> Tensor:
        assert self.G is not None
        # Positive above the diagonal, which is masked later: clamped, or inf * 0 would be NaN.
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the final state, normalisers `[N, T]` and, if `save`, the states and sums before each chunk.

    With `normalise` the state has one more value channel, the sum of the inputs; else normalisers and sums are empty.
    """
    N, T, V = v_NTV.shape
    K, parts = q_NTK.shape[-1], _spans(T, chunk, log_f_NTF)
    out_NTV, total_NT = empty_like(v_NTV), v_NTV.new_empty(N, T if normalise else 0)
    kept = len(parts) if save else 0
    states, sums = empty(state_NKV, kept, N, K, V), state_NKV.new_empty(kept, N, K, int(normalise))
    s_NKV, z_NK1 = state_NKV[..., :V].contiguous(), state_NKV[..., V:]
    for n, span in enumerate(parts):
        q, i, v = (padded(x, span) for x in (q_NTK, i_NTK, v_NTV))
        decay = _Decay(None if log_f_NTF is None else padded(log_f_NTF, span), q)
        start, stop, _ = span
        if save:
            states[n], sums[n] = s_NKV, z_NK1
        scores, rows, columns = decay.scores(q, i), decay.rows(q), decay.columns(i)
        out = torch.bmm(scores, v).baddbmm_(rows, s_NKV)
        s_NKV = torch.baddbmm(decay.carry(s_NKV), columns.mT, v)
        if normalise:
            divisor = torch.baddbmm(scores.sum(-1, keepdim=True), rows, z_NK1)
            z_NK1 = decay.carry(z_NK1) + columns.sum(1)[..., None]
            total_NT[:, start:stop] = divisor[:, : stop - start, 0]
            out.div_(_divisor(divisor, eps))
        out_NTV[:, start:stop] = out[:, : stop - start]
    return out_NTV, torch.cat([s_NKV, z_NK1], -1), total_NT, states, sums


def _spans(tokens: int, chunk: int, log_f: Tensor | None) -> list[tuple[int, int, int]]:
    if log_f is not None:
        return chunk_spans(tokens, power_of_two(chunk))
    return [(part.start, part.stop, part.stop - part.start) for part in spans(tokens, chunk)]


def _divisor(total_NC1: Tensor, eps: float) -> Tensor:
    """`total + eps`, or infinity if that is zero: a token whose weights are all zero gives zero."""
    divisor = total_NC1 + eps
    return divisor.masked_fill_(divisor == 0, torch.inf)


@gated_scan_op.register_fake
def _(q, i, v, log_f, state, normalise, eps, chunk, save):  # type: ignore[no-untyped-def]
    N, T, V = v.shape
    chunks = len(_spans(T, chunk, log_f)) if save else 0
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
    end_NKV: Tensor,
    total_NT: Tensor,
    states: Tensor,
    sums: Tensor,
    normalise: bool,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, i, v, log f (empty if None) and the initial state; `r`: of the state after a chunk."""
    V = v_NTV.shape[-1]
    dq_NTK, di_NTK, dv_NTV = empty_like(q_NTK), empty_like(i_NTK), empty_like(v_NTV)
    dlog_f = q_NTK.new_empty(0) if log_f_NTF is None else log_f_NTF.new_empty(log_f_NTF.shape)
    r_end = torch.zeros_like(end_NKV) if grad_state_NKV is None else grad_state_NKV
    r, rz, after, z_after = r_end[..., :V].contiguous(), r_end[..., V:], end_NKV[..., :V], end_NKV[..., V:]
    parts = _spans(v_NTV.shape[1], chunk, log_f_NTF)
    for span, state, z in zip(reversed(parts), states.flip(0), sums.flip(0), strict=True):
        q, i, v, do = (padded(x, span) for x in (q_NTK, i_NTK, v_NTV, grad_NTV))
        decay = _Decay(None if log_f_NTF is None else padded(log_f_NTF, span), q)
        start, stop, _ = span
        rows, span_rows = decay.rows(q), slice(0, stop - start)
        if normalise:
            do = do / _divisor(padded(total_NT[..., None], span), eps)
            assert out_NTV is not None
            dtotal = (do * padded(out_NTV, span)).sum(-1, keepdim=True).neg_()
            grad = torch.baddbmm(dtotal, do, v.mT).tril_()
            from_state = torch.baddbmm(torch.bmm(dtotal, z.mT), do, state.mT)
            to_state = torch.baddbmm(rz.mT, v, r.mT)
        else:
            grad, from_state, to_state = torch.bmm(do, v.mT).tril_(), torch.bmm(do, state.mT), torch.bmm(v, r.mT)
        dq, di, scores = decay.backward(q, i, grad)
        dq += decay.rows(from_state)
        di += decay.columns(to_state)
        dv_NTV[:, start:stop] = torch.bmm(scores.mT, do).baddbmm_(decay.columns(i), r)[:, span_rows]
        dq_NTK[:, start:stop], di_NTK[:, start:stop] = dq[:, span_rows], di[:, span_rows]
        if log_f_NTF is not None:
            # Row i decays by G_i, column j by -G_j, the state at the end by G_end; log f_t is part of all later G.
            dG, dG_end = q * dq - i * di, ((after * r).sum(-1) + (z_after * rz).sum(-1))[:, None]
            if log_f_NTF.shape[-1] == 1:
                dG, dG_end = dG.sum(-1, keepdim=True), dG_end.sum(-1, keepdim=True)
            dlog_f[:, start:stop] = (dG.flip(1).cumsum(1).flip(1) + dG_end)[:, span_rows]
        r = torch.baddbmm(decay.carry(r), rows.mT, do)
        if normalise:
            rz = torch.baddbmm(decay.carry(rz), rows.mT, dtotal)
        after, z_after = state, z
    return dq_NTK, di_NTK, dv_NTV, dlog_f, torch.cat([r, rz], -1)


@gated_scan_backward_op.register_fake
def _(grad, grad_state, q, i, v, log_f, out, end, total, states, sums, normalise, eps, chunk):  # type: ignore[no-untyped-def]
    dlog_f = q.new_empty(0) if log_f is None else log_f.new_empty(log_f.shape)
    return q.new_empty(q.shape), i.new_empty(i.shape), v.new_empty(v.shape), dlog_f, end.new_empty(end.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, i, v, log_f, _, normalise, eps, chunk, _ = inputs
    out, end, *kept = output
    ctx.save_for_backward(q, i, v, log_f, out if normalise else None, end, *kept)
    ctx.options = (normalise, eps, chunk)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)


def _backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grad = torch.zeros_like(tensors[2]) if grad is None else grad
    *gradients, dlog_f, dstate = gated_scan_backward_op(grad, grad_state, *tensors, *ctx.options)
    return *gradients, (None if tensors[3] is None else dlog_f), dstate, None, None, None, None


gated_scan_op.register_autograd(_backward, setup_context=_setup_context)
