"""Linear attention as an RNN (Katharopoulos et al. 2020, arXiv:2006.16236, section 3.2 to 3.4).

    y_t = phi(q_t) S_t / (phi(q_t) . z_t + eps),    S_t = S_{t-1} + phi(k_t) (x) v_t,    z_t = z_{t-1} + phi(k_t)

In the bidirectional form S and z are the sums over all tokens (equation 5). There is no 1 / sqrt(K), and eps is added
after the product, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention._projected import HeadedAttention
from subquad.attention._scanned import ScannedAttention
from subquad.config import suggest
from subquad.state import State

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "softplus": F.softplus,
    "softmax": lambda x: x.softmax(-1),
}
"""Maps to non-negative features; register another by adding it here."""


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
        """phi: elu (plus one), relu, squared_relu, softplus or softmax."""
        eps: float = 1e-6
        """Added to the sum of the weights that divides the output."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.feature_map not in FEATURE_MAPS:
                raise ValueError(f"unknown feature_map {self.feature_map!r}; {suggest(self.feature_map, FEATURE_MAPS)}")
            if not self.eps >= 0:
                raise ValueError(f"eps must be at least 0, got {self.eps}")

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.query = self.projection(self.channels * config.num_heads)
        self.key = self.projection(self.channels * config.num_heads)
        self.add_norms()

    def mix(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """The scan without decay, normalised; or the sums over all tokens."""
        return self.sums(
            self.phi(self.query, x_BTD),
            F.dropout(self.phi(self.key, x_BTD), self.config.dropout, self.training),
            self.values(x_BTD),
            state,
            lengths_B,
            self.config.eps,
        )

    def phi(self, project: nn.Linear, x_BTD: Tensor) -> Tensor:
        """Features `[B, H, T, K]`."""
        # Contiguous, as the scan wants it: a map of strided heads would be copied after it anyway. And the
        # backward of F.elu and F.softplus on transposed heads fails under torch.compile's aot_eager in torch 2.13.
        norm = self.normed_queries if project is self.query else self.normed_keys
        return FEATURE_MAPS[self.config.feature_map](norm(self.split(project(x_BTD))).contiguous())

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """`phi(q_t) . phi(k_s)`, for `s <= t` where causal, over its sum plus eps."""
        w_BHTS = self.phi(self.query, x_BTD) @ self.phi(self.key, x_BTD).mT
        w_BHTS = w_BHTS.tril() if self.causal else w_BHTS
        total_BHT1 = w_BHTS.sum(-1, keepdim=True) + self.config.eps
        return w_BHTS / torch.where(total_BHT1 == 0, 1.0, total_BHT1)

    @property
    def is_distribution(self) -> bool:
        """Only without eps."""
        return self.config.eps == 0

    def mixing_flops(self, tokens: int) -> int:
        """Sums of K x V written and read a token, and, where causal, the scores inside chunks."""
        return self.sums_flops(tokens, self.channels)

    def mixing_backward_flops(self, tokens: int) -> int:
        """The same backward."""
        return self.sums_backward_flops(tokens, self.channels)

    def state_bytes(self, tokens: int) -> int:
        """K x (V + 1) sums a head."""
        return 4 * self.config.num_heads * self.channels * (self.channels + 1)
