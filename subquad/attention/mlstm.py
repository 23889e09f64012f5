"""mLSTM: a matrix memory with an exponential input gate (Beck et al. 2024, arXiv:2405.04517, equations 19 to 27).

    S_t = f_t S_{t-1} + i_t k_t (x) v_t,    n_t = f_t n_{t-1} + i_t k_t,    o_t = q_t S_t / max(|q_t . n_t|, 1)
    i_t = exp(w_i x_t + b_i),    f_t = sigmoid(w_f x_t + b_f),    y_t = W_o (norm(o_t) * sigmoid(W_r x_t))

i and f are one number per head, and q = W_q x / sqrt(K) (the paper divides k instead). i may overflow, so the sums are
stored divided by exp(m_t), with m_t = max(log f_t + m_{t-1}, log i_t), by a scan with decays exp(log f_t + m_{t-1} -
m_t) and inputs exp(log i_t - m_t) k_t, whose last value channel holds n. The bound 1 becomes exp(-m_t). Nothing else
depends on m, so it has no gradient. The norm is a layer norm of each head. The paper lets f be an exponential too; it
is a sigmoid here, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention, join, takes_options
from subquad.attention.memories.running_softmax import Tensors, is_future
from subquad.attention.past import Past
from subquad.attention.recurrent import RecurrentConfig, add_projections, heads_of
from subquad.ops import gated_scan
from subquad.ops.backends import without_autocast
from subquad.ops.precision import at_least_float32
from subquad.ops.softmax import EMPTY

LEAST_DIVISOR = 1e-6
"""Least divisor of the sums over exp(m), as in the authors' code: where exp(-m) is smaller, |q . n| may be zero."""


class Mlstm(Attention):
    """Linear attention with exponential input gates and a data-dependent decay of each head."""

    name = "mlstm"
    summary = "every earlier token, with input and forget gates"
    paper = "Beck et al. 2024, arXiv:2405.04517"
    sees_order = True
    is_distribution = False

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentConfig):
        """Options of the mLSTM."""

        norm_eps: float = 1e-5
        """Added to the variance by whose root a head's output is divided."""

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_projections(self, config)
        self.norm_weight = nn.Parameter(torch.ones(config.values * config.num_heads))
        self.input_forget = nn.Linear(config.dim, 2 * config.num_heads, bias=False)
        # From 3 to 6; transformers, which loads models on the device meta, keeps torch.linspace from it.
        forget_H = 3 + 3 * torch.arange(config.num_heads) / max(1, config.num_heads - 1)
        self.input_forget_bias = nn.Parameter(torch.cat([0.1 * torch.randn(config.num_heads), forget_H]))
        self.gating = nn.Linear(config.dim, config.values * config.num_heads, bias=config.bias)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the sums over exp(m)."""
        q_BHTK, k_BHTK, v_BHTV = heads_of(self, x_BTD)
        gates_BTC = at_least_float32(self.input_forget(x_BTD)) + self.input_forget_bias
        log_i_BHT, z_BHT = gates_BTC.mT.chunk(2, 1)
        v_BHTV = at_least_float32(past.values(v_BHTV))
        (sums,) = past.keep(sums=ExponentialGates(k_BHTK, v_BHTV, log_i_BHT, F.logsigmoid(z_BHT)))
        return sums.read(q_BHTK * self.config.keys**-0.5)

    def finish(self, y_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return `W_o (norm(y) * sigmoid(W_r x))`, with a layer norm of each head."""
        weight_H1V = self.norm_weight.to(y_BHTV.dtype).view(-1, 1, self.config.values)
        y_BHTV = F.layer_norm(y_BHTV, y_BHTV.shape[-1:], eps=self.config.norm_eps) * weight_H1V
        y_BTC = join(y_BHTV.to(x_BTD.dtype)) * self.gating(x_BTD).sigmoid()
        return self.out(F.dropout(y_BTC, self.config.dropout, self.training))


