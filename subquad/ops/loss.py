"""Cross-entropy over a large vocabulary without the whole logits.

Shape letters: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops.backends import autocast_enabled
from subquad.ops.precision import at_least_float32, wide_dtype
from subquad.tracing import beyond_backward, without_tangents

Term = Callable[[Tensor, Tensor], Tensor]
"""A term `[N]` of the tokens' losses, from `-log p(label)` and the logsumexp of the logits, each `[N]`."""
CHUNK_ENTRIES = 1 << 22
"""Most logits held at once (16 MiB of float32); with more, tokens are processed in chunks."""


def linear_cross_entropy(
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    /,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    terms: tuple[Term, ...] = (),
) -> Tensor:
    """`-log softmax(W h + b)[label]`, in nats, never holding more than `CHUNK_ENTRIES` logits (at least one row).

    Tokens labelled `ignore_index` do not count; the mean is over the others (zero if there are none). The softmax is
    taken in float32 or wider. Each of the `terms`, `term(-log p, logsumexp of the logits)`, is added to the tokens'
    losses, with its gradient. Raises `ValueError` for mismatched shapes or an unknown reduction, `TypeError` for labels
    that are not whole numbers, and on a CPU `IndexError` for a label outside the vocabulary.
    """
    if h_ND.ndim != 2 or weight_VD.ndim != 2 or h_ND.shape[1] != weight_VD.shape[1] or labels_N.shape != h_ND.shape[:1]:
        raise ValueError(
            f"h [N, D], weight [V, D] and labels [N] must agree, got {tuple(h_ND.shape)}, {tuple(weight_VD.shape)} "
            f"and {tuple(labels_N.shape)}"
        )
    check_reduction(reduction)
    device = h_ND.device.type
    autocast = autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else torch.promote_types(h_ND.dtype, weight_VD.dtype)
    h_ND, weight_VD, labels_N = h_ND.to(dtype), weight_VD.to(dtype), whole_labels(labels_N)
    bias = None if bias is None else bias.to(dtype)
    if h_ND.shape[0] * weight_VD.shape[0] <= CHUNK_ENTRIES or beyond_backward(h_ND, weight_VD, bias):
        logits_NV = F.linear(h_ND, weight_VD, bias)
        logits_NV = at_least_float32(logits_NV)
        nll_N = F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction="none")
        lse_N = logits_NV.logsumexp(-1) if terms else nll_N
    else:
        nll_N, lse_N = _loss(h_ND, weight_VD, labels_N, bias, ignore_index)
    return reduced(losses_of(nll_N, lse_N, labels_N, ignore_index, terms), labels_N, ignore_index, reduction)


def losses_of(nll_N: Tensor, lse_N: Tensor, labels_N: Tensor, ignore_index: int, terms: tuple[Term, ...]) -> Tensor:
    """Return the loss of each token, with the `terms`; zero for those that do not count."""
    if not terms:
        return nll_N
    return torch.where(labels_N != ignore_index, sum((term(nll_N, lse_N) for term in terms), nll_N), 0.0)


def whole_labels(labels: Tensor) -> Tensor:
    """Return labels as int64; raise `TypeError` unless they are whole numbers."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels must be whole numbers, the indices of tokens or classes (torch.long), got {labels.dtype}"
        )
    return labels.long()


def check_reduction(reduction: str) -> None:
    """Raise `ValueError` for an unknown reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"unknown reduction {reduction!r}; valid: mean, none, sum")


def reduced(loss_N: Tensor, labels_N: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return the losses, their sum, or their mean over the tokens that count."""
    if reduction == "none":
        return loss_N
    return loss_N.sum() if reduction == "sum" else loss_N.sum() / (labels_N != ignore_index).sum().clamp(min=1)


@torch.library.custom_op("subquad::linear_cross_entropy", mutates_args=())
def _loss(
    h_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, bias: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(h_ND)
    loss_N, lse_N = (torch.empty(labels_N.shape, dtype=wide, device=h_ND.device) for _ in range(2))
    for rows in _chunks(h_ND, weight_VD):
        logits = F.linear(h_ND[rows], weight_VD, bias).to(wide)
        loss_N[rows] = F.cross_entropy(logits, labels_N[rows], ignore_index=ignore_index, reduction="none")
        lse_N[rows] = logits.logsumexp(-1)
    return loss_N, lse_N


@_loss.register_fake
def _(h, weight, labels, bias, ignore_index):  # type: ignore[no-untyped-def]
    wide = wide_dtype(h)
    return h.new_empty(labels.shape, dtype=wide), h.new_empty(labels.shape, dtype=wide)


@torch.library.custom_op("subquad::linear_cross_entropy_backward", mutates_args=())
def _loss_backward(
    grad_N: Tensor,
    grad_lse_N: Tensor | None,
    h_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    bias: Tensor | None,
    lse_N: Tensor,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dh_ND = torch.empty_like(h_ND, memory_format=torch.contiguous_format)
    # The gradients of weight and bias are summed over all chunks in float32, even if the weight is not.
    dweight_VD = torch.zeros(weight_VD.shape, dtype=lse_N.dtype, device=h_ND.device)
    dbias_V = dweight_VD.new_zeros(weight_VD.shape[0])
    real_N = labels_N != ignore_index
    grad_N = torch.where(real_N, grad_N, 0.0)
    safe_N = torch.where(real_N, labels_N, 0)
    for rows in _chunks(h_ND, weight_VD):
        # Logits are computed again; d = softmax - onehot(label), from the saved logsumexp.
        logits = F.linear(h_ND[rows], weight_VD, bias).to(lse_N.dtype)
        d = logits.sub_(lse_N[rows, None]).exp_()
        if grad_lse_N is None:
            d.scatter_add_(1, safe_N[rows, None], d.new_full((1, 1), -1.0).expand(d.shape[0], 1))
            d.mul_(grad_N[rows, None])
        else:  # the logsumexp's own is softmax
            d.mul_((grad_N + grad_lse_N)[rows, None])
            d.scatter_add_(1, safe_N[rows, None], -grad_N[rows, None])
        dbias_V += d.sum(0)
        d = d.to(h_ND.dtype)
        dh_ND[rows] = d @ weight_VD
        dweight_VD += d.mT @ h_ND[rows]
    return dh_ND, dweight_VD.to(weight_VD.dtype), dbias_V


@_loss_backward.register_fake
def _(grad, grad_lse, h, weight, labels, bias, lse, ignore_index):  # type: ignore[no-untyped-def]
    return h.new_empty(h.shape), weight.new_empty(weight.shape), lse.new_empty(weight.shape[:1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ignore_index = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.ignore_index = ignore_index
    ctx.set_materialize_grads(False)


@without_tangents
def _backward(ctx: Any, grad_N: Tensor | None, grad_lse_N: Tensor | None) -> tuple[Tensor | None, ...]:
    h, weight, labels, bias, lse = ctx.saved_tensors
    grad_N = torch.zeros_like(lse) if grad_N is None else grad_N
    dh, dweight, dbias = _loss_backward(grad_N, grad_lse_N, h, weight, labels, bias, lse, ctx.ignore_index)
    return dh, dweight, None, None if bias is None else dbias.to(bias.dtype), None


_loss.register_autograd(_backward, setup_context=_setup_context)


def _chunks(h_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ENTRIES // weight_VD.shape[0])
    return [slice(start, start + rows) for start in range(0, h_ND.shape[0], rows)]
