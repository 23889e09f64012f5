"""The head over the vocabulary, and ELiTA's lookup over its logits.

Shape letters: D model width, V vocabulary, R rows of the lookup.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def new_head(dim: int, vocab_size: int, *, bias: bool, table: nn.Embedding | None) -> nn.Linear:
    """Return the linear map `h W^T + b` to the vocabulary; with a `table` of tokens, W is its weights."""
    if table is None:
        head = nn.Linear(dim, vocab_size, bias=False)
    else:
        with torch.device("meta"):  # no random numbers, and no memory for weights that are not used
            head = nn.Linear(dim, vocab_size, bias=False)
        head.weight = table.weight
    if bias:
        head.bias = nn.Parameter(torch.zeros(vocab_size))
    return head


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
        self.width = max(vocab_size, rows)
        self.up = nn.Linear(vocab_size, rows, bias=False)
        self.down = nn.Linear(rows, vocab_size, bias=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Map `[.., V]` to `[.., V]`."""
        corrected = self.down(F.silu(self.up(logits)))
        return logits + corrected if self.residual else corrected


def logits_of(h: Tensor, head: nn.Module, lookup: nn.Module | None) -> Tensor:
    """Return the logits `[.., V]` of vectors `[.., D]`, by calls of the head and the lookup after it."""
    logits: Tensor = head(h)
    return logits if lookup is None else lookup(logits)


def is_tied(head: nn.Module | None, table: nn.Module) -> bool:
    """Return whether a head's weights are those of a table of embeddings: one parameter of both."""
    weight = None if head is None else head._parameters.get("weight")
    return weight is not None and weight is table._parameters.get("weight")
