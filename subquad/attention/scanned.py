"""The base of all scan mechanisms: value and output projections, padding as a mask, sums over tokens.

Shape letters: B batch, T tokens, S tokens that are summed, D model width, H heads, K channels or features, L latents,
V value channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.base import Attention
from subquad.attention.memories.running_softmax import real_rows, widened
from subquad.ops.backends import without_autocast
from subquad.ops.caches import advance
from subquad.ops.counting import report_scores
from subquad.ops.padding import real_slots
from subquad.parallel import Sent, active_group
from subquad.parallel.exchange import sent_for_prefix
from subquad.parallel.summaries import sums_before
from subquad.state import State


class ScannedAttention(Attention):
    """A recurrence with a state of fixed size; in the bidirectional form, sums over all tokens."""

    def __init__(self, config: Attention.Config) -> None:
        super().__init__(config)
        self.channels = self.head_channels()
        self.value = self.projection(self.channels * config.num_heads)
        self.out = self.output_projection()

    def head_channels(self) -> int:
        """Channels V of a head."""
        return self.config.dim // self.config.num_heads

    def projection(self, width: int) -> nn.Linear:
        """Return a linear map from the model width to `width` channels of all heads."""
        return nn.Linear(self.config.dim, width, bias=self.config.bias)

    def output_projection(self) -> nn.Linear:
        """Return a linear map from the heads' outputs to the model width."""
        return nn.Linear(self.config.dim, self.config.dim, bias=self.config.bias)

    def values(self, x_BTD: Tensor) -> Tensor:
        """Return the values `[B, H, T, V]`."""
        return self.split(self.value(x_BTD), width=self.channels)

    def merge(self, y_BHTV: Tensor) -> Tensor:
        """Apply the output projection."""
        return self.out(self.join(y_BHTV))

    def sums_to_here(
        self, state: State | None, *, normalise: bool = False, **pairs: tuple[Tensor, Tensor]
    ) -> State | None:
        """Return the state after earlier ranks' tokens, in an active group: a scan of `(i, v)` per name."""
        group = active_group()
        if state is not None or group is None:
            return state
        found = sums_before(list(pairs.values()), group, normalise=normalise)
        (_, v_BHTV), *_ = pairs.values()
        return State({"seen": group.offset(v_BHTV.shape[2]), **dict(zip(pairs, found, strict=True))})

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of one state in each of log2(P) steps."""
        return sent_for_prefix(self.state_bytes(tokens), ranks)


def check_latents(num_latents: int | None, num_heads: int) -> None:
    """Raise `ValueError` if the latents aren't a multiple of the heads."""
    if num_latents is not None and (num_latents < 1 or num_latents % num_heads):
        raise ValueError(
            "num_latents must be a positive multiple of num_heads (heads share the latents), "
            f"got num_latents={num_latents}, num_heads={num_heads}"
        )


def real_mask(lengths_B: Tensor | None, tokens: int) -> Tensor | None:
    """Return the bool mask `[B, T]` of compacted rows, or None if all tokens are real."""
    return None if lengths_B is None else real_slots(lengths_B, tokens)


def seen_after(state: State | None, tokens: int, lengths_B: Tensor | None) -> int | Tensor:
    """Return the number of real tokens read after `tokens` more slots."""
    return advance(0 if state is None else state.seen, tokens, lengths_B)


@without_autocast
def attend_few(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, mask_BS: Tensor | None, dropout_p: float) -> Tensor:
    """Return `o_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s` over all real tokens, for few queries or few keys.

    It forms all T S scores. The result is `[B, H, T, V]` in the dtype of v, computed in float32 or wider.
    """
    report_scores(q_BHTK.shape[:2].numel(), q_BHTK.shape[2], k_BHSK.shape[2])
    q, k, v = widened(q_BHTK, k_BHSK, v_BHSV)
    scores_BHST = k @ q.mT / math.sqrt(q.shape[-1])
    share_BHST = real_rows(scores_BHST, mask_BS, torch.finfo(scores_BHST.dtype).min).softmax(-2)
    return (F.dropout(real_rows(share_BHST, mask_BS, 0.0), dropout_p).mT @ v).to(v_BHSV.dtype)
