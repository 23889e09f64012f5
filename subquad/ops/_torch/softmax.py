"""Causal Latte's recurrence in chunks, with a hand-written backward: memory linear in T, one state a chunk.

Several chunks, a `ChunkGroup`, are computed at a time. Let r be the log-normaliser of all tokens before the group (in
the first one, of its first token), E_j = exp(k_j - r) and Z_i = z + sum_{j <= i} E_j, where z and s are the normaliser,
in units of exp(r), and the mean before the group. Then token j weighs E_j / Z_i for row i: it is linear attention in
chunks,

    o_i = q_i . (z s + sum_{j <= i} E_j (x) v_j),   q_i = p_i / Z_i

and with one latent (ELiTA) a running sum replaces the scores, which have rank one. This needs k_j - r <= LIMIT, or E
would overflow. The first row that sees a larger logit and all rows after it in the group are computed again in the safe
form, chunk by chunk, and so is the state after the group. The switch is per row and only looks back, so no row's bits
depend on later tokens.

The safe form takes logits of any size: no exponent is positive or a difference of large sums. With
m_t = max_{s <= t} k_s and z_t = sum_{s <= t} exp(k_s - m_t), the weight of token j for row i is exp(k_j - m_i) / z_i.
The decays telescope, so a chunk needs only k, m and z. Derivation: docs/decisions/0002-running-softmax.md.

Shape letters: N batch times heads, T tokens, L latents, V value channels, C rows of a chunk,
P chunks of a `ChunkGroup`, M = P N.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.memory import empty, empty_like
from subquad.ops._torch.chunk_groups import ChunkGroup, chunk_groups, propagate
from subquad.ops._torch.log_space_sums import EMPTY as EMPTY
from subquad.ops._torch.log_space_sums import (
    LIMIT,
    PairWeights,
    decayed_sum,
    power_of_two,
    reference,
    reverse_decayed_sum,
    running_max,
    spans,
)
from subquad.ops.backends import without_autocast
from subquad.tracing import without_tangents

CHUNK = 64
MEAN_CHUNK = 512
"""Tokens per chunk, for several latents and for one."""


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
        # a is float64: z takes up the difference to its rounded value.
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


def _filled(x_NCL: Tensor, fill: float = 0.0) -> Tensor:
    """Return `x` with rows of `fill` up to a power of two of rows."""
    missing = power_of_two(x_NCL.shape[1]) - x_NCL.shape[1]
    return F.pad(x_NCL, (0, 0, 0, missing), value=fill) if missing else x_NCL


def safe_forward(
    p_NCL: Tensor, k_NCL: Tensor, v_NCV: Tensor, a_NL: Tensor, s_NLV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of one chunk with any logits, and the log-normaliser (float64) and mean after it."""
    C = k_NCL.shape[1]
    p, k, v = _filled(p_NCL), _filled(k_NCL, EMPTY), _filled(v_NCV)
    norm = _Normalisers(k, a_NL)
    carry = norm.carry
    after = torch.baddbmm(s_NLV * carry[:, -1, :, None], norm.source(k).mT, v)
    out = torch.bmm(carry * p, s_NLV).baddbmm_(PairWeights(k, norm.m, p.dtype).scores(p / norm.z, None), v)
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
    do, p, k, v = _filled(do_NCV), _filled(p_NCL), _filled(k_NCL, EMPTY), _filled(v_NCV)
    norm = _Normalisers(k, a_NL)
    carry, source = norm.carry, norm.source(k)
    weights, share = PairWeights(k, norm.m, p.dtype), p / norm.z
    scores = weights.scores(share, None)
    dp, dk = weights.backward(share, None, torch.bmm(do, v.mT).tril_())
    dp.div_(norm.z).add_(torch.bmm(do, s_NLV.mT).mul_(carry))
    dv = torch.bmm(scores.mT, do).baddbmm_(source, r_NLV)
    dk.add_(torch.bmm(v, r_NLV.mT).mul_(source))
    u_bar = reverse_decayed_sum((p * dp).div_(norm.z), norm.m)
    u_bar.add_((norm.m - norm.m[:, -1:]).exp_().mul_(u_NL[:, None] / norm.z[:, -1:]))
    dk.sub_((k - norm.m).exp_().mul_(u_bar))
    r = torch.baddbmm(r_NLV * carry[:, -1, :, None], (carry * p).mT, do)
    u = ((norm.m_before - norm.m[:, :1]).exp_() * norm.z_before * u_bar[:, :1])[:, 0]
    return ChunkGradients(dp[:, :C], dk[:, :C], dv[:, :C], r, u)


