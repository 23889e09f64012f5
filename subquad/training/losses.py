"""Terms of the loss of language models beside the cross-entropy, and the options that choose them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from subquad.config import Config
from subquad.layers.criterion import CrossEntropy
from subquad.ops.loss import Term


@dataclass(frozen=True, kw_only=True)
class LossConfig(Config):
    """Terms of the training loss beside the cross-entropy."""

    z_weight: float = 0.0
    """Weight w of the z-loss w log^2 Z of each predicted token, with Z the sum of the exponentials of its logits; it
    keeps the logits near zero (PaLM, arXiv:2204.02311, section 5, has 1e-4)."""

    def __post_init__(self) -> None:
        if not (self.z_weight >= 0 and math.isfinite(self.z_weight)):
            raise ValueError(f"loss.z_weight must be at least 0, got {self.z_weight}")

    def terms(self) -> tuple[Term, ...]:
        """Return the terms that the options ask for."""
        return (partial(z_loss, weight=self.z_weight),) if self.z_weight else ()

    def apply_to(self, model: nn.Module) -> None:
        """Give these terms to the loss of a language model and of those inside it."""
        terms = self.terms()
        losses = [module for module in model.modules() if isinstance(module, CrossEntropy)]
        if terms and not losses:
            raise ValueError(f"{self} has no effect: {type(model).__name__} has no loss of the next token")
        for loss in losses:
            loss.terms = terms


def z_loss(nll_N: Tensor, lse_N: Tensor, /, *, weight: float) -> Tensor:
    """`w log^2 Z` of each token."""
    return weight * lse_N.square()
