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

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.past import Past
from subquad.attention.recurrent import DecayRate, DeltaConfig, add_delta_rule, delta_heads, rms_normed


class GatedDeltaNet(Attention):
    """The delta rule with a decay for each head: a key overwrites the value that the state holds for it."""

    name = "gated_delta_net"
    summary = "the delta rule, with a decay of each head"
    paper = "Yang et al. 2024, arXiv:2412.06464"
    sees_order = True
    is_distribution = False

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaConfig):
        """Options of the gated delta rule."""

        num_key_heads: int | None = None
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
    norm_weight: nn.Parameter

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_delta_rule(self, config)
        self.gating = nn.Linear(config.dim, config.values * config.num_heads, bias=config.bias)
        self.fading = nn.Linear(config.dim, config.num_heads, bias=False)
        self.rate = DecayRate(config.num_heads)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the delta rule's state."""
        q_BGTK, k_BGTK, v_BHTV, beta_BHT1 = delta_heads(self, x_BTD, past)
        log_f_BHT1, _ = self.rate(self.fading(x_BTD))
        (sums,) = past.keep(sums=Recurrence(k_BGTK, past.values(v_BHTV), log_f_BHT1, beta_BHT1))
        return sums.read(q_BGTK)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (rmsnorm(y) * silu(W_g x))`."""
        y_BTC = join(rms_normed(y_BHTV, self.norm_weight, self.config.norm_eps).to(x_BTD.dtype))
        y_BTC = y_BTC * F.silu(self.gating(x_BTD))
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))