class _GroupSoftmax:
    """p and k of a group, relative to the state before it: log-normaliser a (float64) and mean s."""

    def __init__(self, group: ChunkGroup, p_NTL: Tensor, k_NTL: Tensor, a_NL: Tensor, s_NLV: Tensor) -> None:
        self.group, self.a, self.s = group, a_NL, s_NLV
        k_PNCL = group.rows(k_NTL)
        self.reference_NL = reference(k_PNCL[0], a_NL)
        self.unsafe_NT: Tensor | None = None
        x_PNCL = torch.sub(k_PNCL, self.reference_NL[:, None], out=k_NTL.new_empty(k_PNCL.shape))
        if x_PNCL.numel() and not x_PNCL.amax() <= LIMIT:  # NaN too
            # One flag per row, cumulative over the group: unsafe rows read clamped numbers and are replaced.
            self.unsafe_NT = ~(x_PNCL.amax(-1).transpose(0, 1).flatten(1).cummax(1).values <= LIMIT)
            x_PNCL.clamp_(max=LIMIT)
        e_PNCL = x_PNCL.exp_()
        total_PNCL = e_PNCL.cumsum(2)
        z_NL = (a_NL - self.reference_NL).exp().to(k_NTL.dtype)
        self.z_PNL = torch.cat([z_NL[None], total_PNCL[:, :, -1]]).cumsum(0)  # before each chunk, and at the end
        total_PNCL.add_(self.z_PNL[:-1, :, None])
        q_PNCL = torch.div(group.rows(p_NTL), total_PNCL, out=torch.empty_like(total_PNCL))
        self.e_MCL, self.total_MCL, self.q_MCL = (x.flatten(0, 1) for x in (e_PNCL, total_PNCL, q_PNCL))

    def forward(self, v_MCV: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, and log-normalisers and means before each chunk from `first` on and after the group."""
        e_MCL, q_MCL, z_PNL = self.e_MCL, self.q_MCL, self.z_PNL
        sums_PNLV = v_MCV.new_empty(len(z_PNL), *self.s.shape)  # before each chunk, and at the end
        torch.mul(self.s, z_PNL[0, ..., None], out=sums_PNLV[0])
        sums_MLV = sums_PNLV[:-1].flatten(0, 1)
        if self.s.shape[1] == 1:
            out_MCV = (e_MCL * v_MCV).cumsum_(1)
            propagate(sums_PNLV.unbind(), out_MCV[:, -1:], None)
            out_MCV.add_(sums_MLV).mul_(q_MCL)
        else:
            propagate(sums_PNLV.unbind(), torch.bmm(e_MCL.mT, v_MCV), None)
            out_MCV = torch.bmm(torch.bmm(q_MCL, e_MCL.mT).tril_(), v_MCV).baddbmm_(q_MCL, sums_MLV)
        a_PNL = z_PNL[first:].to(self.a.dtype).log().add_(self.reference_NL)
        s_PNLV = sums_PNLV[first:].div_(z_PNL[first:, ..., None])
        if first == 0:
            a_PNL[0], s_PNLV[0] = self.a, self.s  # z may be zero before the first token
        return out_MCV, a_PNL, s_PNLV

    def backward(self, do_MCV: Tensor, v_MCV: Tensor, s_PNLV: Tensor, r_NLV: Tensor, u_NL: Tensor) -> ChunkGradients:
        """Return the gradients, given the means before each chunk, and `r` and `u` of the state after the group."""
        e_MCL, q_MCL, total_MCL, z_PNL = self.e_MCL, self.q_MCL, self.total_MCL, self.z_PNL
        sums_MLV = (s_PNLV * z_PNL[:-1, ..., None]).flatten(0, 1)
        r_PNLV = v_MCV.new_empty(len(z_PNL), *r_NLV.shape)
        torch.div(r_NLV, z_PNL[-1, ..., None], out=r_PNLV[-1])
        r_MLV = r_PNLV[1:].flatten(0, 1)
        if r_NLV.shape[1] == 1:
            # At most two tensors as large as v exist at a time: they determine peak memory.
            dp_MCL = (e_MCL * v_MCV).cumsum_(1).add_(sums_MLV).mul_(do_MCV).sum(-1, keepdim=True)
            # Sums over later rows start from the end: a total minus a prefix would cancel.
            dx_MCV = do_MCV.flip(1).mul_(q_MCL.flip(1)).cumsum_(1).flip(1)
            propagate(r_PNLV.unbind()[::-1], dx_MCV[:, :1], None, back=True)
            dx_MCV.add_(r_MLV)
            de_MCL = (dx_MCV * v_MCV).sum(-1, keepdim=True)
            dv_MCV = dx_MCV.mul_(e_MCL)
        else:
            propagate(r_PNLV.unbind()[::-1], torch.bmm(q_MCL.mT, do_MCV), None, back=True)
            grad_MCC = torch.bmm(do_MCV, v_MCV.mT).tril_()
            scores_MCC = torch.bmm(q_MCL, e_MCL.mT).tril_()
            dv_MCV = torch.bmm(scores_MCC.mT, do_MCV).baddbmm_(e_MCL, r_MLV)
            dp_MCL = torch.bmm(grad_MCC, e_MCL).baddbmm_(do_MCV, sums_MLV.mT)
            de_MCL = torch.bmm(grad_MCC.mT, q_MCL).baddbmm_(v_MCV, r_MLV.mT)
        dp_MCL.div_(total_MCL)
        # The normaliser's gradient from later rows.
        taken_MCL = (q_MCL * dp_MCL).flip(1).cumsum_(1).flip(1)
        chunks_PNL = taken_MCL[:, 0].view(self.group.chunks, *u_NL.shape)
        later_PNL = torch.cat([(u_NL / z_PNL[-1])[None], chunks_PNL.flip(0)]).cumsum(0).flip(0)
        taken_MCL.add_(later_PNL[1:].flatten(0, 1)[:, None])
        dk_MCL = de_MCL.sub_(taken_MCL).mul_(e_MCL)
        r_NLV = r_PNLV[0] * z_PNL[0, ..., None]
        return ChunkGradients(dp_MCL, dk_MCL, dv_MCV, r_NLV, later_PNL[0] * z_PNL[0])


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

    Saved states have the shape `[chunks, N, L (, V)]`. A token adds `own` times its own value to its output.
    """
    (N, T, L), V = k_NTL.shape, v_NTV.shape[-1]
    out_NTV = empty(v_NTV, N, T, V)
    kept = -(-T // chunk) if save else 0
    normalisers, means = a_NL.new_empty(kept, N, L), empty(s_NLV, kept, N, L, V)
    on_cpu = v_NTV.device.type == "cpu"  # elsewhere the test of the logits would wait for the device
    for group in _softmax_groups(k_NTL, v_NTV, chunk):
        v_MCV = group.gather(v_NTV)
        if on_cpu:
            softmax = _GroupSoftmax(group, p_NTL, k_NTL, a_NL, s_NLV)
            unsafe_NT = softmax.unsafe_NT
            out_MCV, a_PNL, s_PNLV = softmax.forward(v_MCV, 0 if save or unsafe_NT is not None else -1)
        else:  # a group is one chunk
            unsafe_NT, span = None, slice(group.start, group.stop)
            out_MCV, *after = safe_forward(p_NTL[:, span], k_NTL[:, span], v_MCV, a_NL, s_NLV)
            a_PNL, s_PNLV = (torch.stack(states) for states in zip((a_NL, s_NLV), after, strict=True))
        if own_NT1 is not None:
            out_MCV.addcmul_(group.gather(own_NT1), v_MCV)
        group.scatter(out_MCV, out_NTV)
        if unsafe_NT is not None:
            _replace_unsafe(group, unsafe_NT, out_NTV, (p_NTL, k_NTL, v_NTV), own_NT1, a_PNL, s_PNLV)
        if save:
            normalisers[group.places], means[group.places] = a_PNL[:-1], s_PNLV[:-1]
        a_NL, s_NLV = a_PNL[-1], s_PNLV[-1]
    # An operator may not return its own input, nor a view that keeps a group's states.
    return out_NTV, a_NL.clone(), s_NLV.clone(), normalisers, means


def _softmax_groups(k_NTL: Tensor, v_NTV: Tensor, chunk: int) -> list[ChunkGroup]:
    # Without matrix products several chunks in one call gain nothing, and rows of a single chunk need no copy.
    if k_NTL.shape[-1] == 1 or k_NTL.device.type != "cpu":
        return [ChunkGroup(p.start, p.stop, 1, p.stop - p.start, n) for n, p in enumerate(spans(k_NTL.shape[1], chunk))]
    return chunk_groups(k_NTL, chunk, max(chunk, k_NTL.shape[-1], v_NTV.shape[-1]))


def _replace_unsafe(
    group: ChunkGroup,
    unsafe_NT: Tensor,
    out_NTV: Tensor,
    pkv: tuple[Tensor, ...],
    own_NT1: Tensor | None,
    a_PNL: Tensor,
    s_PNLV: Tensor,
) -> None:
    """Compute unsafe rows, and the states after a chunk with such rows, in the safe form.

    This is done for all heads: the shapes, and so the bits of a head, must not depend on other heads' logits.
    """
    begun = False
    for n, span in enumerate(group.spans()):
        unsafe_NC = unsafe_NT[:, n * group.size : (n + 1) * group.size]
        begun = begun or bool(unsafe_NC.any())
        if not begun:
            continue
        p, k, v = (x[:, span] for x in pkv)
        out_NCV, a_NL, s_NLV = safe_forward(p, k, v, a_PNL[n], s_PNLV[n])
        if own_NT1 is not None:
            out_NCV = torch.addcmul(out_NCV, own_NT1[:, span], v)
        out_NTV[:, span] = torch.where(unsafe_NC[..., None], out_NCV, out_NTV[:, span])
        a_PNL[n + 1] = torch.where(unsafe_NC[:, -1:], a_NL, a_PNL[n + 1])
        s_PNLV[n + 1] = torch.where(unsafe_NC[:, -1:, None], s_NLV, s_PNLV[n + 1])


@running_softmax_op.register_fake
def _(p, k, v, own, a, s, chunk, save):  # type: ignore[no-untyped-def]
    kept = -(-k.shape[1] // chunk) if save else 0  # holds for symbolic sizes too
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
    dp_NTL, dk_NTL, dv_NTV = (empty_like(x) for x in (p_NTL, k_NTL, v_NTV))
    down_NT1 = v_NTV.new_empty(0 if own_NT1 is None else own_NT1.shape)
    r_NLV = torch.zeros_like(end_NLV) if grad_s_NLV is None else grad_s_NLV
    u_NL = (end_NLV * r_NLV).sum(-1)
    if grad_a_NL is not None:
        u_NL = u_NL - grad_a_NL.to(u_NL.dtype)
    on_cpu = v_NTV.device.type == "cpu"
    for group in reversed(_softmax_groups(k_NTL, v_NTV, chunk)):
        a_PNL, s_PNLV = normalisers[group.places], means[group.places]
        after, unsafe_N = (r_NLV, u_NL), torch.ones_like(u_NL[:, 0], dtype=torch.bool)
        if on_cpu:
            softmax = _GroupSoftmax(group, p_NTL, k_NTL, a_PNL[0], s_PNLV[0])
            do_MCV, v_MCV = group.gather(grad_NTV), group.gather(v_NTV)
            gradients = softmax.backward(do_MCV, v_MCV, s_PNLV, *after)
            if own_NT1 is not None:
                gradients.v.addcmul_(group.gather(own_NT1), do_MCV)
                group.scatter((do_MCV * v_MCV).sum(-1, keepdim=True), down_NT1)
            group.scatter(gradients.p, dp_NTL)
            group.scatter(gradients.k, dk_NTL)
            group.scatter(gradients.v, dv_NTV)
            r_NLV, u_NL = gradients.r, gradients.u
            del gradients  # before the next group's are made
            unsafe_N = unsafe_N & False if softmax.unsafe_NT is None else softmax.unsafe_NT[:, -1]
        if not on_cpu or unsafe_N.any():
            # For a head's whole group, since R and U sum over its rows: a gradient's bits may depend on later tokens.
            for span, a_NL, s_NLV in zip(reversed(group.spans()), a_PNL.flip(0), s_PNLV.flip(0), strict=True):
                do, p, k, v = (x[:, span] for x in (grad_NTV, p_NTL, k_NTL, v_NTV))
                gradients = safe_backward(do, p, k, v, a_NL, s_NLV, *after)
                if own_NT1 is not None:
                    gradients = gradients._replace(v=torch.addcmul(gradients.v, own_NT1[:, span], do))
                    down_NT1[:, span] = (do * v).sum(-1, keepdim=True)
                for x, target in zip(gradients, (dp_NTL, dk_NTL, dv_NTV), strict=False):
                    target[:, span] = torch.where(unsafe_N[:, None, None], x, target[:, span])
                after = gradients.r, gradients.u
            r_NLV = torch.where(unsafe_N[:, None, None], after[0], r_NLV)
            u_NL = torch.where(unsafe_N[:, None], after[1], u_NL)
    start_NLV = means[0] if len(means) else end_NLV
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


@without_tangents
def _backward(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    p, k, v, own, end, normalisers, means = ctx.saved_tensors
    grad_a, grad_s, *_ = rest
    grad = torch.zeros_like(v) if grad is None else grad
    dp, dk, dv, down, *state = running_softmax_backward_op(
        grad, grad_a, grad_s, p, k, v, own, end, normalisers, means, ctx.chunk
    )
    return dp, dk, dv, None if own is None else down, *state, None, None


running_softmax_op.register_autograd(_backward, setup_context=_setup_context)
