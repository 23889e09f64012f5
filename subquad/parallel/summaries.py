"""The initial state of a scan on a rank: merged summaries of all earlier ranks' tokens.

Shape letters: B batch, H heads, T tokens of a rank, K key channels, L latents, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.ops import SoftmaxState
from subquad.ops.backends import without_autocast
from subquad.ops.softmax import EMPTY
from subquad.parallel.exchange import prefix
from subquad.parallel.group import ContextGroup

Means = tuple[Tensor, Tensor]
"""`lse` `[B, H, L]`, float64, and `mean` `[B, H, L, V]`, as in `SoftmaxState`."""


def sums_before(
    pairs: list[tuple[Tensor, Tensor]], group: ContextGroup, /, *, normalise: bool = False
) -> tuple[Tensor, ...]:
    """Return this rank's initial states `[B, H, K, V]` (V + 1 if normalised) of `gated_scan`s without decays.

    `pairs` are the scans' inputs `[B, H, T, K]` and values `[B, H, T, V]`; all scans share one exchange.
    """
    sums = tuple(outer_sums(i_BHTK, v_BHTV, normalise) for i_BHTK, v_BHTV in pairs)
    return prefix(sums, merge_sums, (0.0,) * len(sums), group)


def softmax_before(logits_BHTL: Tensor, v_BHTV: Tensor, group: ContextGroup, /) -> SoftmaxState:
    """Return this rank's initial state of a `running_softmax` over these logits and values."""
    return SoftmaxState(*prefix(softmax_summary(logits_BHTL, v_BHTV), merge_softmax, (EMPTY, 0.0), group))


@without_autocast
def outer_sums(i_BHTK: Tensor, v_BHTV: Tensor, normalise: bool) -> Tensor:
    """`sum_t i_t (x) v_t` in float32 or wider; with `normalise`, a last channel holds `sum_t i_t`."""
    wide = torch.promote_types(torch.promote_types(i_BHTK.dtype, v_BHTV.dtype), torch.float32)
    v_BHTV = F.pad(v_BHTV.to(wide), (0, 1), value=1.0) if normalise else v_BHTV.to(wide)
    return i_BHTK.to(wide).mT @ v_BHTV


def merge_sums(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...], /) -> tuple[Tensor, ...]:
    """`S = S_1 + S_2`."""
    return tuple(a + b for a, b in zip(earlier, later, strict=True))


@without_autocast
def softmax_summary(logits_BHTL: Tensor, v_BHTV: Tensor) -> Means:
    """`lse_l = log sum_t exp(k_tl)` and `mean_l = sum_t exp(k_tl - lse_l) v_t`."""
    wide = torch.promote_types(torch.promote_types(logits_BHTL.dtype, v_BHTV.dtype), torch.float32)
    logits_BHTL = logits_BHTL.to(wide)
    lse_BHL = logits_BHTL.logsumexp(-2).clamp(min=EMPTY)
    mean_BHLV = (logits_BHTL - lse_BHL[..., None, :]).exp().mT @ v_BHTV.to(wide)
    return lse_BHL.double(), mean_BHLV


def merge_softmax(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...], /) -> tuple[Tensor, ...]:
    """`lse = log(exp(lse_1) + exp(lse_2))`, `mean = exp(lse_1 - lse) mean_1 + exp(lse_2 - lse) mean_2`."""
    (lse_1, mean_1), (lse_2, mean_2) = earlier, later
    lse_BHL = torch.logaddexp(lse_1, lse_2)
    share_1, share_2 = ((lse - lse_BHL).exp().to(mean_1.dtype)[..., None] for lse in (lse_1, lse_2))
    return lse_BHL, share_1 * mean_1 + share_2 * mean_2
