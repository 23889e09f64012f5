"""The running softmax as a memory: each latent keeps the mean of the values, weighted by the softmax of its logits.

Shape letters: B batch, H heads, T tokens, S tokens that are read, L latents, V value channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops import running_softmax
from subquad.ops.backends import without_autocast
from subquad.ops.precision import widened
from subquad.ops.softmax import EMPTY

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class RunningSoftmax:
    """What tokens write: logits `[B, H, T, L]` and values; `read(p)` gives `sum_l p_tl sum_s softmax_s(logits_sl) v_s`.

    The state is each latent's log-normaliser `[B, H, L]` and mean `[B, H, L, V]`.
    """

    logits: Tensor
    v: Tensor
    dropout_p: float = 0.0
    """Probability of dropout on p, the queries' shares of the latents."""

    slots: ClassVar[tuple[str, ...]] = ("_lse", "_mean")
    empty: ClassVar[tuple[float, ...]] = (EMPTY, 0.0)

    def read(self, p_BHTL: Tensor, before: Any, at: Any) -> tuple[Tensor, Tensors]:
        """Return the outputs and the state after these tokens."""
        p_BHTL = F.dropout(p_BHTL, self.dropout_p)
        found = running_softmax(p_BHTL, self.logits, self.v, state=before, mask=at.mask)
        return found.out, found.state

    def read_all(self, p_BHTL: Tensor, at: Any) -> Tensor:
        """Return the outputs of the softmax over all real tokens."""
        return softmaxes_of_all(F.dropout(p_BHTL, self.dropout_p), self.logits, self.v, at.mask)

    def literal(self, p_BHTL: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights `sum_l p_tl softmax_s(logits_sl)` and the values."""
        logits_BHSL, v_BHSV = self.logits, self.v
        if not causal:
            return (p_BHTL @ logits_BHSL.softmax(-2).mT).to(v_BHSV.dtype) @ v_BHSV
        future_TS1 = is_future(v_BHSV.shape[2], v_BHSV.device)[..., None]
        shares_BHTSL = logits_BHSL[:, :, None].masked_fill(future_TS1, -torch.inf).softmax(-2)
        return torch.einsum("bhtl,bhtsl->bhts", p_BHTL, shares_BHTSL).to(v_BHSV.dtype) @ v_BHSV

    # Between ranks, a summary is the state of these tokens alone.

    def summary(self) -> Tensors:
        """Return the log-normalisers and means of these tokens."""
        return softmax_summary(self.logits, self.v)

    def merge(self, earlier: Tensors, later: Tensors) -> Tensors:
        """Return `lse = log(e^lse_1 + e^lse_2)`, `mean = e^(lse_1 - lse) mean_1 + e^(lse_2 - lse) mean_2`."""
        (lse_1, mean_1), (lse_2, mean_2) = earlier, later
        lse_BHL = torch.logaddexp(lse_1, lse_2)
        share_1, share_2 = ((lse - lse_BHL).exp().to(mean_1.dtype)[..., None] for lse in (lse_1, lse_2))
        return lse_BHL, share_1 * mean_1 + share_2 * mean_2

    def begin(self, summary: Tensors) -> Tensors:
        """Return the state of a summary."""
        return summary


@without_autocast
def softmax_summary(logits_BHTL: Tensor, v_BHTV: Tensor) -> tuple[Tensor, Tensor]:
    """Return `lse_l = log sum_t exp(k_tl)`, in float64, and `mean_l = sum_t exp(k_tl - lse_l) v_t`."""
    logits, v = widened(logits_BHTL, v_BHTV)
    lse_BHL = logits.logsumexp(-2).clamp(min=EMPTY)
    return lse_BHL.double(), (logits - lse_BHL[..., None, :]).exp().mT @ v


@without_autocast
def softmaxes_of_all(p_BHTL: Tensor, logits_BHSL: Tensor, v_BHSV: Tensor, mask_BS: Tensor | None) -> Tensor:
    """Return `o_t = sum_l p_tl sum_s softmax_s(logits_sl) v_s` over all real tokens.

    The result is `[B, H, T, V]` in the dtype of v, computed in float32 or wider.
    """
    p, logits, v = widened(p_BHTL, logits_BHSL, v_BHSV)
    # A finite floor instead of -inf: the softmax of a row that is all padding would be NaN.
    share_BHSL = real_rows(logits, mask_BS, torch.finfo(logits.dtype).min).softmax(-2)
    return (p @ (real_rows(share_BHSL, mask_BS, 0.0).mT @ v)).to(v_BHSV.dtype)


def is_future(tokens: int, device: torch.device) -> Tensor:
    """Return the bool `[T, S]` that is True if token s comes after token t."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def real_rows(x_BHSL: Tensor, mask_BS: Tensor | None, fill: float) -> Tensor:
    """Return `x` with `fill` in the rows of padding."""
    return x_BHSL if mask_BS is None else x_BHSL.masked_fill(~mask_BS[:, None, :, None], fill)
