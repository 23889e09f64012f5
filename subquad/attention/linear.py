"""Linear attention as an RNN (Katharopoulos et al. 2020, arXiv:2006.16236, section 3.2 to 3.4).

    y_t = phi(q_t) S_t / (phi(q_t) . z_t + eps),    S_t = S_{t-1} + phi(k_t) (x) v_t,    z_t = z_{t-1} + phi(k_t)

In the bidirectional form S and z are the sums over all tokens (equation 5). There is no 1 / sqrt(K), and eps is added
after the product, as in the authors' code.

`feature_map=learned` is a map with weights of its own for the queries and for the keys of each head (Zhang et al. 2024,
Hedgehog, arXiv:2402.04347, in the form of LoLCATs, arXiv:2410.10254, equation 4):

    phi(x) = [softmax(x W), softmax(-x W)],    W [K, F], by default [K, K] and the identity at first

With `rotary` queries and keys are rotated by their positions before the map, so that weights can depend on distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, split, takes_options
from subquad.attention.divided import check_even
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.parts import HeadedConfig, head_norm, normed, output_projection, projection
from subquad.attention.past import Past
from subquad.config import suggest
from subquad.layers.positions import ROTARY_BASE, rotate
from subquad.layers.scaling import RopeScaling, rotated_channels

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


class Linear(Attention):
    """Every earlier token, weighted by the product of positive features of query and key."""

    name = "linear"
    summary = "every earlier token, by positive features"
    forms = ("causal", "bidirectional")
    paper = "Katharopoulos et al. 2020, arXiv:2006.16236"

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadedConfig):
        """Options of linear attention."""

        dropout: float = 0.0
        """Dropout on the keys' features, in training (single weights are never formed)."""
        feature_map: str = "elu"
        """phi: elu (plus one), relu, squared_relu, softplus, softmax, or learned (it has weights)."""
        feature_dim: int | None = None
        """Columns F of W in a learned map, which gives 2F features (None: K, beginning as the identity)."""
        eps: float = 1e-6
        """Added to the sum of the weights that divides the output."""
        rotary: bool = False
        """Whether queries and keys are rotated before the map; a decoder's `position` doesn't set it."""
        rope_base: float = ROTARY_BASE
        """Base of the rotary frequencies."""
        rope_fraction: float = 1.0
        """Fraction of each head's channels to rotate, from the first channel on."""
        rope_scaling: RopeScaling | None = None
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
        H, K = config.num_heads, config.channels
        self.value, self.out = projection(config, H), output_projection(config)
        self.query, self.key = projection(config, H), projection(config, H)
        self.query_norm, self.key_norm = head_norm(config), head_norm(config)
        self.is_distribution = config.eps == 0
        learned = config.feature_map == LEARNED
        self.features = 2 * (config.feature_dim or K) if learned else K
        first_HKF = torch.eye(K).expand(H, -1, -1)
        if config.feature_dim is not None:
            # The same map for queries and keys, so that at first the product is largest for equal ones.
            first_HKF = torch.randn(H, K, config.feature_dim)
        self.query_map, self.key_map = (nn.Parameter(first_HKF.clone()) if learned else None for _ in range(2))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the sums of the keys' features with those of the queries."""
        config, K = self.config, self.config.channels
        q_BHTK = normed(split(K, self.query(x_BTD))[0], self.query_norm)
        q_BHTF = self.phi(q_BHTK, self.query_map, past.start)
        k_BHTK = normed(split(K, self.key(x_BTD))[0], self.key_norm)
        k_BHTF = F.dropout(self.phi(k_BHTK, self.key_map, past.start), config.dropout, self.training)
        (v_BHTV,) = split(K, self.value(x_BTD))
        check_even(self, q_BHTF, v_BHTV)
        (sums,) = past.keep(sums=Recurrence(k_BHTF, past.values(v_BHTV), normalise=True, eps=config.eps))
        return sums.read(q_BHTF)

    def phi(self, x_BHTK: Tensor, map_HKF: Tensor | None, start: int | Tensor) -> Tensor:
        """Return the features of queries or keys."""
        config = self.config
        # Contiguous, as the scan needs it: strided heads would be copied later anyway. And the
        # backward of F.elu and F.softplus on transposed heads fails under torch.compile's aot_eager in torch 2.13.
        x_BHTK = x_BHTK.contiguous()
        if config.rotary:
            channels = rotated_channels(config.channels, config.rope_fraction)
            x_BHTK = rotate(x_BHTK, start, config.rope_base, channels=channels, scaling=config.rope_scaling)
        if map_HKF is None:
            return FEATURE_MAPS[config.feature_map](x_BHTK)
        x_BHTF = x_BHTK @ map_HKF
        return torch.cat([x_BHTF.softmax(-1), (-x_BHTF).softmax(-1)], -1)

    @property
    def divisible(self) -> tuple[int, ...]:
        """All heads, since each has its own features."""
        return (self.config.num_heads,)
