"""Short causal convolutions, which gated and delta recurrences apply to queries, keys and values.

Shape letters: B batch, T tokens, C channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """`y_tc = sum_j w_cj x_{t - W + 1 + j, c}`: a filter of each channel over a token and the W - 1 before it.

    The taps are added one by one, in the same order for each token, so that cutting a sequence changes no bit.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"a convolution's width must be at least 1, got {width}")
        self.width = width
        bound = width**-0.5  # as torch initialises a convolution with one input channel
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Return the filtered tokens `[B, T, C]` of `[B, W - 1 + T, C]`, the W - 1 tokens before them first."""
        weight_WC, T = self.weight.t().contiguous(), x_BSC.shape[1] - self.width + 1
        y_BTC = x_BSC[:, :T] * weight_WC[0]
        for tap in range(1, self.width):
            # In place, which saves one read of the tokens from memory.
            y_BTC = y_BTC.addcmul_(x_BSC[:, tap : tap + T], weight_WC[tap])
        return y_BTC if self.bias is None else y_BTC + self.bias
