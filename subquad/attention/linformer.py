"""Linformer (Wang et al. 2020, arXiv:2006.04768): attention to K learned mixtures of the tokens. Per head:

    y_t = sum_j softmax_j(q_t . (E k)_j / sqrt(d)) (F v)_j,    E, F of shape [K, N], learned,  d = D / H

so the weights are softmax(Q (E K)^T / sqrt(d)) F, whose rows need not sum to one. Every token is mixed into every
projected key: there is no causal form. N is fixed when the layer is built; a shorter sequence uses the first columns of
E and F, which count real tokens only (yet the inputs may have no more than N slots, padding included: how many tokens
are real is not known where a graph is compiled). The paper shares E and F in several ways, `sharing`; over layers is
not one of them here. (A later paper, arXiv:2412.06106, describes Linformer with projected queries: that is not this
method.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from subquad.attention.base import takes_options
from subquad.attention.scanned import ScannedAttention, attend_few, real_mask, real_rows, seen_after, widened
from subquad.ops.backends import without_autocast
from subquad.state import State


class Linformer(ScannedAttention):
    """All tokens, through a fixed number of learned mixtures of them."""

    name = "linformer"
    summary = "all tokens, through learned mixtures of positions"
    paper = "Wang et al. 2020, arXiv:2006.04768"
    forms = ("bidirectional",)
    sees_order = True
    is_distribution = False  # the rows of F have no fixed sum

    @dataclass(frozen=True, kw_only=True)
    class Config(ScannedAttention.Config):
        """Options of Linformer."""

        causal: bool = False
        """Always False: every projected key mixes all tokens."""
        max_tokens: int = 2048
        """N, the longest sequence in slots, padding included."""
        projected: int = 128
        """K, the number of projected keys and values."""
        sharing: Literal["none", "heads", "key_value"] = "heads"
        """Sharing of E and F: none (two for each head), one of each for all heads, or a single one for both."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(max_tokens=1, projected=1)

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = nn.Linear(config.dim, config.dim, bias=config.bias)
        shape = (config.num_heads if config.sharing == "none" else 1, config.projected, config.max_tokens)
        bound = 1 / math.sqrt(config.projected)
        self.project_keys = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        if config.sharing != "key_value":
            self.project_values = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Attend to the projected keys and values."""
        e_HKT, f_HKT = self.projections(x_BTD.shape[1])
        mask_BT = real_mask(lengths_B, x_BTD.shape[1])
        k_BHKC = project(e_HKT, real_rows(self.split(self.key(x_BTD)), mask_BT, 0.0))
        v_BHKC = project(f_HKT, real_rows(self.values(x_BTD), mask_BT, 0.0))
        y_BHTC = attend_few(self.split(self.query(x_BTD)), k_BHKC, v_BHKC, None, self.dropout_p).to(x_BTD.dtype)
        return self.merge(y_BHTC), State({"seen": seen_after(state, x_BTD.shape[1], lengths_B)}, self.config_hash)

    def projections(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the columns of E and F for the first `tokens` tokens, `[H or 1, K, tokens]`."""
        if tokens > self.config.max_tokens:
            raise ValueError(
                f"this linformer layer reads at most max_tokens={self.config.max_tokens} tokens, got {tokens} "
                "(slots of padding count); cut off padding that no row needs, or build it with a larger max_tokens"
            )
        values = self.project_keys if self.config.sharing == "key_value" else self.project_values
        return self.project_keys[..., :tokens], values[..., :tokens]

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `softmax(Q (E K)^T / sqrt(d)) F`."""
        e_HKT, f_HKT = self.projections(x_BTD.shape[1])
        k_BHKC = e_HKT @ self.split(self.key(x_BTD))
        scores_BHTK = self.split(self.query(x_BTD)) @ k_BHKC.mT / math.sqrt(self.channels)
        return scores_BHTK.softmax(-1) @ f_HKT


@without_autocast
def project(e_HKT: Tensor, x_BHTC: Tensor) -> Tensor:
    """Return `E x`, `[B, H, K, C]`, summed in float32 or wider."""
    e, x = widened(e_HKT, x_BHTC)
    return e @ x
