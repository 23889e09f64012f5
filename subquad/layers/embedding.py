"""From tokens to vectors. Shape letters: B batch, T tokens, D model width, V vocabulary."""

from __future__ import annotations

from torch import Tensor, nn

from subquad.layers.positions import Learned, Sinusoidal


class Embedding(nn.Module):
    """`dropout(E[token] + position)`; `position` is None where positions enter elsewhere or not at all."""

    def __init__(
        self, vocab_size: int, dim: int, *, position: Sinusoidal | Learned | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.position = position
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens_BT: Tensor, start: int | Tensor = 0, lengths_B: Tensor | None = None) -> Tensor:
        """Vectors `[B, T, D]` of tokens whose first stands at position `start` (an int, or a tensor `[B]`).

        Row b has `lengths_B[b]` real tokens, then padding (None: T).
        """
        x_BTD = self.tokens(tokens_BT)
        if self.position is not None:
            x_BTD = self.position(x_BTD, start, lengths_B)
        return self.dropout(x_BTD)
