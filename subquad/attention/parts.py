"""Parts that mechanisms hold: projections to heads, with their biases, norms and rotations.

Shape letters: B batch, T tokens, C channels of all heads, H heads, K channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, split
from subquad.attention.divided import check_even
from subquad.attention.memories.key_values import KeyValues, Sight
from subquad.attention.past import Past
from subquad.layers.norm import ZeroCentredRMSNorm
from subquad.layers.positions import positions, rotate
from subquad.layers.scaling import RopeScaling, rotated_channels


@dataclass(frozen=True, kw_only=True)
class HeadedConfig(Attention.Config):
    """Options of projections to queries, keys and values."""

    head_dim: int | None = None
    """Channels K of a head (None: dim / num_heads)."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised over each head's channels, before the rotation."""
    norm_eps: float | None = None
    """Epsilon of that norm, added to the mean square (None: 1e-6)."""
    zero_centred: bool = False
    """Whether that norm multiplies by 1 + its weights, and not by its weights (Qwen3-Next)."""
    qkv_bias: bool | None = None
    """Whether queries, keys and values have a bias (None: the value of bias)."""
    out_bias: bool | None = None
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


def projection(config: HeadedConfig, heads: int) -> nn.Linear:
    """Return a linear map from the model width to `heads` heads of queries, keys or values."""
    bias = config.bias if config.qkv_bias is None else config.qkv_bias
    return nn.Linear(config.dim, heads * config.channels, bias=bias)


def output_projection(config: HeadedConfig) -> nn.Linear:
    """Return a linear map from the outputs of all heads to the model width."""
    bias = config.bias if config.out_bias is None else config.out_bias
    return nn.Linear(config.channels * config.num_heads, config.dim, bias=bias)


def head_norm(config: HeadedConfig) -> nn.RMSNorm | None:
    """Return the norm of a head's queries or keys; None unless `qk_norm` is set."""
    kind = ZeroCentredRMSNorm if config.zero_centred else HeadNorm
    return kind(config.channels, eps=config.norm_eps or 1e-6) if config.qk_norm else None


def normed(x_BHTK: Tensor, norm: Any) -> Tensor:
    """Return the heads, normed if there is a norm."""
    return x_BHTK if norm is None else norm(x_BHTK)


class HeadNorm(nn.RMSNorm):
    """The norm of each head's channels, in the dtype of x: under autocast it is not that of the weights."""

    def forward(self, x_BHTK: Tensor) -> Tensor:
        """Return `x / sqrt(mean(x^2) + eps) * w`."""
        return F.rms_norm(x_BHTK, self.normalized_shape, self.weight.to(x_BHTK.dtype), self.eps)


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(HeadedConfig):
    """Options of a softmax mechanism."""

    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by neighbouring query heads (None: num_heads)."""
    rope: bool = False
    """Whether queries and keys are rotated by their positions."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Fraction of each head's channels to rotate, from the first channel on."""
    rope_scaling: RopeScaling | None = None
    """Change of the rotary frequencies for longer sequences (None: none)."""
    score_scale: float | None = None
    """Factor on the products of queries and keys (None: 1 / sqrt(K))."""

    @property
    def key_heads(self) -> int:
        """Heads G of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def query_share(self) -> int:
        """Query heads that share a key head, H / G."""
        return self.num_heads // self.key_heads

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}"
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


@dataclass(frozen=True, kw_only=True)
class SinkConfig(SoftmaxConfig):
    """Options of attention sinks."""

    sinks: int = 0
    """First tokens of its document that every later token sees too, kept in the state for ever (causal form only).
    A sink keeps its own rotary position. The paper numbers the positions inside its cache, so that they depend on
    what the cache holds when a token is read; what a layer computes must not depend on how a sequence is cut."""
    learned_sink: bool = False
    """Whether each head has a learned logit that takes part in the softmax and has no value, so that a row of
    weights sums to less than one (gpt-oss, OpenAI 2025, arXiv:2508.10925). It begins at 0: as one more key and
    value of zeros, the zero sink of arXiv:2309.17453, section 3.3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(sinks=0)
        if self.sinks and not self.causal:
            raise ValueError(
                "sinks are for the causal form, whose state leaves the other tokens behind; for first tokens that "
                f"a bidirectional layer sees take longformer, got sinks={self.sinks}, causal=False"
            )


