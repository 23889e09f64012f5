"""Attention sinks, for softmax over what is near: the first tokens, kept for ever, and a learned one without a value.

    y_t = sum_s exp(q_t . k_s / sqrt(K)) v_s / (exp(a) + sum_s exp(q_t . k_s / sqrt(K)))

s runs over what is near and over the first `sinks` tokens (Xiao et al. 2023, arXiv:2309.17453, section 3.2). exp(a) is
there with `learned_sink` alone: with lse the logsumexp of the scores, y_t is the softmax's output times
sigmoid(lse - a).

Shape letters: B batch, T tokens, S keys, H heads, G key heads, K channels of a head, N slots of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.blocked import FIRST, RING, BlockedAttention, Places
from subquad.attention.sharing import added
from subquad.config import later
from subquad.ops import merge_attention
from subquad.ops.attend import softmax_weights
from subquad.ops.caches import advance
from subquad.ops.patterns import Pattern
from subquad.parallel import Sent
from subquad.parallel.exchange import first_before, sent_for_earlier
from subquad.state import State


class SinkAttention(BlockedAttention):
    """Softmax attention over `patterns` of bounded reach and over `far`: the first tokens that these leave out."""

    parallel = True
    rings = True
    far: tuple[Pattern, ...] = ()
    """The pattern of the first tokens for each of `patterns`, disjoint from it; empty without sinks."""

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockedAttention.Config):
        """Options of attention sinks."""

        sinks: int = later(0)
        """First tokens of its document that every later token sees too, kept in the state for ever (causal form only).
        A sink keeps its own rotary position. The paper numbers the positions inside its cache, so that they depend on
        what the cache holds when a token is read; what a layer computes must not depend on how a sequence is cut."""
        learned_sink: bool = later(False)
        """Whether each head has a learned logit that takes part in the softmax and has no value, so that a row of
        weights sums to less than one (gpt-oss, OpenAI 2025, arXiv:2508.10925). It begins at 0: as one more key and
        value of zeros, the zero sink of arXiv:2309.17453, section 3.3."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(sinks=0)
            if self.sinks and not self.causal:
                raise ValueError(
                    "sinks are for the causal form, whose state leaves the other tokens behind; for first tokens that "
                    f"a bidirectional layer sees take longformer, got sinks={self.sinks}, causal=False"
                )

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sink_logits = nn.Parameter(torch.zeros(config.num_heads)) if config.learned_sink else None

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Attend to what is near and to the first tokens and merge, beside the learned sink."""
        if state is not None and RING[0] in state:
            return self.mix_in_ring(x_BTD, state)
        seen, count = self.start(state, x_BTD.shape[1]), self.config.sinks
        q, k, v = self.projected(x_BTD, seen)
        state = self.with_first(self.near(state, k, v, self.patterns), k, v, count)
        k_BGSK, v_BGSK, old, real_B = self.with_cache(k, v, state, "", lengths_B)
        y_BHTK, lse_BHT = self.attend_with_lse(q, k_BGSK, v_BGSK, self.patterns, Places(seen, seen - old, real_B))
        entries: dict[str, Tensor | int | State] = {"seen": advance(seen, x_BTD.shape[1], lengths_B)}
        if self.causal:
            k_BGSK, v_BGSK = self.kept(k_BGSK, v_BGSK, self.patterns, real_B)
            entries |= {"keys": k_BGSK, "values": v_BGSK}
        if count:
            far, first = self.attend_first(q, k, v, self.far, state, seen, count)
            y_BHTK, lse_BHT = merge_attention(*zip((y_BHTK, lse_BHT), far, strict=True))
            entries |= first
        if self.sink_logits is not None:
            # In float64: the logit's gradient sums over all tokens, where much cancels; the shares are few numbers.
            share_BHT = torch.sigmoid(lse_BHT.double() - self.sink_logits.double()[:, None]).to(lse_BHT.dtype)
            y_BHTK = (y_BHTK * share_BHT[..., None]).to(y_BHTK.dtype)
        return self.merge(y_BHTK), State(entries, self.config_hash)

    @property
    def is_distribution(self) -> bool:
        """Whether every row sums to one: a learned sink takes a part."""
        return not self.config.learned_sink

    def unions(self, tokens: int) -> list[tuple[int, tuple[Pattern, ...]]]:
        """Return groups of heads, each with what is near and the first tokens."""
        near = super().unions(tokens)
        return [(n, (*union, far)) for (n, union), far in zip(near, self.far, strict=True)] if self.far else near

    def pattern_weights(self, q_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
        """Return the weights `[B, H, T, S]`, beside the learned sink if there is one."""
        if self.sink_logits is None:
            return super().pattern_weights(q_BHTK, k_BGSK)
        heads, unions = zip(*self.unions(k_BGSK.shape[2]), strict=True)
        split = q_BHTK.split(heads, 1), self.shared(k_BGSK).split(heads, 1), self.sink_logits.split(heads), unions
        return torch.cat([softmax_weights(q, k, *union, sink_H=a) for q, k, a, union in zip(*split, strict=True)], 1)

    # In a ring, `behind` slots follow the keys in reach: the first tokens', and one of zeros for the learned sink.

    @property
    def behind(self) -> int:
        """Number of these slots."""
        return self.config.sinks + self.config.learned_sink

    def ring_slots(self, seen_B: Tensor, slots: int) -> list[Tensor]:
        """Return the slot in the ring, and for a sink its own slot behind it; for other tokens the first one again."""
        near = slots - self.behind
        found = super().ring_slots(seen_B, near)
        return [*found, torch.where(seen_B < self.config.sinks, near + seen_B, found[0])] if self.far else found

    def ring_bias(self, seen_B: Tensor, slots: int, q_BH1K: Tensor) -> Tensor:
        """Return 0 for keys that the token sees, the learned logit for the sink's key of zeros, else -inf."""
        bias_BHN = super().ring_bias(seen_B, slots - self.behind, q_BH1K)
        if self.far:
            p_BN = torch.arange(self.config.sinks, device=seen_B.device).expand(len(seen_B), -1)
            bias_BHN = torch.cat([bias_BHN, self.bias_of(self.far, seen_B, p_BN, q_BH1K)], 2)
        if self.sink_logits is not None:
            sink_BH1 = self.sink_logits.to(q_BH1K.dtype)[:, None].expand(len(seen_B), -1, -1)
            bias_BHN = torch.cat([bias_BHN, sink_BH1], 2)
        return bias_BHN

    def to_ring(self, state: State, capacity: int) -> State:
        """Return the base's state, with the slots behind the ring."""
        ring = super().to_ring(state, capacity)
        for name, first in zip(RING, FIRST, strict=True):
            held = [state.tensor(first)] if self.far else []
            x_BGNK = torch.cat([ring.tensor(name), *held], 2)
            ring.entries[name] = F.pad(x_BGNK, (0, 0, 0, int(self.config.learned_sink)))
        return ring

    def from_ring(self, state: State) -> State:
        """Return the state that `to_ring` takes, aligned to the end, for one row."""
        if RING[0] not in state:
            return state
        near, n = state.tensor(RING[0]).shape[2] - self.behind, self.config.sinks
        ring = {name: state.tensor(name)[:, :, :near] for name in RING}
        first = {to: state.tensor(name)[:, :, near : near + n] for name, to in zip(RING, FIRST, strict=True) if n}
        entries = super().from_ring(State({"seen": state.seen, **ring})).entries
        return State({**entries, **first}, state.config_hash)

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes sent for what is near and for the first tokens."""
        first = first_before(self.config.sinks, tokens, ranks)
        return added(super().sent(tokens, ranks), sent_for_earlier(first, tokens, 2 * 4 * self.kv_dim))
