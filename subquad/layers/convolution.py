"""Short causal convolutions, which gated and delta recurrences apply to queries, keys and values.

Shape letters: B batch, T tokens, C channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Module):
    """`y_tc = sum_j w_cj x_{t - W + 1 + j, c}`: a filter of each channel over a token and the W - 1 before it.

    The taps are added one by one, in the same order for each token: where a sequence is cut changes no bit.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"a convolution's width must be at least 1, got {width}")
        self.width = width
        bound = width**-0.5  # as torch initialises a convolution with one input channel
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x_BTC: Tensor, before_BSC: Tensor | None = None) -> Tensor:
        """Return the filtered tokens; `before` holds at most W - 1 earlier ones, and zeros stand for any others."""
        x, T = self.extended(x_BTC, before_BSC), x_BTC.shape[1]
        weight_WC = self.weight.t().contiguous()
        y_BTC = x[:, :T] * weight_WC[0]
        for tap in range(1, self.width):
            y_BTC = y_BTC.addcmul_(
                x[:, tap : tap + T], weight_WC[tap]
            )  # in place: tokens are read from memory once less
        return y_BTC if self.bias is None else y_BTC + self.bias

    def extended(self, x_BTC: Tensor, before_BSC: Tensor | None) -> Tensor:
        """Return the tokens after the W - 1 before them."""
        have = 0 if before_BSC is None else before_BSC.shape[1]
        x = x_BTC if before_BSC is None else torch.cat([before_BSC.to(x_BTC.dtype), x_BTC], 1)
        return F.pad(x, (0, 0, self.width - 1 - have, 0))

    def last(self, x_BTC: Tensor, before_BSC: Tensor | None, lengths_B: Tensor | None) -> Tensor:
        """Return the last W - 1 tokens, of which the first `lengths_B` of a row are real (None: all)."""
        x, T = self.extended(x_BTC, before_BSC), x_BTC.shape[1]
        if lengths_B is None:
            return x[:, T:].clone()
        places_BW = lengths_B[:, None] + torch.arange(self.width - 1, device=x.device)
        return x.gather(1, places_BW[..., None].expand(-1, -1, x.shape[2]))
