"""Decays inside the chunks of a `ChunkGroup`: of scores, of reads of the state and of writes to it.

With G the sum of log f up to a row, exp(G_i - G_j) is the decay from column j to row i; no exponent is positive:

    scores_ij = sum_c q_ic k_jc exp(G_ic - G_jc)  for j <= i
    rows_i = q_i exp(G_i),    columns_j = k_j exp(G_end - G_j)

With decays by channel this is the product of `q_i exp(G_i)` and `k_j exp(-G_j)` as long as no channel of row i has G
below -LIMIT, and the product in factors with exponents at most 0 (`PairWeights`) in the rows of a chunk from the first
such row on: the switch is per row and only looks back, so no row's bits depend on later tokens.

The gradients of q and k are sums over columns and over rows with the same exponentials, which decays of value channels
use too (`scan_by_value.py`).

Queries and keys belong to groups of `share` heads, decays and values to heads. Scores are made once a group unless
decays differ by channel.

Shape letters: M chunks of all heads, N chunks of all groups (M = N share), C rows of a chunk, K key channels, F = 1 or
K decays.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.ops._torch.log_space_sums import LIMIT, PairWeights
from subquad.ops.groups import by_groups, by_heads


class ScoreGradients(NamedTuple):
    """Gradients of the groups' q and k, and of the heads' G in the parts that `log_gradient` adds (None: no decays)."""

    q_NCK: Tensor
    k_NCK: Tensor
    rows_MCF: Tensor | None
    columns_MCF: Tensor | None


class Decay:
    """Decays: none, one per row (F = 1) or one per channel (F = K)."""

    def __init__(self, log_f_MCF: Tensor | None, q_NCK: Tensor, v_MCV: Tensor) -> None:
        self.share, self.dtype = len(v_MCV) // max(1, len(q_NCK)) or 1, q_NCK.dtype
        self.G = self.to_row = self.to_end = self.whole = None
        self.by_channel = log_f_MCF is not None and log_f_MCF.shape[-1] > 1
        if log_f_MCF is None:
            return
        # float64: the differences of G between neighbours are small beside G itself, and float32 would lose them.
        self.G = log_f_MCF.double().cumsum(1)
        self.to_row = self.G.exp().to(self.dtype)
        self.to_end = (self.G[:, -1:] - self.G).exp_().to(self.dtype)
        self.whole = self.to_row[:, -1, :, None]  # from the chunk's start to its end

    @functools.cached_property
    def between(self) -> Tensor:
        """`exp(G_i - G_j)` `[M, C, C]` of decays per row; entries above the diagonal are unused."""
        exact_MCC = self.__dict__.get("exact_between")
        return self._differences().to(self.dtype).exp_() if exact_MCC is None else exact_MCC.to(self.dtype)

    @functools.cached_property
    def exact_between(self) -> Tensor:
        """`between` in float64."""
        return self._differences().exp_()

    def _differences(self) -> Tensor:
        assert self.G is not None
        # Entries above the diagonal have positive exponents; clamped, they stay finite until tril_ removes them.
        return (self.G - self.G.mT).clamp_(max=0)

    @functools.cached_property
    def pairs(self) -> PairWeights:
        """`exp(G_i - G_j)` by channel, in factors without positive exponents."""
        assert self.G is not None
        return PairWeights(-self.G, -self.G, self.dtype)

    @functools.cached_property
    def needs_safe_form(self) -> Tensor | None:
        """Rows `[M, C, 1]` that need `pairs` (None: none of them); the others take `from_row`."""
        assert self.G is not None
        if self.G.device.type not in ("cpu", "meta"):  # a test of the decays would wait for the device
            return torch.ones_like(self.G[..., :1], dtype=torch.bool)
        late_MC1 = self.G.amin(-1, keepdim=True) < -LIMIT
        return None if self.G.device.type == "meta" or not late_MC1.any() else late_MC1

    @functools.cached_property
    def from_row(self) -> Tensor:
        """`exp(-G)`, bounded by exp(LIMIT)."""
        assert self.to_row is not None
        return self.to_row.clamp(min=math.exp(-LIMIT)).reciprocal_()

    def rows(self, q_NCK: Tensor) -> Tensor:
        """Return the queries of all heads, decayed from the chunk's start, for their product with the state there."""
        return self._scaled(q_NCK, self.to_row)

    def columns(self, k_NCK: Tensor) -> Tensor:
        """Return the keys of all heads, decayed to the chunk's end, for their sum into the state there."""
        return self._scaled(k_NCK, self.to_end)

    def _scaled(self, x_NCK: Tensor, factor_MCF: Tensor | None) -> Tensor:
        if factor_MCF is None:
            return by_heads(x_NCK, self.share)
        if self.share == 1:
            return x_NCK * factor_MCF
        return (x_NCK[:, None] * factor_MCF.unflatten(0, (-1, self.share))).flatten(0, 1)

    def scores(self, q_NCK: Tensor, k_NCK: Tensor) -> Tensor:
        """Return the weight `[M, C, C]` of value j in row i: in float64 if q and k are, and decays not by channel."""
        if self.by_channel:
            scores_MCC = torch.bmm(self.rows(q_NCK), self._scaled(k_NCK, self.from_row).mT).tril_()
            if self.needs_safe_form is None:
                return scores_MCC
            safe_MCC = self.pairs.scores(by_heads(q_NCK, self.share), by_heads(k_NCK, self.share))
            return torch.where(self.needs_safe_form, safe_MCC, scores_MCC)
        scores_NCC = torch.bmm(q_NCK, k_NCK.mT)
        if self.G is None:
            return by_heads(scores_NCC.tril_(), self.share)
        exact = scores_NCC.dtype == torch.float64
        return self._scaled(scores_NCC, self.exact_between if exact else self.between).tril_()

    def gradients(
        self,
        q_NCK: Tensor,
        k_NCK: Tensor,
        scores_MCC: Tensor,
        grad_MCC: Tensor,
        rows_MCK: Tensor,
        columns_MCK: Tensor | None = None,
    ) -> ScoreGradients:
        """Return the gradients through `scores` (given, with a lower-triangular gradient), `rows` and `columns`."""
        row_MCK = rows_MCK if self.to_row is None else rows_MCK * self.to_row
        column_MCK = columns_MCK if columns_MCK is None or self.to_end is None else columns_MCK * self.to_end
        if self.by_channel:
            q, k = (by_heads(x, self.share) for x in (q_NCK, k_NCK))
            dq, dk = self.over_columns(grad_MCC, k).add_(row_MCK), self.over_rows(grad_MCC, q)
            # d/dG of exp(G_i - G_j) is the score itself with sign +1 in row i and -1 in column j: no division by f,
            # which may be zero.
            rows_MCK = q * dq - k * dk
            dk = dk if column_MCK is None else dk.add_(column_MCK)
            columns = None if column_MCK is None else k * column_MCK
            return ScoreGradients(by_groups(dq, self.share), by_groups(dk, self.share), rows_MCK, columns)
        through_NCC = by_groups(grad_MCC if self.G is None else grad_MCC * self.between, self.share)
        dq = torch.bmm(through_NCC, k_NCK).add_(by_groups(row_MCK, self.share))
        dk = torch.bmm(through_NCC.mT, q_NCK)
        if column_MCK is not None:
            dk.add_(by_groups(column_MCK, self.share))
        if self.G is None:
            return ScoreGradients(dq, dk, None, None)
        # float64: the sums over a row and over a column are large beside their difference.
        score_MCC = grad_MCC * scores_MCC
        rows_MC = (score_MCC.sum(-1, dtype=torch.float64) - score_MCC.sum(-2, dtype=torch.float64)).to(self.dtype)
        rows_MC1 = rows_MC.add_(self._dot(q_NCK, row_MCK))[..., None]
        return ScoreGradients(dq, dk, rows_MC1, None if column_MCK is None else self._dot(k_NCK, column_MCK)[..., None])

    def over_columns(self, x_MCC: Tensor, k_MCK: Tensor) -> Tensor:
        """Return `sum_j x_ij k_jc exp(G_ic - G_jc)` for a lower-triangular x and decays by channel."""
        assert self.to_row is not None
        sums_MCK = torch.bmm(x_MCC, k_MCK * self.from_row).mul_(self.to_row)
        if self.needs_safe_form is None:
            return sums_MCK
        return torch.where(self.needs_safe_form, self.pairs.over_columns(x_MCC, k_MCK), sums_MCK)

    def over_rows(self, x_MCC: Tensor, q_MCK: Tensor) -> Tensor:
        """Return `sum_i x_ij q_ic exp(G_ic - G_jc)` for a lower-triangular x and decays by channel."""
        assert self.to_row is not None
        sums_MCK = torch.bmm(x_MCC.mT, q_MCK * self.to_row).mul_(self.from_row)
        if self.needs_safe_form is None:
            return sums_MCK
        # For a head's whole chunk, since its late rows read all columns.
        return torch.where(self.needs_safe_form[:, -1:], self.pairs.over_rows(x_MCC, q_MCK), sums_MCK)

    def _dot(self, x_NCK: Tensor, y_MCK: Tensor) -> Tensor:
        """Return the sum over channels `[M, C]` of a group's tensor times a head's."""
        return (x_NCK[:, None] * y_MCK.unflatten(0, (-1, self.share))).sum(-1).flatten(0, 1)

    def log_gradient(self, rows_MCF: Tensor, columns_MCF: Tensor, grad_state_MK: Tensor) -> Tensor:
        """Return the gradient of log f from that of its sums G.

        log f_t decays what rows from t on read, and what columns before t and the state before the chunk contribute to
        the chunk's end. `grad_state` is the sum over value channels of that state times the gradient of the end's.
        """
        assert self.whole is not None
        start_M1K = (self.whole[..., 0] * grad_state_MK)[:, None]
        start_M1F = start_M1K if self.by_channel else start_M1K.sum(-1, keepdim=True)
        return rows_MCF.flip(1).cumsum(1).flip(1).add_(columns_MCF.cumsum(1)).sub_(columns_MCF).add_(start_M1F)
