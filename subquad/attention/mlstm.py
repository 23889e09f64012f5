"""mLSTM: a matrix memory with an exponential input gate (Beck et al. 2024, arXiv:2405.04517, equations 19 to 27).

    S_t = f_t S_{t-1} + i_t k_t (x) v_t,    n_t = f_t n_{t-1} + i_t k_t,    o_t = q_t S_t / max(|q_t . n_t|, 1)
    i_t = exp(w_i x_t + b_i),    f_t = sigmoid(w_f x_t + b_f),    y_t = W_o (norm(o_t) * sigmoid(W_r x_t))

i and f are numbers of a head, and q = W_q x / sqrt(K) (the paper divides k instead). i may overflow, so the sums are
kept divided by exp(m_t), m_t = max(log f_t + m_{t-1}, log i_t): by a scan with decays exp(log f_t + m_{t-1} - m_t) and
inputs exp(log i_t - m_t) k_t, whose last value channel holds n. The bound 1 becomes exp(-m_t). Nothing else depends on
m, so it has no gradient. The norm is a layer norm of each head. The paper lets f be an exponential too; it is a sigmoid
here, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.recurrence import Recurrence, at_least_float32
from subquad.attention.recurrent import RecurrentAttention
from subquad.attention.scanned import is_future, real_mask, seen_after
from subquad.ops.backends import without_autocast
from subquad.ops.softmax import EMPTY
from subquad.parallel import ContextGroup, Sent, active_group
from subquad.parallel.exchange import prefix, sent_for_prefix
from subquad.state import State

LEAST_DIVISOR = 1e-6
"""Least divisor of the sums over exp(m), as in the authors' code: where exp(-m) is smaller, |q . n| may be zero."""


class Mlstm(RecurrentAttention):
    """Every earlier token, by a product with exponential input gates that fades by head as tokens say."""

    name = "mlstm"
    summary = "every earlier token, by gates that tokens open and close"
    paper = "Beck et al. 2024, arXiv:2405.04517"
    parallel = True

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentAttention.Config):
        """Options of the mLSTM."""

        norm_eps: float = 1e-5
        """Added to the variance by whose root a head's output is divided."""

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.input_forget = nn.Linear(config.dim, 2 * config.num_heads, bias=False)
        # From 3 to 6; transformers, which loads models on the device meta, keeps torch.linspace from it.
        forget_H = 3 + 3 * torch.arange(config.num_heads) / max(1, config.num_heads - 1)
        self.input_forget_bias = nn.Parameter(torch.cat([0.1 * torch.randn(config.num_heads), forget_H]))
        self.gating = self.projection(config.values * config.num_heads)

    def new_norm_weight(self) -> nn.Parameter:
        """Return the weights of the norm, one for each channel of all heads."""
        return nn.Parameter(torch.ones(self.config.values * self.config.num_heads))

    def normed(self, y_BHTV: Tensor) -> Tensor:
        """Return the layer norm of each head's outputs, times the weights (a group norm)."""
        assert self.norm_weight is not None
        weight_H1V = self.norm_weight.to(y_BHTV.dtype).view(-1, 1, self.config.values)
        return F.layer_norm(y_BHTV, y_BHTV.shape[-1:], eps=self.config.norm_eps) * weight_H1V

    def gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return log i and log f, `[B, H, T]`, in float32 or wider."""
        log_i_BHT, z_BHT = (at_least_float32(self.input_forget(x_BTD)) + self.input_forget_bias).mT.chunk(2, 1)
        return log_i_BHT, F.logsigmoid(z_BHT)

    def scaled(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `q / sqrt(K)`, k, and v with a last channel of ones, in float32 or wider."""
        q, k, v, _ = self.projected(x_BTD, None, None)
        return q * self.config.keys**-0.5, k, F.pad(at_least_float32(v), (0, 1), value=1.0)

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Mix by the gated scan of the sums over exp(m)."""
        tokens = x_BTD.shape[1]
        mask, group = real_mask(lengths_B, tokens), active_group()
        (q, k, v), (log_i, log_f) = self.scaled(x_BTD), self.gates(x_BTD)
        if mask is not None:  # m is kept over padding, as the scan keeps its state
            log_i, log_f = (x.masked_fill(~mask[:, None], fill) for x, fill in ((log_i, EMPTY), (log_f, 0.0)))
        max_BH1, sums = log_i.new_full((*log_i.shape[:2], 1), EMPTY, dtype=torch.float64), None
        if state is not None:
            max_BH1, sums = state.tensor("max"), state.tensor("sums")
        elif group is not None:
            max_BH1, sums = sums_before(k, v, log_i, log_f, group)
            state = State({"seen": group.offset(tokens)})
        inputs_BHT1, decays_BHT1, max_BHT1 = over_maximum(log_i, log_f, max_BH1)
        scan = Recurrence(q, k * inputs_BHT1, v, decays_BHT1)
        y_BHTV, sums = scan.run(sums, mask)
        last_BH1 = torch.cat([max_BH1, max_BHT1[..., 0]], -1)[..., -1:].clone()
        entries = {"seen": seen_after(state, tokens, lengths_B), "max": last_BH1, "sums": sums}
        y_BHTV = y_BHTV[..., :-1] / divisor(y_BHTV[..., -1:], max_BHT1)
        return self.finish(y_BHTV, x_BTD), State(entries, self.config_hash)

    def gate(self, x_BTD: Tensor) -> Tensor:
        """Return `sigmoid(W_r x)`."""
        return self.gating(x_BTD).sigmoid()

    def values(self, x_BTD: Tensor) -> Tensor:
        """Return the values."""
        return self.projected(x_BTD, None, None).v_BHTV

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `w_ts = q_t . k_s exp(d_ts - m_t) / max(|sum_s ..|, exp(-m_t))`, as in the paper's parallel form.

        d_ts is the logarithm of `i_s f_{s+1} .. f_t`, and m_t the largest of a row.
        """
        (q, k, _), (log_i, log_f) = self.scaled(x_BTD), self.gates(x_BTD)
        G_BHT = log_f.cumsum(-1)
        d_BHTS = G_BHT[..., None] + (log_i - G_BHT)[..., None, :]
        d_BHTS = d_BHTS.masked_fill(is_future(x_BTD.shape[1], x_BTD.device), EMPTY)
        max_BHT1 = F.pad(d_BHTS, (0, 1), value=EMPTY).amax(-1, keepdim=True).detach()
        w_BHTS = (at_least_float32(q) @ at_least_float32(k).mT) * (d_BHTS - max_BHT1).exp()
        return w_BHTS / divisor(w_BHTS.sum(-1, keepdim=True), max_BHT1)

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of the sums, of m and of the forget gates' product."""
        sums = 4 * self.config.keys * (self.config.values + 1)
        return sent_for_prefix(self.config.num_heads * (sums + 2 * 8), ranks)


