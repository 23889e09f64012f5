"""Feed-forward networks, applied to each token alone. Shape letters: B batch, T tokens, D model width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.config import suggest

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}
FEEDFORWARDS = (*ACTIVATIONS, "swiglu", "bilinear")


class Ungated(nn.Module):
    """`y = down(f(up(x)))` with `round(mult * D)` hidden channels, or `hidden` if given. `activation` says what f is:

    * `gelu`: `x Phi(x)`; `gelu_tanh`: GPT-2's `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))` (Hendrycks and Gimpel
      2016, arXiv:1606.08415, section 2);
    * `relu`: `max(0, x)` (Vaswani et al. 2017, arXiv:1706.03762, section 3.3);
    * `relu_squared`: `max(0, x)^2` (So et al. 2021, Primer, arXiv:2109.08668, section 4).
    """

    def __init__(
        self, dim: int, *, activation: str = "gelu", mult: float = 4.0, bias: bool = False, hidden: int | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        hidden = max(1, round(mult * dim)) if hidden is None else hidden
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map `[B, T, D]` to `[B, T, D]`."""
        return self.down(ACTIVATIONS[self.activation](self.up(x_BTD)))


class SwiGLU(nn.Module):
    """`y = down(silu(gate(x)) * up(x))` with `2/3 * mult * D` hidden channels, rounded to a multiple of 8, or `hidden`.

    At two thirds of the width, its three matrices have as many parameters as the two of an ungated network.
    """

    def __init__(self, dim: int, *, mult: float = 4.0, bias: bool = False, hidden: int | None = None) -> None:
        super().__init__()
        hidden = max(8, 8 * round(mult * dim * 2 / 3 / 8)) if hidden is None else hidden
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map `[B, T, D]` to `[B, T, D]`."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Bilinear(nn.Module):
    """`y_k = sum_ij silu(wide(x))_i silu(narrow(x))_j W_ijk + c_k`, ELiTA's FeedForward2.

    `wide` keeps the model width D, `narrow` has `b = 2 * mult` channels (the paper's factor 8 for `mult` 4), and
    `down` is `W` as a matrix `[D, D * b]` whose column `i * b + j` holds `W_ij`. With biases it has
    `(b + 1) D^2 + (b + 2) D + b` parameters: an eighth more than `Ungated` for b = 8. Source: A. C. O. Sharma,
    "Efficient Linear-Time Attention Transformers", 2023 (github.com/acosharma/elita-transformer), Feed-Forward2.
    """

    def __init__(self, dim: int, *, mult: float = 4.0, bias: bool = False) -> None:
        super().__init__()
        factor = max(1, round(2 * mult))
        self.wide = nn.Linear(dim, dim, bias=bias)
        self.narrow = nn.Linear(dim, factor, bias=bias)
        self.down = nn.Linear(dim * factor, dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map `[B, T, D]` to `[B, T, D]`; the products of the two branches are `[B, T, D * b]`."""
        wide_BTD, narrow_BTb = F.silu(self.wide(x_BTD)), F.silu(self.narrow(x_BTD))
        return self.down((wide_BTD.unsqueeze(-1) * narrow_BTb.unsqueeze(-2)).flatten(-2))


def build_feedforward(
    kind: str, dim: int, *, mult: float = 4.0, bias: bool = False, hidden: int | None = None
) -> Ungated | SwiGLU | Bilinear:
    """Build the feed-forward network `swiglu`, `bilinear` or, by its activation, `Ungated` for the model width `dim`.

    `hidden` sets the hidden channels directly, in place of `mult`. Raises `ValueError` for an unknown kind, and for
    `hidden` with `bilinear`, whose hidden channels are all products of its two branches.
    """
    if kind in ACTIVATIONS:
        return Ungated(dim, activation=kind, mult=mult, bias=bias, hidden=hidden)
    if kind == "swiglu":
        return SwiGLU(dim, mult=mult, bias=bias, hidden=hidden)
    if kind == "bilinear":
        if hidden is not None:
            raise ValueError(f"feed-forward 'bilinear' has no hidden width of its own, got hidden={hidden}; use mult")
        return Bilinear(dim, mult=mult, bias=bias)
    raise ValueError(f"unknown feed-forward {kind!r}; {suggest(kind, FEEDFORWARDS)}")
