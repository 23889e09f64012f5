"""The base of recurrences with decays or a delta rule: projections, short convolutions, a norm and a gate of each head.

Shape letters: B batch, T tokens, D model width, H heads, K key channels, V value channels, C channels of all heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention
from subquad.attention.recurrence import Recurrence, at_least_float32
from subquad.attention.scanned import ScannedAttention, real_mask, seen_after
from subquad.attention.sharing import added
from subquad.config import later
from subquad.layers.convolution import ShortConvolution
from subquad.parallel import Sent, active_group
from subquad.parallel.exchange import earlier, last_before, sent_for_earlier
from subquad.state import State

L2_EPS = 1e-6
"""Added to the squared length of queries and keys that are divided by their length."""
MOST_LOG_RATE = 60.0
"""Largest a of a decay's rate exp(a): beyond, every step above 1e-22 forgets everything, and exp(a) would overflow."""


class Projected(NamedTuple):
    """Queries, keys and values of all heads, after the short convolution, and the convolution's next state."""

    q_BHTK: Tensor
    k_BHTK: Tensor
    v_BHTV: Tensor
    last_BSC: Tensor | None


class RecurrentAttention(ScannedAttention):
    """`y_t = W_o (norm(o_t) * gate(x_t))`, with o the outputs of a gated or delta scan; subclasses say which."""

    parallel = True
    sees_order = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        """Options of a recurrence."""

        dropout: float = 0.0
        """Dropout on the heads' normed outputs, in training (single weights are never formed)."""
        key_channels: int | None = None
        """Channels K of a head's queries and keys (None: the paper's share of dim / num_heads)."""
        value_channels: int | None = None
        """Channels V of a head's values (None: the paper's share of dim / num_heads)."""
        norm_eps: float = later(1e-6)
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

    config: Config

    def __init__(self, config: Config, *, taps: int = 0, taps_bias: bool = False) -> None:
        super().__init__(config)
        self.query = self.projection(config.keys * config.key_heads)
        self.key = self.projection(config.keys * config.key_heads)
        self.norm_weight = self.new_norm_weight()
        channels = 2 * config.key_heads * config.keys + config.num_heads * config.values
        self.convolution = ShortConvolution(channels, taps, bias=taps_bias) if taps else None

    def head_channels(self) -> int:
        """Channels V of a head."""
        return self.config.values

    def output_projection(self) -> nn.Linear:
        """Return a linear map from the heads' outputs to the model width."""
        return nn.Linear(self.config.values * self.config.num_heads, self.config.dim, bias=self.config.bias)

    def new_norm_weight(self) -> nn.Parameter | None:
        """Return the weights of the norm, the same for all heads (None: it has none)."""
        return nn.Parameter(torch.ones(self.config.values))

    def normed(self, y_BHTV: Tensor) -> Tensor:
        """Divide a head's outputs by their root mean square, and multiply them by the weights."""
        assert self.norm_weight is not None
        return F.rms_norm(y_BHTV, y_BHTV.shape[-1:], self.norm_weight.to(y_BHTV.dtype), self.config.norm_eps)

    def projected(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> Projected:
        """Return queries, keys and values; with a convolution, `silu` of their filtered channels."""
        projections = self.query, self.key, self.value
        heads = self.config.key_heads, self.config.key_heads, self.config.num_heads
        if self.convolution is None:
            q, k, v = (self.split(project(x_BTD), n) for project, n in zip(projections, heads, strict=True))
            return Projected(q, k, v, None)
        z_BTC = torch.cat([project(x_BTD) for project in projections], -1)
        before_BSC = self.convolution_before(z_BTC, state)
        y_BTC = F.silu(self.convolution(z_BTC, before_BSC))
        parts = y_BTC.split([project.out_features for project in projections], -1)
        q, k, v = (self.split(y, n) for y, n in zip(parts, heads, strict=True))
        return Projected(q, k, v, self.convolution.last(z_BTC, before_BSC, lengths_B))

    def convolution_before(self, z_BTC: Tensor, state: State | None) -> Tensor | None:
        """Return the tokens before these that the convolution reads: the state's, or those of earlier ranks."""
        if state is not None:
            return state.tensor("convolution")
        group = active_group()
        if group is None or self.convolution is None:
            return None
        spans = last_before(self.convolution.width - 1, z_BTC.shape[1], group.size)
        return earlier(spans, group, z_BTC[:, None])[0][:, 0]

    def recurrence(
        self, x_BTD: Tensor, state: State | None = None, lengths_B: Tensor | None = None
    ) -> tuple[Recurrence, Tensor | None]:
        """Return the scan of these tokens, and the convolution's next state (None without one)."""
        raise NotImplementedError(f"{type(self).__name__} must define recurrence (RecurrentAttention is abstract)")

    def gate(self, x_BTD: Tensor) -> Tensor | None:
        """Return what a head's normed outputs are multiplied by, `[B, T, H V]`, or None."""
        return None

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Mix by the scan, and apply norm and gate."""
        tokens = x_BTD.shape[1]
        scan, last_BSC = self.recurrence(x_BTD, state, lengths_B)
        group = active_group()
        before = state.tensor("sums") if state is not None else None if group is None else scan.before(group)
        y_BHTV, sums = scan.run(before, real_mask(lengths_B, tokens))
        begun = State({"seen": group.offset(tokens)}) if state is None and group is not None else state
        entries: dict[str, Tensor | int | State] = {"seen": seen_after(begun, tokens, lengths_B), "sums": sums}
        if last_BSC is not None:
            entries["convolution"] = last_BSC
        return self.finish(y_BHTV, x_BTD), State(entries, self.config_hash)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (norm(y) * gate(x))`."""
        y_BTC, gate_BTC = self.join(self.normed(y_BHTV).to(x_BTD.dtype)), self.gate(x_BTD)
        y_BTC = y_BTC if gate_BTC is None else y_BTC * gate_BTC
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return the weights of the scan, in float32 or wider."""
        return self.recurrence(x_BTD)[0].weights()

    def values(self, x_BTD: Tensor) -> Tensor:
        """Return the values of the scan."""
        return self.recurrence(x_BTD)[0].v_BHTV

    def definition(self, x_BTD: Tensor) -> Tensor:
        """Return `W_o (norm(weights @ values) * gate(x))`, which `forward` must equal. Quadratic."""
        return self.finish(self.weights(x_BTD) @ at_least_float32(self.values(x_BTD)), x_BTD)

    @property
    def is_distribution(self) -> bool:
        """False: weights may be negative, and decay."""
        return False

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of the scans' summaries, and of the tokens that the convolutions read."""
        config = self.config
        parts = [Recurrence.sent(config.num_heads, config.keys, config.values, self.decays, ranks)]
        if self.convolution is not None:
            spans = last_before(self.convolution.width - 1, tokens, ranks)
            parts.append(sent_for_earlier(spans, tokens, 4 * len(self.convolution.weight)))
        return added(*parts)

    @property
    def decays(self) -> int:
        """Decays of a head in the summary for other ranks: 1, K, or 0 for a delta scan, which sends a matrix."""
        return 1


class DeltaAttention(RecurrentAttention):
    """The delta scan with short convolutions, `b_t = r sigmoid(W_b x_t)`, queries and keys of length 1."""

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
        """Return the delta scan."""
        q, k, v, last_BSC = self.projected(x_BTD, state, lengths_B)
        beta_BHT1 = self.config.beta_range * self.split(self.strength(x_BTD).sigmoid())
        q, k = of_unit_length(q) * self.config.keys**-0.5, of_unit_length(k)
        return Recurrence(q, k, v, self.log_decays(x_BTD), beta_BHT1), last_BSC

    def log_decays(self, x_BTD: Tensor) -> Tensor | None:
        """Return the logarithms of the decays; None: nothing fades."""
        return None


def of_unit_length(x_BHTK: Tensor) -> Tensor:
    """`x / sqrt(|x|^2 + 1e-6)` over the channels of a head, in float32 or wider."""
    x = at_least_float32(x_BHTK)
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


class DecayRate(nn.Module):
    """`log f = -exp(a) softplus(z + c)` with learned a (one a head) and c, in float32 or wider, as Mamba has it.

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
