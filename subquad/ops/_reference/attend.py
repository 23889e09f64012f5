"""Engine B's definition: dense softmax over the allowed keys."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_weights(q_BHTK: Tensor, k_BHSK: Tensor, allowed_BTS: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The weights `[B, H, T, S]` and the scores' logsumexp `[B, H, T]`; zeros and -inf where no key is allowed."""
    scores_BHTS = (q_BHTK @ k_BHSK.mT) * scale
    forbidden = ~allowed_BTS[:, None]
    lse_BHT = scores_BHTS.masked_fill(forbidden, -torch.inf).logsumexp(-1)
    # A finite floor keeps the gradient of a row without keys at zero; it cannot be reached by real scores.
    floor = torch.finfo(scores_BHTS.dtype).min
    weights_BHTS = scores_BHTS.masked_fill(forbidden, floor).softmax(-1).masked_fill(forbidden, 0.0)
    return weights_BHTS, lse_BHT


def attend(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, allowed_BTS: Tensor, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """The definition: `softmax(scale q k^T) v` over the allowed keys."""
    weights_BHTS, lse_BHT = softmax_weights(q_BHTK, k_BHSK, allowed_BTS, scale)
    return torch.nn.functional.dropout(weights_BHTS, dropout_p) @ v_BHSV, lse_BHT
