"""ELiTA's lookup over the logits, and a loss that never holds the logits of all tokens.

Shape letters: N tokens, D model width, V vocabulary, R rows of the lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from subquad.ops import loss


class Lookup(nn.Module):
    """`z = l + down(silu(up(l)))` for logits `l` `[.., V]`: ELiTA's lookup over the logits of a tied head.

    Each of the R = `rows` hidden channels is a situation in which the logits are corrected. ELiTA's author uses 5000
    logits and 8192 rows and doesn't say whether the logits themselves are added; `residual=False` leaves them out.
    There are no biases, so the zero logits of padding stay zero. Source: A. C. O. Sharma, "Efficient Linear-Time
    Attention Transformers", 2023 (github.com/acosharma/elita-transformer), Other Methods.
    """

    def __init__(self, vocab_size: int, rows: int, *, residual: bool = True) -> None:
        super().__init__()
        self.residual = residual
        self.up = nn.Linear(vocab_size, rows, bias=False)
        self.down = nn.Linear(rows, vocab_size, bias=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Map `[.., V]` to `[.., V]`."""
        corrected = self.down(F.silu(self.up(logits)))
        return logits + corrected if self.residual else corrected


def chunked_cross_entropy(
    logits_of: Callable[[Tensor], Tensor],
    h_ND: Tensor,
    labels_N: Tensor,
    /,
    *,
    width: int,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """`-log softmax(logits_of(h))[label]`, in nats, for a head that is more than one matrix.

    `logits_of` maps `[n, D]` to `[n, V]`. It runs on chunks of tokens, so that its widest tensor, of `width` channels,
    has at most `subquad.ops.loss.CHUNK_ENTRIES` entries (but at least one token); the backward pass computes each
    chunk again. Reductions and labels are as in `subquad.ops.loss.linear_cross_entropy`. Raises `ValueError` for an
    invalid shape, width or reduction.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1 (channels of the widest tensor in logits_of), got {width}")
    if h_ND.ndim != 2 or labels_N.shape != h_ND.shape[:1]:
        raise ValueError(f"h [N, D] and labels [N] must agree, got {tuple(h_ND.shape)} and {tuple(labels_N.shape)}")
    loss.check_reduction(reduction)

    def nats(h_nD: Tensor, labels_n: Tensor) -> Tensor:
        logits_nV = logits_of(h_nD)
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        return F.cross_entropy(logits_nV, labels_n, ignore_index=ignore_index, reduction="none")

    labels_N = labels_N.long()
    rows = max(1, loss.CHUNK_ENTRIES // width)
    if h_ND.shape[0] <= rows:
        loss_N = nats(h_ND, labels_N)
    else:
        pairs = zip(h_ND.split(rows), labels_N.split(rows), strict=True)
        loss_N = torch.cat([checkpoint(nats, *pair, use_reentrant=False) for pair in pairs])
    return loss.reduced(loss_N, labels_N, ignore_index, reduction)
