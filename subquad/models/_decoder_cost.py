"""What a decoder's cost is counted from, beside its mechanisms'."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from subquad.attention._activations import activation_bytes

if TYPE_CHECKING:
    from subquad.models.decoder import Decoder


class _Loss(nn.Module):
    """The decoder's loss as a module's output."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.decoder.loss(tokens_BT, tokens_BT)


def kept_in_training(decoder: Decoder, tokens: int) -> int:
    """Return bytes that autograd keeps of the loss of one sequence."""
    return activation_bytes(_Loss(decoder), lambda: torch.zeros(1, tokens, dtype=torch.int64))


def linear_weights(module: nn.Module) -> int:
    """Entries of the matrices in `module`: multiply-adds for one token."""
    return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))
