"""Causal Latte's recurrence in chunks, with a hand-written backward: memory linear in T, one state a chunk.

Let r be the log-normaliser of all tokens before the chunk (in the first chunk, of its first token), E_j = exp(k_j - r)
and Z_i = z + sum_{j <= i} E_j, where z and s are the normaliser, in units of exp(r), and the mean before the chunk.
Then token j weighs E_j / Z_i for row i: a chunk is linear attention, a handful of matrix products,

    o_i = q_i . (z s + sum_{j <= i} E_j (x) v_j),   q_i = p_i / Z_i

and with one latent (ELiTA) a running sum replaces the scores, which have rank one. This needs k_j - r <= LIMIT, or E
would overflow. The first row that sees a larger logit and all rows after it are computed again in the safe form, and so
is the state after the chunk. The switch is per row and only looks back, so no row's bits depend on later tokens.

The safe form takes logits of any size: no exponent is positive or a difference of large sums. With
m_t = max_{s <= t} k_s and z_t = sum_{s <= t} exp(k_s - m_t), the weight of token j for row i is exp(k_j - m_i) / z_i.
The decays telescope, so a chunk needs only k, m and z. Derivation: docs/decisions/0002-running-softmax.md.

Shape letters: N batch times heads, T tokens, L latents, V value channels, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.memory import empty, empty_like
from subquad.ops._torch.halves import (
    decayed_sum,
    pair_backward,
    pair_scores,
    power_of_two,
    reverse_decayed_sum,
    running_max,
    spans,
)
from subquad.ops.backends import without_autocast

EMPTY = -(2.0**100)
"""The log-normaliser of no tokens: finite, so differences are too, and the same number in float32 and float64."""
CHUNK = 64
MEAN_CHUNK = 256
"""Tokens per chunk, for several latents and for one."""
LIMIT = 40.0
"""Rows with logits above the reference by more take the safe form: exp(40) leaves products room in float32."""


def chunk_size(latents: int) -> int:
    """Return the default tokens per chunk."""
    return MEAN_CHUNK if latents == 1 else CHUNK


class ChunkGradients(NamedTuple):
    """Gradients of p, k and v, and of the state before the chunk: `r` of its mean, `u` of minus its log-normaliser."""

    p: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    u: Tensor


class _Normalisers:
    """m and z of the rows `[N, C, L]`, and of the row before the chunk `[N, 1, L]`."""

    def __init__(self, k_NCL: Tensor, a_NL: Tensor) -> None:
        # What rounding a to float32 loses goes into z.
        self.m_before = a_NL.to(k_NCL.dtype)[:, None]
        self.z_before = (a_NL[:, None] - self.m_before).exp().to(k_NCL.dtype)
        self.m = torch.maximum(running_max(k_NCL), self.m_before)
        self.z = decayed_sum((k_NCL - self.m).exp_(), self.m)
        self.z.addcmul_((self.m_before - self.m).exp_(), self.z_before)

    @property
    def carry(self) -> Tensor:
        """Weight at each row of the state before the chunk."""
        return (self.m_before - self.m).exp_().mul_(self.z_before).div_(self.z)

    def source(self, k_NCL: Tensor) -> Tensor:
        """Return the weight of each token at the chunk's end."""
        return (k_NCL - self.m[:, -1:]).exp_().div_(self.z[:, -1:])


def _whole(x_NCL: Tensor, fill: float = 0.0) -> Tensor:
    """Fill the rows up to a power of two."""
    missing = power_of_two(x_NCL.shape[1]) - x_NCL.shape[1]
    return F.pad(x_NCL, (0, 0, 0, missing), value=fill) if missing else x_NCL


