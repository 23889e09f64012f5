"""Feed-forward networks: the same small network at every token. Shape letters: B batch, T tokens, D model width."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.config import suggest

FEEDFORWARDS = ("gelu", "swiglu")


class GELU(nn.Module):
    """`y = down(gelu(up(x)))`, with `round(mult * D)` hidden channels."""

    def __init__(self, dim: int, *, mult: float = 4.0, bias: bool = False) -> None:
        super().__init__()
        hidden = max(1, round(mult * dim))
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        return self.down(F.gelu(self.up(x_BTD)))


class SwiGLU(nn.Module):
    """`y = down(silu(gate(x)) * up(x))`, with `2/3 * mult * D` hidden channels, to a multiple of 8.

    Three matrices of two thirds of the width have the parameters of GELU's two.
    """

    def __init__(self, dim: int, *, mult: float = 4.0, bias: bool = False) -> None:
        super().__init__()
        hidden = max(8, 8 * round(mult * dim * 2 / 3 / 8))
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def build_feedforward(kind: str, dim: int, *, mult: float = 4.0, bias: bool = False) -> GELU | SwiGLU:
    """The feed-forward network `gelu` or `swiglu` for the model width `dim`."""
    if kind == "gelu":
        return GELU(dim, mult=mult, bias=bias)
    if kind == "swiglu":
        return SwiGLU(dim, mult=mult, bias=bias)
    raise ValueError(f"unknown feed-forward {kind!r}; {suggest(kind, FEEDFORWARDS)}")
