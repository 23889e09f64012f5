"""Losses of language models beside the cross-entropy, and the option that chooses one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from subquad.config import Config
from subquad.layers.criterion import CrossEntropy


@dataclass(frozen=True, kw_only=True)
class LossConfig(Config):
    """Terms of the training loss beside the cross-entropy."""

    z_weight: float = 0.0
    """Weight w of the z-loss w log^2 Z of each predicted token, with Z the sum of the exponentials of its logits; it
    keeps the logits near zero (PaLM, arXiv:2204.02311, section 5, has 1e-4)."""

    def __post_init__(self) -> None:
        if not (self.z_weight >= 0 and math.isfinite(self.z_weight)):
            raise ValueError(f"loss.z_weight must be at least 0, got {self.z_weight}")

    def apply_to(self, model: nn.Module) -> None:
        """Give a language model, and those inside it, this loss."""
        if not self.z_weight:
            return
        having = [module for module in model.modules() if isinstance(getattr(module, "criterion", None), CrossEntropy)]
        if not having:
            raise ValueError(f"loss.z_weight={self.z_weight}: {type(model).__name__} has no criterion to replace")
        for module in having:
            module.criterion = ZLoss(self.z_weight)


class ZLoss(CrossEntropy):
    """`-log p + w log^2 Z` in training, and `-log p` in evaluation."""

    reads_lse: ClassVar[bool] = True

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def of_token(self, nll_N: Tensor, lse_N: Tensor) -> Tensor:
        """Return `-log p + w log^2 Z` of each token."""
        return nll_N + self.weight * lse_N.square() if self.training else nll_N
