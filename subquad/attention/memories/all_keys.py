"""All keys as a memory of the bidirectional form, for few queries or few keys: it forms every score.

Shape letters: B batch, H heads, T queries, S keys, K channels of a head, V value channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, finfo
from torch.nn import functional as F

from subquad.attention.memories.running_softmax import real_rows
from subquad.ops.backends import without_autocast
from subquad.ops.counting import report_scores
from subquad.ops.precision import widened


@dataclass(frozen=True, eq=False)
class AllKeys:
    """What tokens write: keys `[B, H, S, K]` and values; `read_all(q)` is softmax attention over all real tokens."""

    k: Tensor
    v: Tensor
    dropout_p: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ()

    def read_all(self, q_BHTK: Tensor, at: Any) -> Tensor:
        """Return the outputs `[B, H, T, V]`."""
        return attend_few(q_BHTK, self.k, self.v, at.mask, self.dropout_p)

    def literal(self, q_BHTK: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights and the values."""
        return shares(q_BHTK, self.k).to(self.v.dtype) @ self.v


def shares(q_BHTK: Tensor, k_BHSK: Tensor) -> Tensor:
    """Return `softmax_s(q k^T / sqrt(K))`, dense."""
    return (q_BHTK @ k_BHSK.mT / math.sqrt(q_BHTK.shape[-1])).softmax(-1)


@without_autocast
def attend_few(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, mask_BS: Tensor | None, dropout_p: float) -> Tensor:
    """Return `o_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s` over all real tokens.

    The result is `[B, H, T, V]` in the dtype of v, computed in float32 or wider.
    """
    report_scores(q_BHTK.shape[:2].numel(), q_BHTK.shape[2], k_BHSK.shape[2])
    q, k, v = widened(q_BHTK, k_BHSK, v_BHSV)
    scores_BHST = k @ q.mT / math.sqrt(q.shape[-1])
    share_BHST = real_rows(scores_BHST, mask_BS, finfo(scores_BHST.dtype).min).softmax(-2)
    return (F.dropout(real_rows(share_BHST, mask_BS, 0.0), dropout_p).mT @ v).to(v_BHSV.dtype)