def safe_forward(
    p_NCL: Tensor, k_NCL: Tensor, v_NCV: Tensor, a_NL: Tensor, s_NLV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of one chunk with any logits, and the log-normaliser (float64) and mean after it."""
    C = k_NCL.shape[1]
    p, k, v = _whole(p_NCL), _whole(k_NCL, EMPTY), _whole(v_NCV)
    norm = _Normalisers(k, a_NL)
    carry = norm.carry
    after = torch.baddbmm(s_NLV * carry[:, -1, :, None], norm.source(k).mT, v)
    out = torch.bmm(carry * p, s_NLV).baddbmm_(pair_scores(p / norm.z, None, k, norm.m), v)
    return out[:, :C], norm.m[:, -1].to(a_NL.dtype) + norm.z[:, -1].to(a_NL.dtype).log(), after


def safe_backward(
    do_NCV: Tensor,
    p_NCL: Tensor,
    k_NCL: Tensor,
    v_NCV: Tensor,
    a_NL: Tensor,
    s_NLV: Tensor,
    r_NLV: Tensor,
    u_NL: Tensor,
) -> ChunkGradients:
    """Return the gradients, given `r` and `u` of the state after the chunk. `u_bar` is u / z."""
    C = k_NCL.shape[1]
    do, p, k, v = _whole(do_NCV), _whole(p_NCL), _whole(k_NCL, EMPTY), _whole(v_NCV)
    norm = _Normalisers(k, a_NL)
    carry, source = norm.carry, norm.source(k)
    dp, dk, scores = pair_backward(p / norm.z, None, k, norm.m, torch.bmm(do, v.mT).tril_())
    dp.div_(norm.z).add_(torch.bmm(do, s_NLV.mT).mul_(carry))
    dv = torch.bmm(scores.mT, do).baddbmm_(source, r_NLV)
    dk.add_(torch.bmm(v, r_NLV.mT).mul_(source))
    u_bar = reverse_decayed_sum((p * dp).div_(norm.z), norm.m)
    u_bar.add_((norm.m - norm.m[:, -1:]).exp_().mul_(u_NL[:, None] / norm.z[:, -1:]))
    dk.sub_((k - norm.m).exp_().mul_(u_bar))
    r = torch.baddbmm(r_NLV * carry[:, -1, :, None], (carry * p).mT, do)
    u = ((norm.m_before - norm.m[:, :1]).exp_() * norm.z_before * u_bar[:, :1])[:, 0]
    return ChunkGradients(dp[:, :C], dk[:, :C], dv[:, :C], r, u)


class _Chunk:
    """p, k and v of one chunk, and the state before it: log-normaliser a (float64) and mean s."""

    def __init__(self, p_NCL: Tensor, k_NCL: Tensor, v_NCV: Tensor, a_NL: Tensor, s_NLV: Tensor) -> None:
        self.p, self.k, self.v, self.a, self.s = p_NCL, k_NCL, v_NCV, a_NL, s_NLV
        # The reference depends on the past only, or a later token would change the bits of earlier rows.
        first_NL = k_NCL[:, 0].clamp(min=EMPTY)
        self.reference_NL = torch.where(a_NL <= EMPTY, first_NL, a_NL.to(k_NCL.dtype))
        self.z_NL = (a_NL - self.reference_NL).exp().to(k_NCL.dtype)
        self.late_NC: Tensor | None = None
        self.x_NCL = k_NCL - self.reference_NL[:, None]
        if self.x_NCL.numel() and not self.x_NCL.amax() <= LIMIT:  # NaN too
            # One flag per row, cumulative over the chunk: late rows read clamped numbers and are replaced.
            self.late_NC = ~(self.x_NCL.amax(-1).cummax(1).values <= LIMIT)
            self.x_NCL.clamp_(max=LIMIT)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, and the log-normaliser and mean after the chunk."""
        e_NCL = self.x_NCL.exp_()
        out_NCV, end_NL, sum_NLV = self._mean(e_NCL) if self.k.shape[-1] == 1 else self._latents(e_NCL)
        a_NL = self.reference_NL.to(self.a.dtype) + end_NL.to(self.a.dtype).log()
        s_NLV = sum_NLV.div_(end_NL[..., None])
        if self.late_NC is not None:
            # For all heads: the shapes, and so the bits of one head, must not depend on other heads' logits.
            safe = safe_forward(self.p, self.k, self.v, self.a, self.s)
            last_N1 = self.late_NC[:, -1:]
            out_NCV = torch.where(self.late_NC[..., None], safe[0], out_NCV)
            a_NL, s_NLV = torch.where(last_N1, safe[1], a_NL), torch.where(last_N1[..., None], safe[2], s_NLV)
        return out_NCV, a_NL, s_NLV

    def backward(self, do_NCV: Tensor, r_NLV: Tensor, u_NL: Tensor) -> ChunkGradients:
        """Return the gradients, given `r` of the mean after the chunk and `u` of minus its log-normaliser."""
        e_NCL = self.x_NCL.exp_()
        form = self._mean_backward if self.k.shape[-1] == 1 else self._latents_backward
        gradients = form(do_NCV, e_NCL, r_NLV, u_NL)
        if self.late_NC is not None:
            # A head's whole chunk, as R and U mix all its rows: gradients need not be causal to the bit.
            safe = safe_backward(do_NCV, self.p, self.k, self.v, self.a, self.s, r_NLV, u_NL)
            last_N = self.late_NC[:, -1]
            late = (last_N.view(-1, *(1,) * (x.ndim - 1)) for x in gradients)
            gradients = ChunkGradients(*(torch.where(*chosen) for chosen in zip(late, safe, gradients, strict=True)))
        return gradients

    def _latents(self, e_NCL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chunk of several latents: outputs, normaliser `[N, L]` and sum of values `[N, L, V]` after it."""
        p_NCL, v_NCV, z_NL, s_NLV = self.p, self.v, self.z_NL, self.s
        total_NCL = e_NCL.cumsum(1).add_(z_NL[:, None])
        q_NCL = p_NCL / total_NCL
        before_NLV = s_NLV * z_NL[..., None]
        out_NCV = torch.bmm(torch.bmm(q_NCL, e_NCL.mT).tril_(), v_NCV).baddbmm_(q_NCL, before_NLV)
        return out_NCV, total_NCL[:, -1], before_NLV.baddbmm_(e_NCL.mT, v_NCV)

    def _latents_backward(self, do_NCV: Tensor, e_NCL: Tensor, r_NLV: Tensor, u_NL: Tensor) -> ChunkGradients:
        """Return gradients of p, k, v and the state before, given `r` and `u` of the state after."""
        p_NCL, v_NCV, z_NL, s_NLV = self.p, self.v, self.z_NL, self.s
        total_NCL = e_NCL.cumsum(1).add_(z_NL[:, None])
        q_NCL = p_NCL / total_NCL
        end_NL = total_NCL[:, -1]
        r_NLV, u_NL = r_NLV / end_NL[..., None], u_NL / end_NL
        grad_NCC = torch.bmm(do_NCV, v_NCV.mT).tril_()
        scores_NCC = torch.bmm(q_NCL, e_NCL.mT).tril_()
        dv_NCV = torch.bmm(scores_NCC.mT, do_NCV).baddbmm_(e_NCL, r_NLV)
        dp_NCL = torch.bmm(grad_NCC, e_NCL).baddbmm_(do_NCV, (s_NLV * z_NL[..., None]).mT).div_(total_NCL)
        de_NCL = torch.bmm(grad_NCC.mT, q_NCL).baddbmm_(v_NCV, r_NLV.mT)
        # The normaliser's gradient from later rows, summed from the end: a total minus a prefix would cancel.
        taken_NCL = (q_NCL * dp_NCL).flip(1).cumsum(1).flip(1).add_(u_NL[:, None])
        dk_NCL = de_NCL.sub_(taken_NCL).mul_(e_NCL)
        r_NLV = torch.baddbmm(r_NLV, q_NCL.mT, do_NCV).mul_(z_NL[..., None])
        return ChunkGradients(dp_NCL, dk_NCL, dv_NCV, r_NLV, taken_NCL[:, 0] * z_NL)

    def _mean(self, e_NC1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chunk of one latent: outputs, normaliser `[N, 1]` and sum of values `[N, 1, V]` after it."""
        p_NC1, v_NCV, z_N1, s_N1V = self.p, self.v, self.z_NL, self.s
        total_NC1 = e_NC1.cumsum(1).add_(z_N1[:, None])
        sums_NCV = (e_NC1 * v_NCV).cumsum(1).add_(s_N1V * z_N1[:, None])
        end_N1V = sums_NCV[:, -1:].clone()
        return sums_NCV.mul_(p_NC1 / total_NC1), total_NC1[:, -1], end_N1V

    def _mean_backward(self, do_NCV: Tensor, e_NC1: Tensor, r_N1V: Tensor, u_N1: Tensor) -> ChunkGradients:
        """Return gradients of p, k, v and the state before, given `r` and `u` of the state after."""
        p_NC1, v_NCV, z_N1, s_N1V = self.p, self.v, self.z_NL, self.s
        total_NC1 = e_NC1.cumsum(1).add_(z_N1[:, None])
        q_NC1 = p_NC1 / total_NC1
        end_N1 = total_NC1[:, -1]
        sums_NCV = (e_NC1 * v_NCV).cumsum(1).add_(s_N1V * z_N1[:, None])
        dp_NC1 = sums_NCV.mul_(do_NCV).sum(-1, keepdim=True).div_(total_NC1)
        # Sums over later rows start from the end: a total minus a prefix would cancel.
        dx_NCV = (do_NCV * q_NC1).flip(1).cumsum(1).flip(1).add_(r_N1V / end_N1[..., None])
        taken_NC1 = (q_NC1 * dp_NC1).flip(1).cumsum(1).flip(1).add_((u_N1 / end_N1)[:, None])
        dk_NC1 = torch.mul(dx_NCV, v_NCV, out=sums_NCV).sum(-1, keepdim=True).sub_(taken_NC1).mul_(e_NC1)
        r_N1V = dx_NCV[:, :1] * z_N1[:, None]
        return ChunkGradients(dp_NC1, dk_NC1, dx_NCV.mul_(e_NC1), r_N1V, taken_NC1[:, 0] * z_N1)


@torch.library.custom_op("subquad::running_softmax", mutates_args=())
@without_autocast
def running_softmax_op(
    p_NTL: Tensor,
    k_NTL: Tensor,
    v_NTV: Tensor,
    own_NT1: Tensor | None,
    a_NL: Tensor,
    s_NLV: Tensor,
    chunk: int,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, the last log-normaliser (float64) and mean, and, if `save`, both before each chunk.

    Kept ones have shape `[chunks, N, L (, V)]`. A token adds `own` times its own value to its output.
    """
    N, T, L = k_NTL.shape
    parts = spans(T, chunk)
    out_NTV = empty_like(v_NTV)
    kept = len(parts) if save else 0
    normalisers, means = a_NL.new_empty(kept, N, L), empty(s_NLV, kept, N, L, v_NTV.shape[-1])
    for n, span in enumerate(parts):
        if save:
            normalisers[n], means[n] = a_NL, s_NLV
        part = p_NTL[:, span], k_NTL[:, span], v_NTV[:, span], a_NL, s_NLV
        safe = v_NTV.device.type != "cpu"  # elsewhere the test of the logits would wait for the device
        out_NCV, a_NL, s_NLV = safe_forward(*part) if safe else _Chunk(*part).forward()
        if own_NT1 is not None:
            out_NCV.addcmul_(own_NT1[:, span], v_NTV[:, span])
        out_NTV[:, span] = out_NCV
    if not parts:  # an operator may not return its own input
        a_NL, s_NLV = a_NL.clone(), s_NLV.clone()
    return out_NTV, a_NL, s_NLV, normalisers, means


@running_softmax_op.register_fake
def _(p, k, v, own, a, s, chunk, save):  # type: ignore[no-untyped-def]
    kept = len(spans(k.shape[1], chunk)) if save else 0
    return (*(x.new_empty(x.shape) for x in (v, a, s)), *(x.new_empty(kept, *x.shape) for x in (a, s)))


@torch.library.custom_op("subquad::running_softmax_backward", mutates_args=())
@without_autocast
def running_softmax_backward_op(
    grad_NTV: Tensor,
    grad_a_NL: Tensor | None,
    grad_s_NLV: Tensor | None,
    p_NTL: Tensor,
    k_NTL: Tensor,
    v_NTV: Tensor,
    own_NT1: Tensor | None,
    end_NLV: Tensor,
    normalisers: Tensor,
    means: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of p, k, v, own (empty if None) and of the initial log-normaliser and mean.

    `r` is the gradient of the mean after a chunk, `u` of minus its log-normaliser while the sum of values is held.
    """
    T = k_NTL.shape[1]
    dp_NTL, dk_NTL, dv_NTV = (empty_like(x) for x in (p_NTL, k_NTL, v_NTV))
    down_NT1 = v_NTV.new_empty(0 if own_NT1 is None else own_NT1.shape)
    r_NLV = torch.zeros_like(end_NLV) if grad_s_NLV is None else grad_s_NLV
    u_NL = (end_NLV * r_NLV).sum(-1)
    if grad_a_NL is not None:
        u_NL = u_NL - grad_a_NL.to(u_NL.dtype)
    for span, a_NL, s_NLV in zip(reversed(spans(T, chunk)), normalisers.flip(0), means.flip(0), strict=True):
        do, p, k, v = (x[:, span] for x in (grad_NTV, p_NTL, k_NTL, v_NTV))
        if v.device.type == "cpu":
            gradients = _Chunk(p, k, v, a_NL, s_NLV).backward(do, r_NLV, u_NL)
        else:
            gradients = safe_backward(do, p, k, v, a_NL, s_NLV, r_NLV, u_NL)
        dp_NTL[:, span], dk_NTL[:, span], dv_NCV, r_NLV, u_NL = gradients
        if own_NT1 is not None:
            dv_NCV.addcmul_(own_NT1[:, span], do)
            down_NT1[:, span] = (do * v).sum(-1, keepdim=True)
        dv_NTV[:, span] = dv_NCV
    start_NLV = means[0] if T else end_NLV
    da_NL = (start_NLV * r_NLV).sum(-1) - u_NL
    return dp_NTL, dk_NTL, dv_NTV, down_NT1, da_NL.to(normalisers.dtype), r_NLV.clone()


@running_softmax_backward_op.register_fake
def _(grad, grad_a, grad_s, p, k, v, own, end, normalisers, means, chunk):  # type: ignore[no-untyped-def]
    return (
        *(x.new_empty(x.shape) for x in (p, k, v)),
        v.new_empty(0 if own is None else own.shape),
        normalisers.new_empty(end.shape[:-1]),
        end.new_empty(end.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    p, k, v, own, _, _, chunk, _ = inputs
    _, _, end, normalisers, means = output
    ctx.save_for_backward(p, k, v, own, end, normalisers, means)
    ctx.chunk = chunk
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(normalisers, means)


def _backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    p, k, v, own, end, normalisers, means = ctx.saved_tensors
    grad_a, grad_s, *_ = rest
    grad = torch.zeros_like(v) if grad is None else grad
    dp, dk, dv, down, *state = running_softmax_backward_op(
        grad, grad_a, grad_s, p, k, v, own, end, normalisers, means, ctx.chunk
    )
    return dp, dk, dv, None if own is None else down, *state, None, None


running_softmax_op.register_autograd(_backward, setup_context=_setup_context)
