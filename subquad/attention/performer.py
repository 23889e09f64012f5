"""Performer, FAVOR+ (Choromanski et al. 2020, arXiv:2009.14794): softmax attention estimated by random features.

    y_t = sum_{s <= t} A_ts v_s / sum_{s <= t} A_ts,    A_ts = sum_r exp(w_r . (q_t + k_s) - |q_t|^2 / 2 - |k_s|^2 / 2)

(over all s in the bidirectional form), q and k divided by K^(1/4): the mean of A_ts / R over w_r ~ N(0, I) is
exp(q_t . k_s). The R vectors w_r are rows of random orthogonal blocks, scaled to the lengths of Gaussian vectors.

With u_sr = w_r . k_s - |k_s|^2 / 2 and Z_tr the logsumexp of u_sr over s, the same weights are

    y_t = sum_r p_tr sum_{s <= t} softmax_{s <= t}(u_sr) v_s,    p_t = softmax_r(w_r . q_t + Z_tr):

Latte with R latents. So nothing over- or underflows, and no eps is needed. Published implementations subtract the
maximum of u over the whole sequence and add an eps to the exponentials, so that later tokens change the relative size
of the eps, and with it earlier outputs. `kernel="relu"` is the generalised attention, with features relu(w_r . x) +
0.001.
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

from subquad.attention.base import Attention, split, takes_options
from subquad.attention.divided import check_even
from subquad.attention.memories.recurrence import Recurrence
from subquad.attention.memories.running_softmax import RunningSoftmax, Tensors, is_future, real_rows
from subquad.attention.parts import HeadedConfig, head_norm, normed, output_projection, projection
from subquad.attention.past import Past
from subquad.ops.backends import without_autocast
from subquad.ops.precision import widened
from subquad.ops.softmax import running_logsumexp

logger = logging.getLogger(__name__)
RELU_FLOOR = 1e-3
PATIENCE = 200
"""Training passes, besides four intervals, before a layer warns that `after_step` was not called."""


@functools.cache
def _warn_not_redrawn(interval: int) -> None:
    logger.warning(
        "performer's features were never redrawn, though redraw_interval=%d: call "
        "subquad.attention.after_step(model, step) after each step of the optimizer",
        interval,
    )


class Performer(Attention):
    """Softmax attention to every earlier token, its exponential kernel estimated by random features."""

    name = "performer"
    summary = "every earlier token, by random features of softmax"
    paper = "Choromanski et al. 2020, arXiv:2009.14794"
    forms = ("causal", "bidirectional")

    @dataclass(frozen=True, kw_only=True)
    class Config(HeadedConfig):
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
        H, K = config.num_heads, config.channels
        self.value, self.out = projection(config, H), output_projection(config)
        self.query, self.key = projection(config, H), projection(config, H)
        self.query_norm, self.key_norm = head_norm(config), head_norm(config)
        self.unheard = 0 if config.redraw_interval else None
        """Training passes so far, until `after_step` is first called (None)."""
        self.features = config.features or max(K, int(K * math.log(K)))
        # Saved with the model, since a state can't be used with other directions.
        self.register_buffer("directions", orthogonal_directions(self.features, K).to(torch.get_default_dtype()))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the running softmax of each feature, or the sums of relu features."""
        if self.unheard is not None and self.training:
            self.count_pass()
        config, K = self.config, self.config.channels
        q_BHTK = normed(split(K, self.query(x_BTD))[0], self.query_norm)
        k_BHTK = normed(split(K, self.key(x_BTD))[0], self.key_norm)
        (v_BHTV,) = split(K, self.value(x_BTD))
        check_even(self, q_BHTK, v_BHTV)
        if config.kernel == "relu":
            q_BHTR, k_BHTR = (along(x, self.directions).relu() + RELU_FLOOR for x in (q_BHTK, k_BHTK))
            k_BHTR = F.dropout(k_BHTR, self.dropout_p)
            v_BHTV = past.values(v_BHTV)
            (sums,) = past.keep(sums=Recurrence(k_BHTR, v_BHTV, normalise=True))
            return sums.read(q_BHTR)
        half_square_BHT1 = widened(k_BHTK)[0].square().sum(-1, keepdim=True) / (2 * math.sqrt(K))
        q_BHTR, k_BHTR = along(q_BHTK, self.directions), along(k_BHTK, self.directions) - half_square_BHT1
        v_BHTV = past.values(v_BHTV)
        (means,) = past.keep(means=FeatureMeans(k_BHTR, v_BHTV, self.dropout_p))
        return means.read(q_BHTR)

    @property
    def divisible(self) -> tuple[int, ...]:
        """All heads, since each has its own directions."""
        return (self.config.num_heads,)

    @torch.no_grad()
    def redraw(self) -> None:
        """Draw new directions with torch's generator; states made before can no longer be used.

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
        """Redraw every `redraw_interval` training steps, between passes, so that a recomputed pass is the same."""
        self.unheard = None
        if self.config.redraw_interval and step % self.config.redraw_interval == 0:
            self.redraw()


class FeatureMeans(RunningSoftmax):
    """The means of the features; `read(q)` gives feature r the share `softmax_r(q_tr + Z_tr)`, Z its log-normaliser."""

    def read(self, q_BHTR: Tensor, before: Tensors | None, at: Past) -> tuple[Tensor, Tensors]:
        """Return the outputs and the state after these tokens."""
        Z_BHTR = running_logsumexp(self.logits, state=None if before is None else before[0])
        return super().read((q_BHTR + Z_BHTR).softmax(-1), before, at)

    def read_all(self, q_BHTR: Tensor, at: Past) -> Tensor:
        """Return the outputs of the softmax over all real tokens."""
        floor = torch.finfo(self.logits.dtype).min
        Z_BH1R = real_rows(self.logits, at.mask, floor).logsumexp(-2, keepdim=True)
        return super().read_all((q_BHTR + Z_BH1R).softmax(-1), at)

    def literal(self, q_BHTR: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights `A_ts` over their sums, from log A, and the values."""
        log_BHTS = (q_BHTR[:, :, :, None] + self.logits[:, :, None]).logsumexp(-1)
        if causal:
            log_BHTS = log_BHTS.masked_fill(is_future(log_BHTS.shape[-1], log_BHTS.device), -torch.inf)
        return log_BHTS.softmax(-1).to(self.v.dtype) @ self.v


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
