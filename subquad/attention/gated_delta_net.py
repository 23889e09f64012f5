"""Gated DeltaNet: the delta rule with a decay for each head (Yang et al. 2024, arXiv:2412.06464, section 3.1 and 3.4).

    S_t = (I - b_t k_t k_t^T) (f_t S_{t-1}) + b_t k_t (x) v_t,    log f_t = -exp(a) softplus(W_f x_t + c)
    y_t = W_o (rmsnorm(o_t) * silu(W_g x_t))

Queries, keys, values and b are those of DeltaNet. By default K is 3/4 of dim / num_heads, and V is twice K. With
`num_key_heads`, neighbouring heads share queries and keys (Qwen3-Next).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.recurrent import DecayRate, DeltaAttention
from subquad.config import later


class GatedDeltaNet(DeltaAttention):
    """Every earlier token, by a memory that fades by head and in which a key overwrites what it held."""

    name = "gated_delta_net"
    summary = "a fading memory in which a key overwrites what it held"
    paper = "Yang et al. 2024, arXiv:2412.06464"

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaAttention.Config):
        """Options of the gated delta rule."""

        num_key_heads: int | None = later(None)
        """Heads of queries and keys, each shared by neighbouring heads (None: num_heads)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.num_key_heads is not None and (self.num_key_heads < 1 or self.num_heads % self.num_key_heads):
                raise ValueError(
                    f"num_key_heads must divide num_heads, got num_key_heads={self.num_key_heads}, "
                    f"num_heads={self.num_heads}"
                )

        @property
        def keys(self) -> int:
            """Channels K of a head's queries and keys: by default 3/4 of the head size."""
            return self.key_channels or max(1, 3 * self.dim // (4 * self.num_heads))

        @property
        def values(self) -> int:
            """Channels V of a head's values: by default twice K."""
            return self.value_channels or 2 * self.keys

        @property
        def key_heads(self) -> int:
            """Heads G of queries and keys."""
            return self.num_key_heads or self.num_heads

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gating = self.projection(config.values * config.num_heads)
        self.fading = nn.Linear(config.dim, config.num_heads, bias=False)
        self.rate = DecayRate(config.num_heads)

    def log_decays(self, x_BTD: Tensor) -> Tensor:
        """Return one logarithm a head."""
        return self.rate(self.fading(x_BTD))[0]

    def gate(self, x_BTD: Tensor) -> Tensor:
        """Return `silu(W_g x)`."""
        return F.silu(self.gating(x_BTD))