def over_maximum(log_i_BHT: Tensor, log_f_BHT: Tensor, max_BH1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `exp(log i_t - m_t)`, `log f_t + m_{t-1} - m_t` and `m_t`, each `[B, H, T, 1]`, from m before the tokens.

    With G the sum of log f, `m_t = G_t + M_t` where M is the running maximum of `log i - G`: the differences are those
    of M, which never falls, so that rounding makes no decay larger than 1. Sums run over the whole sequence, and only
    their differences count: they are float64.
    """
    G_BHT = log_f_BHT.detach().double().cumsum(-1)
    at_BHT = log_i_BHT.detach() - G_BHT
    M_BHN = torch.cat([max_BH1, at_BHT], -1).cummax(-1).values
    inputs = with_gradient_of(log_i_BHT, at_BHT - M_BHN[..., 1:]).exp()
    # The first token's decay is of sums that are zero: 1, not exp(-2^100), beside which a scan would round the others.
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
def sums_before(
    k_BHTK: Tensor, v_BHTV: Tensor, log_i_BHT: Tensor, log_f_BHT: Tensor, group: ContextGroup
) -> tuple[Tensor, Tensor]:
    """Return m `[B, H, 1]` and the sums `[B, H, K, V]` after the earlier ranks' tokens."""
    G_BHT = log_f_BHT.double().cumsum(-1)
    d_BHT = G_BHT[..., -1:] - G_BHT + log_i_BHT
    max_BH1 = d_BHT.amax(-1, keepdim=True).detach()
    after_BHT1 = (d_BHT - max_BH1).exp().to(v_BHTV.dtype)[..., None]
    summary = (G_BHT[..., -1:], max_BH1, (k_BHTK * after_BHT1).mT @ v_BHTV)
    _, max_BH1, sums = prefix(summary, _joined, (0.0, EMPTY, 0.0), group)
    return max_BH1.detach(), sums


def _joined(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...], /) -> tuple[Tensor, ...]:
    (g_1, m_1, s_1), (g_2, m_2, s_2) = earlier, later
    m_1, m_2 = g_2 + m_1.detach(), m_2.detach()
    m = torch.maximum(m_1, m_2).detach()
    share_1, share_2 = ((x - m).exp().to(s_1.dtype)[..., None] for x in (m_1, m_2))
    return g_1 + g_2, m, share_1 * s_1 + share_2 * s_2
