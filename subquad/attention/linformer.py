"""Linformer (Wang et al. 2020, arXiv:2006.04768): attention to K learned mixtures of the tokens. Per head:

    y_t = sum_j softmax_j(q_t . (E k)_j / sqrt(d)) (F v)_j,    E, F of shape [K, N], learned,  d = D / H

so the weights are softmax(Q (E K)^T / sqrt(d)) F, whose rows need not sum to one. Every token is mixed into every
projected key: there is no causal form. N is fixed when the layer is built; a shorter sequence uses the first columns of
E and F, which count real tokens only (but the inputs may have at most N slots, padding included, since a compiled graph
does not know the number of real tokens). The paper shares E and F in several ways, `sharing`; sharing over layers is
not supported. (A later paper, arXiv:2412.06106, describes Linformer with projected queries: that is not this
method.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention, split, takes_options
from subquad.attention.memories.all_keys import AllKeys, attend_few, shares
from subquad.attention.memories.running_softmax import real_rows
from subquad.attention.past import Past
from subquad.ops.backends import without_autocast
from subquad.ops.precision import widened


class Linformer(Attention):
    """All tokens, through a fixed number of learned mixtures of them."""

    name = "linformer"
    summary = "all tokens, through learned mixtures of positions"
    paper = "Wang et al. 2020, arXiv:2006.04768"
    forms = ("bidirectional",)
    sees_order = True
    is_distribution = False  # the rows of F have no fixed sum

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
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
        projections = (nn.Linear(config.dim, config.dim, bias=config.bias) for _ in range(4))
        self.value, self.out, self.query, self.key = projections
        shape = (config.num_heads if config.sharing == "none" else 1, config.projected, config.max_tokens)
        bound = 1 / math.sqrt(config.projected)
        self.project_keys = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        if config.sharing != "key_value":
            self.project_values = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the mixtures of keys and values."""
        e_HKT, f_HKT = self.projections(x_BTD.shape[1])
        channels = self.config.dim // self.config.num_heads
        k_BHTC, v_BHTC, q_BHTC = split(channels, self.key(x_BTD), self.value(x_BTD), self.query(x_BTD))
        (mixtures,) = past.keep(mixtures=Mixtures(k_BHTC, past.values(v_BHTC), self.dropout_p, e=e_HKT, f=f_HKT))
        return mixtures.read(q_BHTC).to(x_BTD.dtype)

    def projections(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the columns of E and F for the first `tokens` tokens, `[H or 1, K, tokens]`."""
        if tokens > self.config.max_tokens:
            raise ValueError(
                f"this linformer layer reads at most max_tokens={self.config.max_tokens} tokens, got {tokens} "
                "(slots of padding count); cut off padding that no row needs, or build it with a larger max_tokens"
            )
        values = self.project_keys if self.config.sharing == "key_value" else self.project_values
        return self.project_keys[..., :tokens], values[..., :tokens]


@dataclass(frozen=True, eq=False)
class Mixtures(AllKeys):
    """Keys and values that are read after E and F have mixed them."""

    e: Tensor = field(kw_only=True)
    f: Tensor = field(kw_only=True)

    def read_all(self, q_BHTC: Tensor, at: Any) -> Tensor:
        """Return the outputs; padding is not mixed in."""
        k_BHKC = project(self.e, real_rows(self.k, at.mask, 0.0))
        v_BHKC = project(self.f, real_rows(self.v, at.mask, 0.0))
        return attend_few(q_BHTC, k_BHKC, v_BHKC, None, self.dropout_p)

    def literal(self, q_BHTC: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights `softmax(Q (E K)^T / sqrt(d)) F` and the values."""
        e_HKT, f_HKT = (x.to(self.k.dtype) for x in (self.e, self.f))
        return shares(q_BHTC, e_HKT @ self.k) @ f_HKT @ self.v


@without_autocast
def project(e_HKT: Tensor, x_BHTC: Tensor) -> Tensor:
    """Return `E x`, `[B, H, K, C]`, summed in float32 or wider."""
    e, x = widened(e_HKT, x_BHTC)
    return e @ x
