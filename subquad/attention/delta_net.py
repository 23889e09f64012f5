"""DeltaNet: linear attention that overwrites what a key held (Yang et al. 2024, arXiv:2406.06484, section 2.2 and 3.4).

    S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t (x) v_t,    o_t = q_t S_t / sqrt(K),    b_t = r sigmoid(W_b x_t)
    q = l2(silu(conv(W_q x))),    k = l2(silu(conv(W_k x))),    v = silu(conv(W_v x)),    y_t = W_o rmsnorm(o_t)

`beta_range` is r: with 2 the transitions have negative eigenvalues, which tracking a state takes (Grazzi et al. 2024,
arXiv:2411.12537).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from subquad.attention.base import takes_options
from subquad.attention.recurrence import Recurrence
from subquad.attention.recurrent import RecurrentAttention, of_unit_length
from subquad.state import State


class DeltaNet(RecurrentAttention):
    """Every earlier token, by a memory in which a key overwrites what it held."""

    name = "delta_net"
    summary = "a memory in which a key overwrites what it held"
    paper = "Yang et al. 2024, arXiv:2406.06484"

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentAttention.Config):
        """Options of the delta rule."""

        convolution: int = 4
        """Tokens that the short convolutions of queries, keys and values read."""
        beta_range: int = 1
        """Largest strength of writing: 1, or 2 for negative eigenvalues."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(convolution=1)
            if self.beta_range not in (1, 2):
                raise ValueError(f"beta_range must be 1 or 2, got {self.beta_range}")

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config, taps=config.convolution)
        self.strength = nn.Linear(config.dim, config.num_heads, bias=False)

    @property
    def decays(self) -> int:
        """0: the delta rule mixes the rows of its state."""
        return 0

    def recurrence(
        self, x_BTD: Tensor, state: State | None = None, lengths_B: Tensor | None = None
    ) -> tuple[Recurrence, Tensor | None]:
        """Return the delta scan of queries and keys of length 1."""
        q, k, v, last_BSC = self.projected(x_BTD, state, lengths_B)
        beta_BHT1 = self.config.beta_range * self.split(self.strength(x_BTD).sigmoid())
        scan = Recurrence(
            of_unit_length(q) * self.config.keys**-0.5, of_unit_length(k), v, self.log_decays(x_BTD), beta_BHT1
        )
        return scan, last_BSC

    def log_decays(self, x_BTD: Tensor) -> Tensor | None:
        """Return the logarithms of the decays; None: nothing fades."""
        return None
