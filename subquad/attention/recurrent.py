"""Parts of recurrences with decays or a delta rule: options, projections, short convolutions, norms and decays.

Shape letters: B batch, T tokens, D model width, H heads, K key channels, V value channels, C channels of all heads, F =
1 or K decays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, split
from subquad.attention.past import Past
from subquad.layers.convolution import ShortConvolution
from subquad.ops.precision import at_least_float32

L2_EPS = 1e-6
"""Added to the squared length of queries and keys that are divided by their length."""
MOST_LOG_RATE = 60.0
"""Largest a of a decay's rate exp(a), which would overflow. At this rate a step of 1e-22 already forgets everything."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Attention.Config):
    """Options of a recurrence."""

    dropout: float = 0.0
    """Dropout on the heads' normed outputs, in training (single weights are never formed)."""
    key_channels: int | None = None
    """Channels K of a head's queries and keys (None: the paper's share of dim / num_heads)."""
    value_channels: int | None = None
    """Channels V of a head's values (None: the paper's share of dim / num_heads)."""
    norm_eps: float = 1e-6
    """Added to the mean square by which a head's output is divided."""

    def check_heads(self) -> None:
        """Raise `ValueError` if the heads don't divide the model width, and their channels are not given."""
        if self.key_channels is None or self.value_channels is None:
            super().check_heads()
        else:
            self.check_least(dim=1, num_heads=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_channels", "value_channels"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be above 0, got {self.norm_eps}")

    @property
    def keys(self) -> int:
        """Channels K of a head's queries and keys."""
        return self.key_channels or self.dim // self.num_heads

    @property
    def values(self) -> int:
        """Channels V of a head's values."""
        return self.value_channels or self.dim // self.num_heads

    @property
    def key_heads(self) -> int:
        """Heads G of queries and keys, each shared by H / G neighbouring heads: by default all H."""
        return self.num_heads


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrentConfig):
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


def add_projections(layer: Any, config: RecurrentConfig) -> None:
    """Give a layer its linear maps `value`, `out`, `query` and `key`."""
    values = config.values * config.num_heads
    layer.value = nn.Linear(config.dim, values, bias=config.bias)
    layer.out = nn.Linear(values, config.dim, bias=config.bias)
    layer.query = nn.Linear(config.dim, config.keys * config.key_heads, bias=config.bias)
    layer.key = nn.Linear(config.dim, config.keys * config.key_heads, bias=config.bias)


def add_delta_rule(layer: Any, config: DeltaConfig) -> None:
    """Give a layer the projections, the norm's weights, the short convolution and the strengths of a delta rule."""
    add_projections(layer, config)
    layer.norm_weight = nn.Parameter(torch.ones(config.values))
    layer.convolution = convolution_of(config, config.convolution)
    layer.strength = nn.Linear(config.dim, config.num_heads, bias=False)


def convolution_of(config: RecurrentConfig, taps: int, *, bias: bool = False) -> ShortConvolution:
    """Return the short convolution of the channels of queries, keys and values."""
    channels = 2 * config.key_heads * config.keys + config.num_heads * config.values
    return ShortConvolution(channels, taps, bias=bias)


def heads_of(layer: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries and keys `[B, G, T, K]` and the values `[B, H, T, V]`."""
    q_BGTK, k_BGTK = split(layer.config.keys, layer.query(x_BTD), layer.key(x_BTD))
    (v_BHTV,) = split(layer.config.values, layer.value(x_BTD))
    return q_BGTK, k_BGTK, v_BHTV


def convolved_heads(layer: Any, x_BTD: Tensor, past: Past) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as `heads_of`, after the short convolution and silu."""
    projections = layer.query, layer.key, layer.value
    z_BTC = torch.cat([project(x_BTD) for project in projections], -1)
    z_BTC = F.silu(layer.convolution(past.extended("convolution", z_BTC, layer.convolution.width - 1)))
    q_BTC, k_BTC, v_BTC = z_BTC.split([project.out_features for project in projections], -1)
    q_BGTK, k_BGTK = split(layer.config.keys, q_BTC, k_BTC)
    (v_BHTV,) = split(layer.config.values, v_BTC)
    return q_BGTK, k_BGTK, v_BHTV


def delta_heads(layer: Any, x_BTD: Tensor, past: Past) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries of length `1 / sqrt(K)`, keys of length 1, values, and the strengths `r sigmoid(W_b x)`."""
    q_BGTK, k_BGTK, v_BHTV = convolved_heads(layer, x_BTD, past)
    (beta_BHT1,) = split(1, layer.strength(x_BTD).sigmoid())
    q_BGTK, k_BGTK = of_unit_length(q_BGTK) * layer.config.keys**-0.5, of_unit_length(k_BGTK)
    return q_BGTK, k_BGTK, v_BHTV, layer.config.beta_range * beta_BHT1


def rms_normed(y_BHTV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Divide a head's outputs by their root mean square, and multiply them by the weights."""
    return F.rms_norm(y_BHTV, y_BHTV.shape[-1:], weight_V.to(y_BHTV.dtype), eps)


def of_unit_length(x_BHTK: Tensor) -> Tensor:
    """`x / sqrt(|x|^2 + 1e-6)` over the channels of a head, in float32 or wider."""
    x = at_least_float32(x_BHTK)
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


class DecayRate(nn.Module):
    """`log f = -exp(a) softplus(z + c)` with learned a (one per head) and c, in float32 or wider, as in Mamba.

    exp(a) is drawn from [1, 16] and softplus(c), the step, log-uniformly from [0.001, 0.1] (Gu & Dao 2023,
    arXiv:2312.00752, section 3.6).
    """

    def __init__(self, heads: int, channels: int = 1) -> None:
        super().__init__()
        self.channels = channels
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        step = torch.empty(heads * channels).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.step_bias = nn.Parameter(step + (-torch.expm1(-step)).log())  # the inverse of softplus

    def forward(self, z_BTC: Tensor, limits: tuple[float, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Return the log decays and the steps `softplus(z + c)` within `limits`, both `[B, H, T, F]`, from `[B, T, H
        F]`."""
        z_BHTF = at_least_float32(z_BTC).unflatten(-1, (-1, self.channels)).transpose(1, 2)
        # Contiguous: the backward of F.softplus on transposed heads fails under aot_eager in torch 2.13.
        bias_H1F = at_least_float32(self.step_bias).view(-1, 1, self.channels)
        step_BHTF = F.softplus(z_BHTF.contiguous() + bias_H1F)
        step_BHTF = step_BHTF if limits is None else step_BHTF.clamp(*limits)
        rate_H = at_least_float32(self.log_rate).clamp(max=MOST_LOG_RATE).exp()
        return -rate_H[:, None, None] * step_BHTF, step_BHTF
