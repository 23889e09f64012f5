"""An MLP for inputs that are not sequences: `logits = W_n relu(... relu(W_1 x + b_1) ...) + b_n`."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Linear layers with biases and ReLU between them: `Mlp(784, 64, 64, 10)` maps `[B, 784]` to `[B, 10]`.

    Raises `ValueError` for fewer than two widths or a width below 1.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ValueError(f"widths must be at least two numbers, each at least 1, got {widths}")
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x_BD: Tensor, /) -> Tensor:
        """Map `[B, D]` to logits `[B, C]`."""
        for layer in self.layers[:-1]:
            x_BD = F.relu(layer(x_BD))
        return self.layers[-1](x_BD)
