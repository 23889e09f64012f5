"""The four projections of softmax attention: queries, keys, values and output.

Shape letters: B batch, T tokens, D model width, H heads, G key heads, K channels of a head, C channels of all heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from subquad.attention.base import Attention
from subquad.attention.divided import uneven
from subquad.attention.parts import HeadNorm, SoftmaxConfig
from subquad.layers.norm import ZeroCentredRMSNorm
from subquad.layers.positions import rotate
from subquad.layers.scaling import rotated_channels


class ProjectedAttention(Attention):
    """Project by `q = R norm(W_q x)`, `k = R norm(W_k x)`, `v = W_v x`, `y = W_o o`; norm and R are options."""

    rotates = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of a softmax mechanism."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.kv_heads = config.num_kv_heads or config.num_heads
        self.channels, self.sharing = config.channels, config.num_heads // self.kv_heads
        self.q_dim, self.kv_dim = config.channels * config.num_heads, config.channels * self.kv_heads
        self.query = self.projection(self.q_dim)
        self.key = self.projection(self.kv_dim)
        self.value = self.projection(self.kv_dim)
        self.out = self.output_projection()
        self.add_norms()

    def queries(self, x_BTD: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return the queries `[B, H, T, K]`, rotated to their positions."""
        return self.rotated(self.query_heads(self.query(x_BTD)), start)

    def keys(self, x_BTD: Tensor, start: int | Tensor = 0) -> Tensor:
        """Return the keys `[B, G, T, K]`, rotated to their positions."""
        return self.rotated(self.key_heads(self.key(x_BTD)), start)

    def projected(self, x_BTD: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `queries`, `keys` and `kv_values`."""
        q_BHTK, k_BGTK = self.queries(x_BTD, start), self.keys(x_BTD, start)
        if q_BHTK.shape[1] != k_BGTK.shape[1] * self.sharing:
            raise uneven(self, q_BHTK.shape[1], k_BGTK.shape[1])
        return q_BHTK, k_BGTK, self.kv_values(x_BTD)

    def query_heads(self, q_BTC: Tensor) -> Tensor:
        """Reshape `[B, T, H K]` to `[B, H, T, K]`, normalised if `qk_norm` is set, for `score_scale`."""
        q_BHTK, scale = self.normed_queries(self.split(q_BTC, width=self.channels)), self.config.score_scale
        return q_BHTK if scale is None else q_BHTK * (scale * math.sqrt(self.config.channels))

    def key_heads(self, k_BTC: Tensor) -> Tensor:
        """Reshape `[B, T, G K]` to `[B, G, T, K]`, normalised if `qk_norm` is set."""
        return self.normed_keys(self.split(k_BTC, width=self.channels))

    def kv_values(self, x_BTD: Tensor) -> Tensor:
        """Return the values `[B, G, T, K]` of the key heads."""
        return self.split(self.value(x_BTD), width=self.channels)

    def rotated(self, x_BHTK: Tensor, start: int | Tensor) -> Tensor:
        """Rotate `x` by its positions if `rope` is set."""
        config = self.config
        if not config.rope:
            return x_BHTK
        channels = rotated_channels(config.channels, config.rope_fraction)
        return rotate(x_BHTK, start, config.rope_base, channels=channels, scaling=config.rope_scaling)

    def values(self, x_BTD: Tensor) -> Tensor:
        """Return the values `[B, H, T, K]`, one head for each query head."""
        return self.shared(self.kv_values(x_BTD))

    def shared(self, x_BGTK: Tensor) -> Tensor:
        """Repeat key heads for the query heads that share them."""
        return x_BGTK.repeat_interleave(self.sharing, 1)

    def merge(self, y_BHTV: Tensor) -> Tensor:
        """Apply the output projection."""
        return self.out(self.join(y_BHTV))

    def head_channels(self) -> int:
        """Channels K of a head."""
        return self.config.channels

    def projection(self, width: int) -> nn.Linear:
        """Return a linear map from the model width to queries, keys or values: `width` channels of all heads."""
        config = self.config
        return nn.Linear(config.dim, width, bias=config.bias if config.qkv_bias is None else config.qkv_bias)

    def output_projection(self) -> nn.Linear:
        """Return a linear map from the heads' outputs to the model width."""
        config = self.config
        return nn.Linear(
            config.channels * config.num_heads,
            config.dim,
            bias=config.bias if config.out_bias is None else config.out_bias,
        )

    def add_norms(self) -> None:
        """Create the norms of queries and keys if `qk_norm` is set."""
        if self.config.qk_norm:
            kind = ZeroCentredRMSNorm if self.config.zero_centred else HeadNorm
            self.query_norm, self.key_norm = (
                kind(self.config.channels, eps=self.config.norm_eps or 1e-6) for _ in range(2)
            )

    def normed_queries(self, q_BHTK: Tensor) -> Tensor:
        """Normalise the queries of all heads if `qk_norm` is set."""
        return self.query_norm(q_BHTK) if self.config.qk_norm else q_BHTK

    def normed_keys(self, k_BGTK: Tensor) -> Tensor:
        """Normalise the keys of all heads if `qk_norm` is set."""
        return self.key_norm(k_BGTK) if self.config.qk_norm else k_BGTK