def check_latents(num_latents: int | None, num_heads: int) -> None:
    """Raise `ValueError` if the latents aren't a multiple of the heads."""
    if num_latents is not None and (num_latents < 1 or num_latents % num_heads):
        raise ValueError(
            "num_latents must be a positive multiple of num_heads (heads share the latents), "
            f"got num_latents={num_latents}, num_heads={num_heads}"
        )


def add_softmax_projections(layer: Any, config: SoftmaxConfig) -> None:
    """Give a layer the linear maps `query`, `key`, `value` and `out`, and the norms of queries and keys."""
    layer.query = projection(config, config.num_heads)
    layer.key, layer.value = projection(config, config.key_heads), projection(config, config.key_heads)
    layer.out = output_projection(config)
    layer.query_norm, layer.key_norm = head_norm(config), head_norm(config)


def add_sink(layer: Any, config: SinkConfig) -> None:
    """Give a layer the logits of a learned sink (None without one), beside which rows sum to less than one.

        y_t = sum_s exp(q_t . k_s / sqrt(K)) v_s / (exp(a) + sum_s exp(q_t . k_s / sqrt(K)))

    With lse the logsumexp of the scores, that is the softmax's output times sigmoid(lse - a).
    """
    layer.sink_logits = nn.Parameter(torch.zeros(config.num_heads)) if config.learned_sink else None
    layer.is_distribution = not config.learned_sink


def softmax_heads(layer: Any, x_BTD: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries `[B, H, T, K]`, and keys and values `[B, G, T, K]`, of tokens from `start` on."""
    config: SoftmaxConfig = layer.config
    q_BHTK, k_BGTK, v_BGTK = split(config.channels, layer.query(x_BTD), layer.key(x_BTD), layer.value(x_BTD))
    check_even(layer, q_BHTK, k_BGTK, config.query_share)
    return queries(layer, q_BHTK, start), keys(layer, k_BGTK, start), v_BGTK


def queries(layer: Any, q_BHTK: Tensor, start: int | Tensor) -> Tensor:
    """Return the projected queries normed, scaled and rotated as the options say."""
    config: SoftmaxConfig = layer.config
    q_BHTK = normed(q_BHTK, layer.query_norm)
    if config.score_scale is not None:
        q_BHTK = q_BHTK * (config.score_scale * math.sqrt(config.channels))
    return rotated(config, q_BHTK, start)


def keys(layer: Any, k_BGTK: Tensor, start: int | Tensor) -> Tensor:
    """Return the projected keys normed and rotated as the options say."""
    return rotated(layer.config, normed(k_BGTK, layer.key_norm), start)


def rotated(config: SoftmaxConfig, x_BHTK: Tensor, start: int | Tensor) -> Tensor:
    """Rotate queries or keys by their positions if `rope` is set."""
    if not config.rope:
        return x_BHTK
    channels = rotated_channels(config.channels, config.rope_fraction)
    return rotate(x_BHTK, start, config.rope_base, channels=channels, scaling=config.rope_scaling)


def softmax_over(layer: Any, sight: Sight, x_BTD: Tensor, past: Past, sink_H: Tensor | None = None) -> Tensor:
    """Return softmax attention to the keys in sight: keep them, and read them."""
    q_BHTK, k_BGTK, v_BGTK = softmax_heads(layer, x_BTD, past.start)
    (near,) = past.keep(near=KeyValues(k_BGTK, past.values(v_BGTK), sight, layer.dropout_p, sink_H))
    return near.read(q_BHTK)


def instead_of_first(count: int, rows: Tensor, y: Tensor, start: int | Tensor) -> Tensor:
    """Return `y`, `[B, T, ...]` or `[B, H, T, ...]` from position `start` on, with `rows` for the first `count` tokens.

    `rows` are as many of these tokens as may be among a sequence's first ones.
    """
    C = rows.shape[-2]
    is_first_BC = positions(start, C, y.device) < count
    is_first = is_first_BC[:, None, :, None] if y.ndim == 4 else is_first_BC[..., None]
    return torch.cat([torch.where(is_first, rows, y[..., :C, :]), y[..., C:, :]], -2)


def divisible_heads(config: SoftmaxConfig, sight: Sight) -> tuple[int, ...]:
    """Return the numbers of query and key heads, which processes may divide if all heads see the same."""
    return (config.num_heads, config.key_heads) if len(sight.near) == 1 else ()
