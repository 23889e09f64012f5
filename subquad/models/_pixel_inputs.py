"""From pixels to vectors: the pixel before, those near by, and where the pixel to predict stands.

Shape letters: B batch, T tokens, D model width, R tokens before them, K places near by, H rows, W columns, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from subquad.layers.positions import Learned, Sinusoidal, positions
from subquad.models.image_config import LEVELS, ImageModelConfig


class PixelInputs(nn.Module):
    """`dropout(E[token] + position + convolution of the pixels near by)`: the input that token p's pixel follows from.

    Token p, which is the pixel before p (the start for p = 0), stands where pixel p does: its position is p, and what
    is near is near to pixel p.
    """

    def __init__(self, config: ImageModelConfig) -> None:
        super().__init__()
        self.shape = config.shape
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.position: Sinusoidal | Learned | None = None
        if config.position == "sinusoidal":
            self.position = Sinusoidal(config.dim, scale=config.init_std * math.sqrt(2))
        elif config.position == "learned":
            self.position = Learned(config.dim, config.tokens)
        self.axes = nn.ModuleList(nn.Embedding(size, config.dim) for size in config.shape if config.axes and size > 1)
        self.near: nn.Linear | None = None
        self.places: list[tuple[int, int, int]] = []
        if config.near:
            self.places = _places(config.near, config.channels)
            self.near = nn.Linear(len(self.places), config.dim, bias=False)
        self.before = max([0, *(self._distance(*place) + config.channels - 1 for place in self.places)])
        """Tokens before the first whose pixels are needed."""
        self._near: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BT: Tensor, start: int, recent_BR: Tensor | None) -> Tensor:
        """Vectors `[B, T, D]` of the tokens from `start` on; `recent` are the `before` tokens in front of them."""
        x_BTD = self.tokens(tokens_BT)
        if self.position is not None:
            x_BTD = self.position(x_BTD, start)
        T = tokens_BT.shape[1]
        p_T = positions(start, T, tokens_BT.device)[0]
        axes = iter(self.axes)
        for size, place_T in zip(self.shape, self._split(p_T), strict=True):
            if self.axes and size > 1:
                x_BTD = x_BTD + next(axes)(place_T)
        if self.near is not None:
            assert recent_BR is not None
            x_BTD = x_BTD + self.near(self._values(torch.cat((recent_BR, tokens_BT), 1), start).to(x_BTD.dtype))
        return self.dropout(x_BTD)

    def recent(self, tokens_BT: Tensor, recent_BR: Tensor | None) -> Tensor:
        """The last `before` tokens, the start in place of those that no image has."""
        if recent_BR is None:
            recent_BR = tokens_BT.new_full((tokens_BT.shape[0], self.before), LEVELS)
        return torch.cat((recent_BR, tokens_BT), 1)[:, tokens_BT.shape[1] :]

    def _split(self, p_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and channel of the pixels p."""
        _, width, channels = self.shape
        pixel_T = p_T // channels
        return pixel_T // width, pixel_T % width, p_T % channels

    def _distance(self, row: int, column: int, channel: int) -> int:
        """Tokens from that channel of the pixel so many rows and columns away (negative: up, left) to channel 0."""
        _, width, channels = self.shape
        return -((row * width + column) * channels + channel)

    def _values(self, tokens_BS: Tensor, start: int) -> Tensor:
        """`[B, T, K]`: (level + 1) / 256 of each place near pixel p, 0 outside of the image and from pixel p on."""
        q_TK, known_TK = (
            table[start : start + tokens_BS.shape[1] - self.before] for table in self._tables(tokens_BS.device)
        )
        # Pixel q is token q + 1, and the first of `tokens` is token start - before.
        index_TK = torch.where(known_TK, q_TK + 1 - start + self.before, 0)
        return (tokens_BS[:, index_TK] + 1) / LEVELS * known_TK

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """For every pixel of the image, which pixels are near it, `[H W C, K]`, and whether they are known there."""
        if device not in self._near:
            height, width, channels = self.shape
            p_T = torch.arange(height * width * channels, device=device)
            place_K3 = torch.tensor(self.places, device=device)
            row_T, column_T, _ = self._split(p_T)
            row_TK = row_T[:, None] + place_K3[:, 0]
            column_TK = column_T[:, None] + place_K3[:, 1]
            q_TK = (row_TK * width + column_TK) * channels + place_K3[:, 2]
            known_TK = (row_TK >= 0) & (column_TK >= 0) & (column_TK < width) & (q_TK < p_T[:, None])
            self._near[device] = q_TK, known_TK
        return self._near[device]


def _places(near: int, channels: int) -> list[tuple[int, int, int]]:
    """Rows and columns away, and channel, of what can be known near a pixel, that pixel's own channels included."""
    above = [(row, column) for row in range(-near, 0) for column in range(-near, near + 1)]
    beside = [(0, column) for column in range(-near, 0)]
    every = [(row, column, channel) for row, column in above + beside for channel in range(channels)]
    return every + [(0, 0, channel) for channel in range(channels - 1)]
