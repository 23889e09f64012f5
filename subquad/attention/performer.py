"""Performer, FAVOR+ (Choromanski et al. 2020, arXiv:2009.14794): softmax attention estimated by random features.

    y_t = sum_{s <= t} A_ts v_s / sum_{s <= t} A_ts,    A_ts = sum_r exp(w_r . (q_t + k_s) - |q_t|^2 / 2 - |k_s|^2 / 2)

(over all s in the bidirectional form), q and k divided by K^(1/4): the mean of A_ts / R over w_r ~ N(0, I) is
exp(q_t . k_s). The R vectors w_r are rows of random orthogonal blocks, each with the length of a Gaussian vector.

With u_sr = w_r . k_s - |k_s|^2 / 2 and Z_tr the logsumexp of u_sr over s, the same weights are

    y_t = sum_r p_tr sum_{s <= t} softmax_{s <= t}(u_sr) v_s,    p_t = softmax_r(w_r . q_t + Z_tr):

Latte with R latents. So nothing over- or underflows, and no eps is needed. Published implementations subtract the
maximum of u over the whole sequence and add an eps to the exponentials: there the future sets how much the eps counts,
and past outputs change with it. `kernel="relu"` is the generalised attention, with features relu(w_r . x) + 0.001.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.projected import HeadedAttention
from subquad.attention.scanned import ScannedAttention, is_future, real_mask, real_rows, softmax_state, widened
from subquad.ops.backends import without_autocast
from subquad.ops.softmax import running_logsumexp
from subquad.state import State

logger = logging.getLogger(__name__)
RELU_FLOOR = 1e-3
PATIENCE = 200
"""Training passes, beside four intervals, before a layer says that it hears of no step (accumulation has several)."""


@functools.cache
def _warn_not_redrawn(interval: int) -> None:
    logger.warning(
        "performer's features were never redrawn, though redraw_interval=%d: call "
        "subquad.attention.after_step(model, step) after each step of the optimizer",
        interval,
    )


class Performer(HeadedAttention, ScannedAttention):
    """Softmax attention to every earlier token, its exponential kernel estimated by random features."""

    name = "performer"
    summary = "every earlier token, by random features of softmax"
    paper = "Choromanski et al. 2020, arXiv:2009.14794"
    forms = ("causal", "bidirectional")
    parallel = True

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadedAttention.Config):
        """Options of Performer."""

        dropout: float = 0.0
        """Dropout on the features' shares p_t (relu: on the keys' features), in training."""
        kernel: Literal["softmax", "relu"] = "softmax"
        """Features: positive ones of the softmax kernel, or relu plus 0.001."""
        features: int | None = None
        """R, features of a head (None: K ln K, at least K, for heads of K channels)."""
        redraw_interval: int | None = None
        """Training steps between draws of new features (None: never)."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(features=1, redraw_interval=1)

    config: Config
    directions: Tensor

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.query = self.projection(self.channels * config.num_heads)
        self.key = self.projection(self.channels * config.num_heads)
        self.add_norms()
        K = self.channels
        self.unheard = 0 if config.redraw_interval else None
        """Training passes so far, until `after_step` is first called (None)."""
        self.features = config.features or max(K, int(K * math.log(K)))
        # Saved with the model: a state can't be used with other directions.
        self.register_buffer("directions", orthogonal_directions(self.features, K).to(torch.get_default_dtype()))

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Mix by the running softmax of each feature, or by sums of relu features."""
        if self.unheard is not None and self.training:
            self.count_pass()
        q_BHTR, k_BHTR = self.projected(x_BTD)
        dropout = self.config.dropout
        if self.config.kernel == "relu":
            k_BHTR = F.dropout(k_BHTR, dropout, self.training)
            return self.sums(q_BHTR, k_BHTR, self.values(x_BTD), state, lengths_B)
        v_BHTV = self.values(x_BTD)
        state = self.softmaxes_to_here(state, k_BHTR, v_BHTV)
        p_BHTR = (q_BHTR + self.normaliser(k_BHTR, state, lengths_B)).softmax(-1)
        p_BHTR = F.dropout(p_BHTR, dropout, self.training)
        return self.softmaxes(p_BHTR, k_BHTR, v_BHTV, state, lengths_B)

    def projected(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of queries and keys, `[B, H, T, R]`, float32 or wider: logarithms, or relu's values."""
        q_BHTK = self.normed_queries(self.split(self.query(x_BTD), width=self.channels))
        k_BHTK = self.normed_keys(self.split(self.key(x_BTD), width=self.channels))
        if self.config.kernel == "relu":
            q_BHTR, k_BHTR = (along(x, self.directions).relu() + RELU_FLOOR for x in (q_BHTK, k_BHTK))
            return q_BHTR, k_BHTR
        half_square_BHT1 = widened(k_BHTK)[0].square().sum(-1, keepdim=True) / (2 * math.sqrt(self.channels))
        return along(q_BHTK, self.directions), along(k_BHTK, self.directions) - half_square_BHT1

    def normaliser(self, k_BHTR: Tensor, state: State | None, lengths_B: Tensor | None) -> Tensor:
        """Return Z, the logsumexp of the keys' features, `[B, H, T, R]`; over all tokens `[B, H, 1, R]`."""
        if not self.causal:
            mask_BT = real_mask(lengths_B, k_BHTR.shape[2])
            return real_rows(k_BHTR, mask_BT, torch.finfo(k_BHTR.dtype).min).logsumexp(-2, keepdim=True)
        before = softmax_state(state)
        return running_logsumexp(k_BHTR, state=None if before is None else before.lse)

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return `A_ts` over its sum, computed from log A."""
        q_BHTR, k_BHSR = self.projected(x_BTD)
        if self.config.kernel == "relu":
            q_BHTR, k_BHSR = q_BHTR.log(), k_BHSR.log()
        log_BHTS = (q_BHTR[:, :, :, None] + k_BHSR[:, :, None]).logsumexp(-1)
        if self.causal:
            log_BHTS = log_BHTS.masked_fill(is_future(x_BTD.shape[1], x_BTD.device), -torch.inf)
        return log_BHTS.softmax(-1).to(x_BTD.dtype)

    @property
    def divisible(self) -> tuple[int, ...]:
        """All heads: the directions are those of each."""
        return (self.config.num_heads,)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw new directions with torch's generator; states made before it become useless.

        The directions are a buffer, which DistributedDataParallel copies from the first process to the others.
        """
        self.directions.copy_(orthogonal_directions(*self.directions.shape))

    def count_pass(self) -> None:
        """Count a training pass, and log once for all layers of this interval that `after_step` is never called."""
        if self.unheard is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self.unheard += 1
        if (interval := self.config.redraw_interval) and self.unheard > 4 * interval + PATIENCE:
            _warn_not_redrawn(interval)

    def after_step(self, step: int) -> None:
        """Redraw every `redraw_interval` training steps: between passes, so a recomputed one is the same."""
        self.unheard = None
        if self.config.redraw_interval and step % self.config.redraw_interval == 0:
            self.redraw()


def orthogonal_directions(features: int, channels: int) -> Tensor:
    """Return random isotropic vectors `[R, K]`, float64: Gaussian lengths, orthogonal in blocks of K rows."""
    blocks = -(-features // channels)
    q_NKK, r_NKK = torch.linalg.qr(torch.randn(blocks, channels, channels, dtype=torch.float64))
    # The signs that QR chooses are not isotropic.
    q_NKK = q_NKK * r_NKK.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths_R1 = torch.randn(features, channels, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return q_NKK.flatten(0, 1)[:features] * lengths_R1


@without_autocast
def along(x_BHTK: Tensor, w_RK: Tensor) -> Tensor:
    """Return `w_r . x / K^(1/4)`, `[B, H, T, R]`, in float32 or wider because it becomes an exponent."""
    x, w = widened(x_BHTK, w_RK)
    return (x / x.shape[-1] ** 0.25) @ w.mT
