"""The loss of the next token, a component of language models: cross-entropy on chunks of tokens.

Shape letters: B batch, T tokens, N = B T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from subquad.layers.attached import attached
from subquad.layers.head import Lookup, logits_of
from subquad.ops import loss
from subquad.ops.precision import at_least_float32

logger = logging.getLogger(__name__)
Reduction = Literal["mean", "sum", "none"]
IGNORED = -100


class CrossEntropy(nn.Module):
    """`-log p(label)` in nats, of the vectors that a model's last block returns; in training with `terms` added.

    A model's is its attribute `criterion`. A loss that needs all logits of a token is no term: it overrides `forward`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terms: tuple[loss.Term, ...] = ()

    def forward(
        self,
        passes: list[Tensor],
        labels_BT: Tensor,
        head: nn.Module,
        lookup: Lookup | None,
        vocab_size: int,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Return the loss of `labels`, the mean over the `passes`, each `[B, T, D]` or its last tokens.

        The label -100 does not count; rows of the head beyond `vocab_size` predict nothing. The head is called on
        chunks of tokens. Only a plain linear head, with nothing attached, is read: its loss sums the gradient of the
        weights in float32 (`subquad.ops.loss.linear_cross_entropy`).
        """
        losses: list[Tensor] = []
        for h_BTD in passes:
            ours_BT = labels_BT[:, labels_BT.shape[1] - h_BTD.shape[1] :]
            h_ND, labels_N = h_BTD.flatten(0, 1), ours_BT.flatten()
            more: dict[str, Any] = {"reduction": reduction, "terms": self.terms if self.training else ()}
            if lookup is None and (read := _read(head)) is not None:
                weight_VD, bias_V = read
                weight_VD = weight_VD if len(weight_VD) == vocab_size else weight_VD[:vocab_size]
                found = loss.linear_cross_entropy(h_ND, weight_VD, labels_N, bias=bias_V, ignore_index=IGNORED, **more)
            else:
                width = vocab_size if lookup is None else lookup.width

                def called(h_nD: Tensor) -> Tensor:
                    return logits_of(h_nD, head, lookup)[..., :vocab_size]

                found = chunked_cross_entropy(called, h_ND, labels_N, width=width, **more)
            losses.append(found.view(ours_BT.shape) if reduction == "none" else found)
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean(0)


def _read(head: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Return the weights of a plain linear head with nothing attached; else None, and log why."""
    if type(head) is not nn.Linear:
        what: str | None = f"the head is a {type(head).__name__}"
    elif (what := attached(head)) is None:
        if type(head.weight) is nn.Parameter and type(head.bias) in (nn.Parameter, type(None)):
            return head.weight, head.bias
        what = f"its weight is a {type(head.weight).__name__}"
    if not torch.compiler.is_compiling():
        log_called(what)
    return None


@functools.cache
def log_called(what: str) -> None:
    """Log once why the loss calls the head."""
    logger.info("the loss calls the head on chunks of tokens, and does not read its weights: %s", what)


def chunked_cross_entropy(
    logits_of: Callable[[Tensor], Tensor],
    h_ND: Tensor,
    labels_N: Tensor,
    /,
    *,
    width: int,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
    terms: tuple[loss.Term, ...] = (),
) -> Tensor:
    """`-log softmax(logits_of(h))[label]`, in nats, for a head that is more than one matrix.

    `logits_of` maps `[n, D]` to `[n, V]`. It runs on chunks of tokens, so that its widest tensor, of `width` channels,
    has at most `subquad.ops.loss.CHUNK_ENTRIES` entries (but at least one token); the backward pass computes each
    chunk again. Reductions, labels and `terms` are as in `subquad.ops.loss.linear_cross_entropy`. Raises
    `ValueError` for an invalid shape, width or reduction, and `TypeError` for labels that are not whole numbers.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1 (channels of the widest tensor in logits_of), got {width}")
    if h_ND.ndim != 2 or labels_N.shape != h_ND.shape[:1]:
        raise ValueError(f"h [N, D] and labels [N] must agree, got {tuple(h_ND.shape)} and {tuple(labels_N.shape)}")
    loss.check_reduction(reduction)

    def nats(h_nD: Tensor, labels_n: Tensor) -> Tensor:
        logits_nV = logits_of(h_nD)
        logits_nV = at_least_float32(logits_nV)
        nll_n = F.cross_entropy(logits_nV, labels_n, ignore_index=ignore_index, reduction="none")
        lse_n = logits_nV.logsumexp(-1) if terms else nll_n
        return loss.losses_of(nll_n, lse_n, labels_n, ignore_index, terms)

    labels_N = loss.whole_labels(labels_N)
    rows = max(1, loss.CHUNK_ENTRIES // width)
    if h_ND.shape[0] <= rows:
        loss_N = nats(h_ND, labels_N)
    else:
        pairs = zip(h_ND.split(rows), labels_N.split(rows), strict=True)
        loss_N = torch.cat([checkpoint(nats, *pair, use_reentrant=False) for pair in pairs])
    return loss.reduced(loss_N, labels_N, ignore_index, reduction)
