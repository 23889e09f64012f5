"""Linear attention as an RNN (Katharopoulos et al. 2020, arXiv:2006.16236, section 3.2 to 3.4).

    y_t = phi(q_t) S_t / (phi(q_t) . z_t + eps),    S_t = S_{t-1} + phi(k_t) (x) v_t,    z_t = z_{t-1} + phi(k_t)

In the bidirectional form S and z are the sums over all tokens (equation 5). There is no 1 / sqrt(K), and eps is added
after the product, as in the authors' code.

`feature_map=learned` is a map with weights of its own for the queries and for the keys of each head (Zhang et al. 2024,
Hedgehog, arXiv:2402.04347, in the form of LoLCATs, arXiv:2410.10254, equation 4):

    phi(x) = [softmax(x W), softmax(-x W)],    W [K, F], by default [K, K] and the identity at first

With `rotary` queries and keys turn by their positions before the map, so that the weights can depend on distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.projected import HeadedAttention
from subquad.attention.scanned import ScannedAttention
from subquad.config import later, suggest
from subquad.layers.positions import ROTARY_BASE, rotate
from subquad.layers.scaling import RopeScaling, rotated_channels
from subquad.state import State

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "softplus": F.softplus,
    "softmax": lambda x: x.softmax(-1),
}
"""Maps to non-negative features; register another by adding it here."""
LEARNED = "learned"
"""Name of the feature map with weights."""


class Linear(HeadedAttention, ScannedAttention):
    """Every earlier token, weighted by the product of positive features of query and key."""

    name = "linear"
    summary = "every earlier token, by positive features"
    forms = ("causal", "bidirectional")
    parallel = True
    paper = "Katharopoulos et al. 2020, arXiv:2006.16236"

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadedAttention.Config):
        """Options of linear attention."""

        dropout: float = 0.0
        """Dropout on the keys' features, in training (single weights are never formed)."""
        feature_map: str = "elu"
        """phi: elu (plus one), relu, squared_relu, softplus, softmax, or learned (it has weights)."""
        feature_dim: int | None = later(None)
        """Columns F of W in a learned map, which gives 2F features (None: K, beginning as the identity)."""
        eps: float = 1e-6
        """Added to the sum of the weights that divides the output."""
        rotary: bool = later(False)
        """Whether queries and keys are rotated before the map; a decoder's `position` doesn't set it."""
        rope_base: float = later(ROTARY_BASE)
        """Base of the rotary frequencies."""
        rope_fraction: float = later(1.0)
        """Fraction of each head's channels to rotate, from the first channel on."""
        rope_scaling: RopeScaling | None = later(None)
        """Change of the rotary frequencies for longer sequences (None: none)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.feature_map not in (known := [*FEATURE_MAPS, LEARNED]):
                raise ValueError(f"unknown feature_map {self.feature_map!r}; {suggest(self.feature_map, known)}")
            if self.feature_dim is not None and (self.feature_dim < 1 or self.feature_map != LEARNED):
                raise ValueError(
                    f"feature_dim must be at least 1 and is for feature_map=learned, got {self.feature_dim} with "
                    f"feature_map={self.feature_map}"
                )
            self.check_least(eps=0)
            if not 0 < self.rope_fraction <= 1:
                raise ValueError(f"rope_fraction must be above 0 and at most 1, got {self.rope_fraction}")
            rotated = rotated_channels(self.channels, self.rope_fraction)
            if self.rotary and (rotated % 2 or not rotated):
                raise ValueError(
                    f"rotary needs an even number of channels to turn, got {rotated} of {self.channels} in a head"
                )
            if not self.rope_base > 0:
                raise ValueError(f"rope_base must be positive, got {self.rope_base}")

    config: Config

    @classmethod
    def options_after_full(cls, *, rotary: bool) -> dict[str, Any]:
        """Return the learned map, with queries and keys rotated as full attention's were."""
        return {"feature_map": LEARNED, "rotary": rotary}

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.query = self.projection(self.channels * config.num_heads)
        self.key = self.projection(self.channels * config.num_heads)
        self.add_norms()
        self.learned = config.feature_map == LEARNED
        columns = config.feature_dim or self.channels
        self.features = 2 * columns if self.learned else self.channels
        if self.learned:
            first_HKF = torch.eye(self.channels).expand(config.num_heads, -1, -1)
            if config.feature_dim is not None:
                # The same for queries and keys: their product is then largest where they agree.
                first_HKF = torch.randn(config.num_heads, self.channels, columns)
            self.query_map, self.key_map = nn.Parameter(first_HKF.clone()), nn.Parameter(first_HKF.clone())

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Mix by the normalised scan without decay; bidirectional, by sums over all tokens."""
        seen = self.start(state, x_BTD.shape[1])
        return self.sums(
            self.query_features(x_BTD, seen),
            F.dropout(self.key_features(x_BTD, seen), self.config.dropout, self.training),
            self.values(x_BTD),
            state,
            lengths_B,
            self.config.eps,
        )

    def query_features(self, x_BTD: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return phi of the queries `[B, H, T, features]`."""
        q_BHTK = self.normed_queries(self.split(self.query(x_BTD), width=self.channels))
        return self.phi(q_BHTK, self.query_map if self.learned else None, start)

    def key_features(self, x_BTD: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return phi of the keys `[B, H, T, features]`."""
        k_BHTK = self.normed_keys(self.split(self.key(x_BTD), width=self.channels))
        return self.phi(k_BHTK, self.key_map if self.learned else None, start)

    def phi(self, x_BHTK: Tensor, map_HKF: Tensor | None, start: int | Tensor) -> Tensor:
        """Return the features of queries or keys."""
        # Contiguous, as the scan wants it: a map of strided heads would be copied after it anyway. And the
        # backward of F.elu and F.softplus on transposed heads fails under torch.compile's aot_eager in torch 2.13.
        x_BHTK = x_BHTK.contiguous()
        if self.config.rotary:
            x_BHTK = self.rotated(x_BHTK, start)
        if map_HKF is None:
            return FEATURE_MAPS[self.config.feature_map](x_BHTK)
        x_BHTF = x_BHTK @ map_HKF
        return torch.cat([x_BHTF.softmax(-1), (-x_BHTF).softmax(-1)], -1)

    def rotated(self, x_BHTK: Tensor, start: int | Tensor) -> Tensor:
        """Rotate `x` by its positions."""
        config = self.config
        channels = rotated_channels(self.channels, config.rope_fraction)
        return rotate(x_BHTK, start, config.rope_base, channels=channels, scaling=config.rope_scaling)

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `phi(q_t) . phi(k_s)` (for `s <= t` if causal) over its sum plus eps."""
        w_BHTS = self.query_features(x_BTD) @ self.key_features(x_BTD).mT
        w_BHTS = w_BHTS.tril() if self.causal else w_BHTS
        total_BHT1 = w_BHTS.sum(-1, keepdim=True) + self.config.eps
        return w_BHTS / torch.where(total_BHT1 == 0, 1.0, total_BHT1)

    @property
    def divisible(self) -> tuple[int, ...]:
        """All heads: each has its own features."""
        return (self.config.num_heads,)

    @property
    def is_distribution(self) -> bool:
        """Whether eps is zero, so that rows sum to one."""
        return self.config.eps == 0
