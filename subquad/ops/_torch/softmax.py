"""Causal Latte's recurrence in chunks, with a hand-written backward: memory linear in T, one state a chunk.

Let r be the log-normaliser of all tokens before the chunk (of its first token where there is none), E_j = exp(k_j - r)
and Z_i = 1 + sum_{j <= i} E_j. Then token j weighs E_j / Z_i for row i: a chunk is linear attention with the queries
p_i / Z_i and the inputs E_j, a handful of matrix products. That needs k_j - r <= LIMIT, or E would overflow. Rows from
the first on that sees a larger logit are computed once more, in the form of `softmax_safe`, and the state after them
too: so no row's bits depend on later tokens.

Shape letters: N batch times heads, T tokens, L latents, V value channels, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.ops._torch import softmax_latents, softmax_mean, softmax_safe
from subquad.ops._torch.memory import empty, empty_like
from subquad.ops._torch.softmax_safe import EMPTY, ChunkGradients
from subquad.ops.backends import without_autocast

CHUNK = 64
MEAN_CHUNK = 256
"""Tokens a chunk, of several latents and of one."""
LIMIT = 40.0
"""Rows whose logits exceed the reference by more take the safe form: exp(40) leaves products room in float32."""


def chunk_size(latents: int) -> int:
    """Tokens a chunk by default."""
    return MEAN_CHUNK if latents == 1 else CHUNK


def spans(tokens: int, chunk: int) -> list[slice]:
    """The chunks; the last one may be shorter."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


class _Chunk:
    """p, k and v of one chunk, and the state before it: the log-normaliser a (float64) and the mean s."""

    def __init__(self, p_NCL: Tensor, k_NCL: Tensor, v_NCV: Tensor, a_NL: Tensor, s_NLV: Tensor) -> None:
        self.p, self.k, self.v, self.a, self.s = p_NCL, k_NCL, v_NCV, a_NL, s_NLV
        first_NL = k_NCL[:, 0].clamp(min=EMPTY)
        self.reference_NL = torch.where(a_NL <= EMPTY, first_NL, a_NL.to(k_NCL.dtype))
        self.z_NL = (a_NL - self.reference_NL).exp().to(k_NCL.dtype)
        self.late_NC: Tensor | None = None
        self.x_NCL = k_NCL - self.reference_NL[:, None]
        if self.x_NCL.numel() and not self.x_NCL.amax() <= LIMIT:
            self.late_NC = ~(self.x_NCL.amax(-1).cummax(1).values <= LIMIT)
            self.x_NCL.clamp_(max=LIMIT)

    @property
    def form(self) -> Any:
        """The matrix products of this chunk: of one latent they are cheaper."""
        return softmax_mean if self.k.shape[-1] == 1 else softmax_latents

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, and the log-normaliser and mean after the chunk."""
        e_NCL = self.x_NCL.exp_()
        out_NCV, end_NL, sum_NLV = self.form.forward(self.p, e_NCL, self.v, self.z_NL, self.s)
        a_NL = self.reference_NL.to(self.a.dtype) + end_NL.to(self.a.dtype).log()
        s_NLV = sum_NLV.div_(end_NL[..., None])
        if self.late_NC is not None:
            # For all heads: shapes, and with them the bits of one head, must not depend on other heads' logits.
            safe = softmax_safe.forward(self.p, self.k, self.v, self.a, self.s)
            last_N1 = self.late_NC[:, -1:]
            out_NCV = torch.where(self.late_NC[..., None], safe[0], out_NCV)
            a_NL, s_NLV = torch.where(last_N1, safe[1], a_NL), torch.where(last_N1[..., None], safe[2], s_NLV)
        return out_NCV, a_NL, s_NLV

    def backward(self, do_NCV: Tensor, r_NLV: Tensor, u_NL: Tensor) -> ChunkGradients:
        """Gradients, given `r`, that of the mean after the chunk, and `u`, that of minus its log-normaliser."""
        e_NCL = self.x_NCL.exp_()
        gradients = self.form.backward(do_NCV, self.p, e_NCL, self.v, self.z_NL, self.s, r_NLV, u_NL)
        if self.late_NC is not None:
            safe = softmax_safe.backward(do_NCV, self.p, self.k, self.v, self.a, self.s, r_NLV, u_NL)
            last_N = self.late_NC[:, -1]
            late = (last_N.view(-1, *(1,) * (x.ndim - 1)) for x in gradients)
            gradients = ChunkGradients(*(torch.where(*chosen) for chosen in zip(late, safe, gradients, strict=True)))
        return gradients


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
    """Outputs; the last log-normaliser (float64) and mean; if `save`, those before each chunk `[chunks, N, L (, V)]`.

    Of its own value a token adds `own` times.
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
        safe = v_NTV.device.type != "cpu"  # elsewhere each look at the logits would wait for the device
        out_NCV, a_NL, s_NLV = softmax_safe.forward(*part) if safe else _Chunk(*part).forward()
        if own_NT1 is not None:
            out_NCV.addcmul_(own_NT1[:, span], v_NTV[:, span])
        out_NTV[:, span] = out_NCV
    if not parts:  # an operation may not return its own input
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
    """Gradients of p, k, v, own (empty if none) and of the initial log-normaliser and mean.

    `r` is the gradient of the mean after a chunk, `u` that of minus its log-normaliser with the sum of values held.
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
            gradients = softmax_safe.backward(do, p, k, v, a_NL, s_NLV, r_NLV, u_NL)
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
