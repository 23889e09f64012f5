"""Distributions over a pixel's 256 levels, from the parameters that the model outputs.

Shape letters: N pixels, V levels (256), M distributions in a mixture, P parameters.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops.precision import at_least_float32

LEVELS = 256
"""Values of one channel of a pixel, a byte."""
Output = Literal["categorical", "logistic"]
LEAST_LOG_SCALE = -7.0
"""Narrowest scale: at -7, one level already has all but e^-8 of the probability; below, gradients are noise."""


class Categorical:
    """`p(x) = softmax(logits)_x`."""

    parameters = LEVELS

    def log_prob(self, parameters_NP: Tensor, levels_N: Tensor) -> Tensor:
        """Return `log p` of one level for each pixel, `[N]`, in nats."""
        return -F.cross_entropy(at_least_float32(parameters_NP), levels_N, reduction="none")

    def log_probs(self, parameters_NP: Tensor) -> Tensor:
        """Return `log p` of all levels, `[N, V]`."""
        return at_least_float32(parameters_NP).log_softmax(-1)

    def first_biases(self) -> Tensor:
        """Return biases for untrained weights, `[P]`: all levels equally likely."""
        return torch.zeros(self.parameters)


class LogisticMixture:
    """`p(x) = sum_m w_m (F_m(v + 1/255) - F_m(v - 1/255))`, `v = 2 x / 255 - 1`, `F_m(v) = sigmoid((v - mu_m) / s_m)`.

    The bins of the lowest and the highest level extend to minus and plus infinity, so the 256 probabilities sum to one.
    The parameters are M logits of the weights, M means mu and M logarithms of the scales s, clamped to at least -7.
    Source: T. Salimans et al., PixelCNN++ (2017, arXiv:1701.05517, section 2.1), as used by A. Katharopoulos et al.
    (2020, arXiv:2006.16236, appendix C). A difference of two sigmoids is computed as a product, `sigmoid(a) sigmoid(-b)
    (1 - e^(b - a))`, which loses no digits even if the result is tiny.
    """

    def __init__(self, mixtures: int) -> None:
        self.mixtures = mixtures
        self.parameters = 3 * mixtures

    def log_prob(self, parameters_NP: Tensor, levels_N: Tensor) -> Tensor:
        """Return `log p` of one level for each pixel, `[N]`, in nats."""
        return self._log_prob(parameters_NP, levels_N[:, None])[:, 0]

    def log_probs(self, parameters_NP: Tensor) -> Tensor:
        """Return `log p` of all levels, `[N, V]`."""
        levels_V = torch.arange(LEVELS, device=parameters_NP.device)
        return self._log_prob(parameters_NP, levels_V.expand(parameters_NP.shape[0], -1))

    def _log_prob(self, parameters_NP: Tensor, levels_NV: Tensor) -> Tensor:
        logits_NM, means_NM, log_scales_NM = at_least_float32(parameters_NP).split(self.mixtures, -1)
        log_scales_NM = log_scales_NM.clamp(min=LEAST_LOG_SCALE)
        weights_N1M = logits_NM.log_softmax(-1)[:, None]
        inverse_N1M = (-log_scales_NM).exp()[:, None]
        centre_NVM = (2 / (LEVELS - 1) * levels_NV[..., None].to(means_NM.dtype) - 1) - means_NM[:, None]
        above_NVM = (centre_NVM + 1 / (LEVELS - 1)) * inverse_N1M
        below_NVM = (centre_NVM - 1 / (LEVELS - 1)) * inverse_N1M
        log_bin_NVM = _log1mexp(2 / (LEVELS - 1) * inverse_N1M)
        low_NV1, high_NV1 = levels_NV[..., None] == 0, levels_NV[..., None] == LEVELS - 1
        parts_NVM = (
            F.logsigmoid(above_NVM).masked_fill(high_NV1, 0.0)
            + F.logsigmoid(-below_NVM).masked_fill(low_NV1, 0.0)
            + log_bin_NVM.masked_fill(low_NV1 | high_NV1, 0.0)
        )
        return (weights_N1M + parts_NVM).logsumexp(-1)

    def first_biases(self) -> Tensor:
        """Return biases for untrained weights, `[P]`: equal weights, means spread over all levels, scales to match."""
        means_M = (2 * torch.arange(self.mixtures) + 1) / self.mixtures - 1
        log_scales_M = torch.full((self.mixtures,), math.log(1 / self.mixtures))
        return torch.cat((torch.zeros(self.mixtures), means_M, log_scales_M))


def build_output(output: Output, mixtures: int) -> Categorical | LogisticMixture:
    """Return the distribution that `output` names."""
    return Categorical() if output == "categorical" else LogisticMixture(mixtures)


def draw(log_probs_NV: Tensor, random_N: Tensor, temperature: float) -> Tensor:
    """Draw levels `[N]` by inverting the cumulative sum of `softmax(log p / temperature)` at `random`.

    Temperature 0 takes the likeliest level. Raises `ValueError` for probabilities that are NaN.
    """
    log_probs_NV = log_probs_NV.double()
    if bool(log_probs_NV.isnan().any()):
        raise ValueError("the model's probabilities must be finite, got NaN; its weights may be damaged")
    if temperature == 0:
        return log_probs_NV.argmax(-1)
    # Shift the likeliest level to 0: a tiny temperature would otherwise send all levels to -inf.
    sharper_NV = (log_probs_NV - log_probs_NV.amax(-1, keepdim=True)) / temperature
    cumulative_NV = sharper_NV.softmax(-1).cumsum(-1)
    wanted_N1 = random_N.to(cumulative_NV)[:, None] * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, wanted_N1, right=True)[:, 0].clamp(max=LEVELS - 1)


def _log1mexp(x: Tensor) -> Tensor:
    """Return `log(1 - e^-x)` for x > 0, accurate on both sides of log 2."""
    # Clamp each branch to its own side: the unused branch's infinite gradient times torch.where's zero is NaN.
    small = x < math.log(2)
    low, high = x.clamp(max=math.log(2)), x.clamp(min=math.log(2))
    return torch.where(small, (-torch.expm1(-low)).log(), torch.log1p(-torch.exp(-high)))
