"""ELiTA, efficient linear-time attention (Sharma 2023, github.com/acosharma/elita-transformer, "Attention2"). Per head:

    y_t = (exp(k2 . x_t) v_t + exp(p2_t + k3 . x_t) sum_{s <= t} X_s v_s)
          / (exp(k2 . x_t)   + exp(p2_t + k3 . x_t) sum_{s <= t} X_s),       X_s = exp(k1 . x_s + p1_s)

with the position terms p1_s = c . sin(a1 s / N + b1) and p2_t = c . sin(a2 t / N + b2), tokens counted from 0. Divided
by the whole denominator this is a gate between a running softmax with one latent and the token itself,

    y_t = g_t mu_t + (1 - g_t) v_t,    g_t = sigmoid(p2_t + k3 . x_t + L_t - k2 . x_t),

where mu_t is the mean of v_s with weights softmax_{s <= t}(k1 . x_s + p1_s) and L_t the logarithm of their normaliser.
So a query does not select among earlier tokens: k3 and p2 only weigh all of them against the token itself. The form
with the gate is computed, since it cannot overflow; the author's code clips the three exponents to +-20 instead.

Where the sources disagree: the equations and the code give the token a slot of its own beside its place in the sum, as
here; the text ("Intuition") adds k2 . x_t to the diagonal logit, `self_term="diagonal"`. Then p2 and k3, equal along a
row, cancel and are left out, and the gate is between the tokens before t and the token itself,

    y_t = g_t mu_{t-1} + (1 - g_t) v_t,    g_t = sigmoid(L_{t-1} - k1 . x_t - p1_t - k2 . x_t).

The equations have t / N, the code t / (N - 1), an option. N is the length of the sequence there, so that a longer one
changes all earlier outputs; here it is the fixed `horizon`, beyond which the sines go on. The term k3 came after the
published results: `query_term=False` leaves it out. Vectors begin uniform in +-0.05, as in the code, so that all
positions are almost equal at first. The code's one layer norm for all places, without weights, is `norm:
unscaled_layer` of a model.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention, split, takes_options
from subquad.attention.memories.gated_mean import GatedEarlier, GatedMean
from subquad.attention.past import Past
from subquad.layers.positions import positions
from subquad.ops.precision import widened
from subquad.tracing import has_values

logger = logging.getLogger(__name__)
INIT = 0.05


@functools.cache
def _warn_beyond(horizon: int) -> None:
    logger.warning("elita reads beyond its horizon of %d tokens: position terms are extrapolated", horizon)


class Elita(Attention):
    """A content-weighted mean of all earlier tokens, and a gate between it and the token itself."""

    name = "elita"
    summary = "a mean of the earlier tokens, and a gate"
    paper = "Sharma 2023, github.com/acosharma/elita-transformer"
    sees_order = True
    has_position_terms = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Attention.Config):
        """Options of ELiTA."""

        dropout: float = 0.0
        """Dropout on the two weights of the gate, in training."""
        horizon: int = 2048
        """N, the length to which position terms are scaled; later tokens are extrapolated."""
        positions: bool = True
        """Whether the logits have the position terms p1 and p2."""
        position_width: int = 16
        """Number of sines in each position term."""
        time: Literal["i/N", "i/(N-1)"] = "i/N"
        """Time of token i (from 0): as in the equations, or as in the code."""
        query_term: bool = True
        """Whether the gate has the term k3 . x_t."""
        self_term: Literal["slot", "diagonal"] = "slot"
        """How k2 . x_t weighs the token itself: as the logit of a second slot, or added to its own logit. Then p2, k3
        cancel, and no backend fuses the gate with the running softmax."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(horizon=2, position_width=1)
            if self.self_term == "diagonal" and not self.query_term:
                raise ValueError("query_term=False has no effect with self_term='diagonal', where it cancels")

    config: Config
    query: nn.Linear | None  # type: ignore[assignment]

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        heads = config.num_heads
        self.channels = config.dim // heads
        self.value = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = nn.Linear(config.dim, heads, bias=config.bias)
        self.self_key = nn.Linear(config.dim, heads, bias=config.bias)
        self.diagonal = config.self_term == "diagonal"
        self.query = nn.Linear(config.dim, heads, bias=config.bias) if config.query_term and not self.diagonal else None
        for project in (self.key, self.self_key, self.query):
            if project is not None:
                nn.init.uniform_(project.weight, -INIT, INIT)
        if config.positions:
            shape = (1 if self.diagonal else 2, heads, config.position_width)
            self.frequency = nn.Parameter(torch.empty(shape).uniform_(-INIT, INIT))
            self.phase = nn.Parameter(torch.empty(shape).uniform_(-INIT, INIT))
            self.amplitude = nn.Parameter(torch.empty(heads, config.position_width).uniform_(-INIT, INIT))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the mean through the gate."""
        (v_BHTV,) = split(self.channels, self.value(x_BTD))
        key_BHT1, gate_BHT1 = self.logits(x_BTD, past.start)
        self.warn_on_seen(past.entries["seen"], x_BTD)
        memory = GatedEarlier if self.diagonal else GatedMean
        (mean,) = past.keep(mean=memory(key_BHT1, past.values(v_BHTV), self.dropout_p))
        return mean.read(gate_BHT1)

    def logits(self, x_BTD: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return `k1 . x + p1` and the gate's terms besides L, each `[B, H, T, 1]`, float32 or wider."""
        key_BTH, gate_BTH = widened(self.key(x_BTD), self.self_key(x_BTD))
        gate_BTH = -gate_BTH if self.query is None else self.query(x_BTD) - gate_BTH
        if self.config.positions:
            p1_BTH, *p2_BTH = self.positions_from(start, x_BTD.shape[1]).to(key_BTH.dtype)
            key_BTH, gate_BTH = key_BTH + p1_BTH, sum(p2_BTH, gate_BTH)
        if self.diagonal:
            gate_BTH = gate_BTH - key_BTH
        return key_BTH.transpose(1, 2)[..., None], gate_BTH.transpose(1, 2)[..., None]

    def positions_from(self, start: int | Tensor, tokens: int) -> Tensor:
        """Return p1 and p2 (diagonal: p1 alone) of `tokens` tokens from `start` on: `[2, B or 1, T, H]`, float32 or
        wider."""
        frequency, phase, amplitude = widened(self.frequency, self.phase, self.amplitude)
        i_BT = positions(start, tokens, amplitude.device)
        span = self.config.horizon if self.config.time == "i/N" else self.config.horizon - 1
        time_BT = (i_BT.double() / span).to(amplitude.dtype)
        angles = frequency[:, None, None] * time_BT[None, ..., None, None] + phase[:, None, None]
        return (angles.sin() * amplitude).sum(-1)

    def position_terms(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return p1 and p2 of tokens 0 to `tokens` - 1, each `[H, T]`; zeros for those that the layer lacks."""
        if not self.config.positions:
            zeros_HT = self.key.weight.new_zeros(self.config.num_heads, tokens)
            return zeros_HT, zeros_HT
        p1_HT, *p2_HT = self.positions_from(0, tokens)[:, 0].mT
        return p1_HT, sum(p2_HT, torch.zeros_like(p1_HT))

    def warn_on_seen(self, seen: int | Tensor, x_BTD: Tensor) -> None:
        """Call `warn_on_length`, except on an accelerator, where reading the count would wait for the device."""
        if not has_values(x_BTD):
            return
        if isinstance(seen, int):
            self.warn_on_length(seen)
        elif seen.device.type == "cpu" and seen.numel():
            self.warn_on_length(int(seen.max()))

    def warn_on_length(self, tokens: int) -> None:
        """Log once for all layers of this horizon that positions are extrapolated."""
        if self.config.positions and tokens > self.config.horizon:
            _warn_beyond(self.config.horizon)