@dataclass(frozen=True, eq=False)
class ExponentialGates:
    """What tokens write: keys, values, and the logarithms of both gates `[B, H, T]`; `read(q)` gives o.

    The state is m `[B, H, 1]` and the sums `[B, H, K, V + 1]`, S and n, over exp(m).
    """

    k: Tensor
    v: Tensor
    log_i: Tensor
    log_f: Tensor

    slots: ClassVar[tuple[str, ...]] = ("_max", "")
    empty: ClassVar[tuple[float, ...]] = (0.0, EMPTY, 0.0)

    def read(self, q_BHTK: Tensor, before: Tensors | None, at: Past) -> tuple[Tensor, Tensors]:
        """Return the outputs and the state after these tokens."""
        k, v, log_i, log_f = self.k, self.v, self.log_i, self.log_f
        if at.mask is not None:  # m is kept over padding, as the scan keeps its state
            log_i = log_i.masked_fill(~at.mask[:, None], EMPTY)
            log_f = log_f.masked_fill(~at.mask[:, None], 0.0)
        max_BH1, sums = (None, None) if before is None else before
        if max_BH1 is None:
            max_BH1 = log_i.new_full((*log_i.shape[:2], 1), EMPTY, dtype=torch.float64)
        inputs_BHT1, decays_BHT1, max_BHT1 = over_maximum(log_i, log_f, max_BH1)
        v1 = F.pad(v, (0, 1), value=1.0)
        y_BHTV, sums = gated_scan(q_BHTK, k * inputs_BHT1, v1, decays_BHT1, state=sums, mask=at.mask)
        last_BH1 = torch.cat([max_BH1, max_BHT1[..., 0]], -1)[..., -1:].clone()
        return y_BHTV[..., :-1] / divisor(y_BHTV[..., -1:], max_BHT1), (last_BH1, sums)

    def literal(self, q_BHTK: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights and the values.

        `w_ts = q_t . k_s exp(d_ts - m_t) / max(|sum_s ..|, exp(-m_t))`, as in the paper's parallel form: d_ts is the
        logarithm of `i_s f_{s+1} .. f_t`, and m_t the largest of a row.
        """
        k, v, log_i, log_f = self.k, self.v, self.log_i, self.log_f
        G_BHT = log_f.cumsum(-1)
        d_BHTS = G_BHT[..., None] + (log_i - G_BHT)[..., None, :]
        d_BHTS = d_BHTS.masked_fill(is_future(d_BHTS.shape[-1], d_BHTS.device), EMPTY)
        max_BHT1 = F.pad(d_BHTS, (0, 1), value=EMPTY).amax(-1, keepdim=True).detach()
        w_BHTS = (at_least_float32(q_BHTK) @ at_least_float32(k).mT) * (d_BHTS - max_BHT1).exp()
        return w_BHTS / divisor(w_BHTS.sum(-1, keepdim=True), max_BHT1) @ v

    def summary(self) -> Tensors:
        """Return the sum of log f, m and the sums of these tokens alone."""
        return sums_of(self.k, F.pad(self.v, (0, 1), value=1.0), self.log_i, self.log_f)

    def merge(self, earlier: Tensors, later: Tensors) -> Tensors:
        """Return the summary of the tokens of both."""
        (g_1, m_1, s_1), (g_2, m_2, s_2) = earlier, later
        m_1, m_2 = g_2 + m_1.detach(), m_2.detach()
        m = torch.maximum(m_1, m_2).detach()
        share_1, share_2 = ((x - m).exp().to(s_1.dtype)[..., None] for x in (m_1, m_2))
        return g_1 + g_2, m, share_1 * s_1 + share_2 * s_2

    def begin(self, summary: Tensors) -> Tensors:
        """Return the state of a summary."""
        return summary[1].detach(), summary[2]


def over_maximum(log_i_BHT: Tensor, log_f_BHT: Tensor, max_BH1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `exp(log i_t - m_t)`, `log f_t + m_{t-1} - m_t` and `m_t`, each `[B, H, T, 1]`, from m before the tokens.

    With G the sum of log f, `m_t = G_t + M_t` where M is the running maximum of `log i - G`: the differences are those
    of M, which never falls, so that rounding makes no decay larger than 1. The sums run over the whole sequence and
    only their differences are used, so they are float64.
    """
    G_BHT = log_f_BHT.detach().double().cumsum(-1)
    at_BHT = log_i_BHT.detach() - G_BHT
    M_BHN = torch.cat([max_BH1, at_BHT], -1).cummax(-1).values
    inputs = with_gradient_of(log_i_BHT, at_BHT - M_BHN[..., 1:]).exp()
    # The first token decays sums that are zero: log 1, since beside -2^100 a scan would round the other logarithms.
    steps_BHT = (M_BHN[..., :-1] - M_BHN[..., 1:]).masked_fill(M_BHN[..., :-1] <= EMPTY, 0.0)
    decays = with_gradient_of(log_f_BHT, steps_BHT)
    return inputs[..., None], decays[..., None], (G_BHT + M_BHN[..., 1:])[..., None]


def with_gradient_of(x: Tensor, value: Tensor) -> Tensor:
    """Return `value`, which differs from x by a constant."""
    return value.to(x.dtype) + (x - x.detach())


def divisor(total_BHT1: Tensor, max_BHT1: Tensor) -> Tensor:
    """Return `max(|total|, exp(-m))`, at least `LEAST_DIVISOR`."""
    return torch.maximum(total_BHT1.abs(), (-max_BHT1).exp().clamp(min=LEAST_DIVISOR).to(total_BHT1.dtype))


@without_autocast
def sums_of(k_BHTK: Tensor, v_BHTV: Tensor, log_i_BHT: Tensor, log_f_BHT: Tensor) -> Tensors:
    """Return the sum of log f, m, both `[B, H, 1]`, and the sums over exp(m) that these tokens alone make."""
    G_BHT = log_f_BHT.double().cumsum(-1)
    d_BHT = G_BHT[..., -1:] - G_BHT + log_i_BHT
    max_BH1 = d_BHT.amax(-1, keepdim=True).detach()
    after_BHT1 = (d_BHT - max_BH1).exp().to(v_BHTV.dtype)[..., None]
    return G_BHT[..., -1:], max_BH1, (k_BHTK * after_BHT1).mT @ v_BHTV
