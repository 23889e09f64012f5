"""The four projections of softmax attention: queries, keys, values and output.

Shape letters: B batch, T tokens, D model width, H heads, G key heads, K channels of a head, C channels of all heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention
from subquad.attention.divided import uneven
from subquad.config import later
from subquad.layers.norm import ZeroCentredRMSNorm
from subquad.layers.positions import rotate
from subquad.layers.scaling import RopeScaling, rotated_channels


class HeadedAttention(Attention):
    """Project to queries, keys and values, `q = norm(W_q x)`, `k = norm(W_k x)`, `v = W_v x`; the norm is an option."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        """Options of the projections."""

        head_dim: int | None = later(None)
        """Channels K of a head (None: dim / num_heads)."""
        qk_norm: bool = later(False)
        """Whether queries and keys are RMS-normalised over each head's channels, before the rotation."""
        norm_eps: float | None = later(None)
        """Epsilon of that norm, added to the mean square (None: 1e-6)."""
        zero_centred: bool = later(False)
        """Whether that norm multiplies by 1 + its weights, and not by its weights (Qwen3-Next)."""
        qkv_bias: bool | None = later(None)
        """Whether queries, keys and values have a bias (None: the value of bias)."""
        out_bias: bool | None = later(None)
        """Whether the output projection has a bias (None: the value of bias)."""

        @property
        def channels(self) -> int:
            """Channels of one head."""
            return self.head_dim or self.dim // self.num_heads

        def check_heads(self) -> None:
            """Raise `ValueError` if the heads don't divide the model width."""
            if self.head_dim is None:
                super().check_heads()
            elif min(self.dim, self.num_heads, self.head_dim) < 1:
                raise ValueError(
                    "dim, num_heads and head_dim must be at least 1, "
                    f"got dim={self.dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"
                )

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.norm_eps is not None and not self.norm_eps > 0:
                raise ValueError(f"norm_eps must be above 0, got {self.norm_eps}")

    config: Config

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


class HeadNorm(nn.RMSNorm):
    """The norm of each head's channels, in the dtype of x: under autocast it is not that of the weights."""

    def forward(self, x_BHTK: Tensor) -> Tensor:
        """Return `x / sqrt(mean(x^2) + eps) * w`."""
        return F.rms_norm(x_BHTK, self.normalized_shape, self.weight.to(x_BHTK.dtype), self.eps)


class ProjectedAttention(HeadedAttention):
    """Project by `q = R norm(W_q x)`, `k = R norm(W_k x)`, `v = W_v x`, `y = W_o o`; norm and R are options."""

    rotates = True

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadedAttention.Config):
        """Options of a softmax mechanism."""

        num_kv_heads: int | None = None
        """Heads of keys and values, each shared by neighbouring query heads (None: num_heads)."""
        rope: bool = False
        """Whether queries and keys are rotated by their positions."""
        rope_base: float = 10000.0
        """Base of the rotary frequencies."""
        rope_fraction: float = later(1.0)
        """Fraction of each head's channels to rotate, from the first channel on."""
        rope_scaling: RopeScaling | None = later(None)
        """Change of the rotary frequencies for longer sequences (None: none)."""
        score_scale: float | None = later(None)
        """Factor on the products of queries and keys (None: 1 / sqrt(K))."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
                raise ValueError(
                    f"num_kv_heads must divide num_heads, got num_kv_heads={self.num_kv_heads}, "
                    f"num_heads={self.num_heads}"
                )
            if not 0 < self.rope_fraction <= 1:
                raise ValueError(f"rope_fraction must be above 0 and at most 1, got {self.rope_fraction}")
            rotated = rotated_channels(self.channels, self.rope_fraction)
            if self.rope and (rotated % 2 or not rotated):
                own = self.head_dim is None and self.rope_fraction == 1
                what = "dim / num_heads" if own else "rope_fraction * head_dim"
                raise ValueError(f"rope needs an even head size, got {what} = {rotated}")
            if self.score_scale is not None and not self.score_scale > 0:
                raise ValueError(f"score_scale must be above 0, or None, got {self.score_scale}")
            if self.rope_base <= 0:
                raise ValueError(f"rope_base must be positive, got {self.rope_base}")

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
