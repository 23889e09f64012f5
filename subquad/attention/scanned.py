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
from subquad.attention.divided import uneven
from subquad.ops import SoftmaxState, gated_scan, running_softmax
from subquad.ops.backends import without_autocast
from subquad.ops.caches import advance
from subquad.ops.counting import report_scores
from subquad.ops.padding import real_slots
from subquad.parallel import Sent, active_group
from subquad.parallel.exchange import sent_for_prefix
from subquad.parallel.summaries import softmax_before, sums_before
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

    def sums(
        self,
        q_BHTK: Tensor,
        i_BHTK: Tensor,
        v_BHTV: Tensor,
        state: State | None,
        lengths_B: Tensor | None,
        eps: float = 0.0,
    ) -> tuple[Tensor, State]:
        """Return `merge(q_t S / (q_t . z + eps))` and the state, for q, i >= 0: S sums `i_s (x) v_s`, z sums `i_s`."""
        if q_BHTK.shape[1] != v_BHTV.shape[1]:
            raise uneven(self, q_BHTK.shape[1], v_BHTV.shape[1])
        tokens = v_BHTV.shape[2]
        mask = real_mask(lengths_B, tokens)
        state = self.sums_to_here(state, sums=(i_BHTK, v_BHTV), normalise=True)
        entries: dict[str, Tensor | int | State] = {"seen": seen_after(state, tokens, lengths_B)}
        if self.causal:
            before = None if state is None else state.tensor("sums")
            y_BHTV, entries["sums"] = gated_scan(
                q_BHTK, i_BHTK, v_BHTV, None, state=before, normalise=True, eps=eps, mask=mask
            )
        else:
            y_BHTV = sums_of_all(q_BHTK, i_BHTK, v_BHTV, mask, eps)
        return self.merge(y_BHTV), State(entries, self.config_hash)

    def softmaxes(
        self, p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTV: Tensor, state: State | None, lengths_B: Tensor | None
    ) -> tuple[Tensor, State]:
        """Return `merge(sum_l p_tl sum_s softmax_s(logits_sl) v_s)` and the state."""
        tokens = v_BHTV.shape[2]
        mask = real_mask(lengths_B, tokens)
        state = self.softmaxes_to_here(state, logits_BHTL, v_BHTV)
        entries: dict[str, Tensor | int | State] = {"seen": seen_after(state, tokens, lengths_B)}
        if self.causal:
            y = running_softmax(p_BHTL, logits_BHTL, v_BHTV, state=softmax_state(state), mask=mask)
            y_BHTV, entries["lse"], entries["mean"] = y.out, *y.state
        else:
            y_BHTV = softmaxes_of_all(p_BHTL, logits_BHTL, v_BHTV, mask)
        return self.merge(y_BHTV), State(entries, self.config_hash)

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

    def softmaxes_to_here(self, state: State | None, logits_BHTL: Tensor, v_BHTV: Tensor) -> State | None:
        """Return the running softmax's state after earlier ranks' tokens, in an active group."""
        group = active_group()
        if state is not None or group is None:
            return state
        lse_BHL, mean_BHLV = softmax_before(logits_BHTL, v_BHTV, group)
        return State({"seen": group.offset(v_BHTV.shape[2]), "lse": lse_BHL, "mean": mean_BHLV})

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


def softmax_state(state: State | None) -> SoftmaxState | None:
    """Return the part of a layer's state that `running_softmax` takes."""
    return None if state is None else SoftmaxState(state.tensor("lse"), state.tensor("mean"))


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float32, or in float64 if one of them is float64."""
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return tuple(x.to(wide) for x in tensors)


def is_future(tokens: int, device: torch.device) -> Tensor:
    """Return the bool `[T, S]` that is True if token s comes after token t."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


@without_autocast
def sums_of_all(q_BHTK: Tensor, i_BHSK: Tensor, v_BHSV: Tensor, mask_BS: Tensor | None, eps: float) -> Tensor:
    """Return `o_t = q_t S / (q_t . z + eps)` with sums over all real tokens, and zero instead of a division by zero.

    The result is `[B, H, T, V]` in the dtype of v; sums are float32 or wider.
    """
    q, i, v = widened(q_BHTK, i_BHSK, v_BHSV)
    i = real_rows(i, mask_BS, 0.0)
    total_BHT1 = q @ i.sum(-2)[..., None] + eps
    out_BHTV = q @ (i.mT @ v) / total_BHT1.masked_fill(total_BHT1 == 0, torch.inf)
    return out_BHTV.to(v_BHSV.dtype)


@without_autocast
def softmaxes_of_all(p_BHTL: Tensor, logits_BHSL: Tensor, v_BHSV: Tensor, mask_BS: Tensor | None) -> Tensor:
    """Return `o_t = sum_l p_tl sum_s softmax_s(logits_sl) v_s` over all real tokens.

    The result is `[B, H, T, V]` in the dtype of v, computed in float32 or wider.
    """
    p, logits, v = widened(p_BHTL, logits_BHSL, v_BHSV)
    # A finite floor instead of -inf: the softmax of a row that is all padding would be NaN.
    share_BHSL = real_rows(logits, mask_BS, torch.finfo(logits.dtype).min).softmax(-2)
    return (p @ (real_rows(share_BHSL, mask_BS, 0.0).mT @ v)).to(v_BHSV.dtype)


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


def real_rows(x_BHSL: Tensor, mask_BS: Tensor | None, fill: float) -> Tensor:
    """Return `x` with `fill` in the rows of padding."""
    return x_BHSL if mask_BS is None else x_BHSL.masked_fill(~mask_BS[:, None, :, None], fill)
