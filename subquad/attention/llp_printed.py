"""LLP as its paper prints it: the first half segment apart (Mahmood and Huang 2024, arXiv:2412.06106, section 4.4).

With c = segment / 2, token t of block i = t // c attends causally to block i and to all of block i - 1, as in `llp`:

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    c (t // c - 1) <= s <= t

Equations and pseudocode differ. The default is the pseudocode (figure 5): one tensor is key and value (`shared_kv`),
keys are normalised for the scores of blocks after the first (`key_norm`), and block 0 has its own output projection
(`split_output`). Its mask, as printed, raises; here the mask binds and the mechanism is exactly causal.
`first_block_projections` alone, without the three, is equations 22 to 24: block 0 has its own q, k and v. Scores are
divided by sqrt(K), as in equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from subquad.attention.base import takes_options
from subquad.attention.blocked import BlockedAttention
from subquad.attention.divided import uneven
from subquad.attention.sharing import added
from subquad.layers.positions import positions
from subquad.ops.caches import advance
from subquad.ops.counting import first_replaced
from subquad.ops.patterns import Segments
from subquad.parallel import Sent, active_group
from subquad.state import State


class LlpPrinted(BlockedAttention):
    """The query's half segment, causally, and the whole one before it; the first half segment in its own way."""

    name = "llp_printed"
    summary = "as `llp`, with the first half segment apart"
    paper = "Mahmood and Huang 2024, arXiv:2412.06106"
    parallel = True

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockedAttention.Config):
        """Options of LLP as printed."""

        segment: int = 256
        """The paper's s: tokens of a segment, two halves; a query sees at most s tokens."""
        first_block_projections: bool = False
        """Whether the first half segment has its own query, key and value projections."""
        shared_kv: bool = True
        """Whether one projection gives both keys and values."""
        key_norm: bool = True
        """Whether keys are normalised (per head) for the scores of every block but the first."""
        split_output: bool = True
        """Whether the first half segment has its own output projection."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.segment < 2 or self.segment % 2:
                raise ValueError(f"segment must be even and at least 2 (two half segments), got {self.segment}")

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.half_segment = config.segment // 2
        c = self.half_segment
        self.patterns = (Segments(size=c),)
        self.first_patterns = (Segments(size=c, back=0),)
        self.special_first_block = config.first_block_projections or config.key_norm
        if config.first_block_projections:
            self.first_query = self.projection(self.q_dim)
            self.first_key = self.projection(self.kv_dim)
            self.first_value = self.projection(self.kv_dim)
        self.norm = nn.LayerNorm(config.channels) if config.key_norm else nn.Identity()
        if config.split_output:
            self.first_out = self.output_projection()
        if config.shared_kv:
            del self.value
            if config.first_block_projections:
                del self.first_value

    def mix_tokens(self, x_BTD: Tensor, state: State | None, lengths_B: Tensor | None) -> tuple[Tensor, State]:
        """Attend in all blocks alike, then again in the first block if an option gives it its own projections."""
        seen = self.start(state, x_BTD.shape[1])
        q, k, v = raw = self.project(x_BTD)
        q, k = self.rotated(q, seen), self.rotated(self.norm(k), seen)
        with first_replaced(self.half_segment if self.special_first_block else 0):
            y_BHTK, k, v = self.attend(q, k, v, self.patterns, self.near(state, k, v, self.patterns), "", lengths_B)
        after = advance(seen, x_BTD.shape[1], lengths_B)
        entries: dict[str, Tensor | int | State] = {"seen": after, "keys": k, "values": v}
        if self.special_first_block and (state is None or "first_keys" in state):
            # Only the first c tokens of this call can be in block 0.
            lengths = None if lengths_B is None else lengths_B.clamp(max=self.half_segment)
            q, k, v = self.first_block(x_BTD[:, : self.half_segment], [x[:, :, : self.half_segment] for x in raw])
            q, k = self.rotated(q, seen), self.rotated(k, seen)
            state = self.near(state, k, v, self.first_patterns, "first_", x_BTD.shape[1])
            y_BHCK, k, v = self.attend(q, k, v, self.first_patterns, state, "first_", lengths)
            first = self.in_first_block(seen, y_BHCK.shape[2], x_BTD)[:, None]
            y_BHCK = torch.where(first, y_BHCK, y_BHTK[:, :, : self.half_segment])
            y_BHTK = torch.cat([y_BHCK, y_BHTK[:, :, self.half_segment :]], 2)
            if not (isinstance(after, int) and after >= self.half_segment):
                entries |= {"first_keys": k, "first_values": v}
        return self.merge_from(y_BHTK, seen), State(entries, self.config_hash)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, neither normalised nor rotated."""
        k_BGTK = self.key_heads(self.key(x_BTD))
        v_BGTK = k_BGTK if self.config.shared_kv else self.split(self.value(x_BTD), width=self.channels)
        q_BHTK = self.query_heads(self.query(x_BTD))
        if q_BHTK.shape[1] != k_BGTK.shape[1] * self.sharing:
            raise uneven(self, q_BHTK.shape[1], k_BGTK.shape[1])
        return q_BHTK, k_BGTK, v_BGTK

    def first_block(self, x_BCD: Tensor, raw: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the first half segment's queries, keys and values, not rotated: its own, or those of all blocks."""
        if not self.config.first_block_projections:
            return raw
        k_BGCK = self.key_heads(self.first_key(x_BCD))
        v_BGCK = k_BGCK if self.config.shared_kv else self.split(self.first_value(x_BCD), width=self.channels)
        return self.query_heads(self.first_query(x_BCD)), k_BGCK, v_BGCK

    def in_first_block(self, start: int | Tensor, tokens: int, like: Tensor) -> Tensor:
        """Return the bool `[B or 1, T, 1]` of tokens in the first half segment."""
        return (positions(start, tokens, like.device) < self.half_segment)[..., None]

    def merge_from(self, y_BHTV: Tensor, start: int | Tensor) -> Tensor:
        """Apply the output projections to tokens from position `start` on."""
        y_BTD = self.out(self.join(y_BHTV))
        # Every rank of a group takes part in the gradient of `first_out`.
        beyond = isinstance(start, int) and start >= self.half_segment and active_group() is None
        if not self.config.split_output or beyond:
            return y_BTD
        y_BCD = self.first_out(self.join(y_BHTV[:, :, : self.half_segment]))
        first = self.in_first_block(start, y_BCD.shape[1], y_BTD)
        return torch.cat([torch.where(first, y_BCD, y_BTD[:, : self.half_segment]), y_BTD[:, self.half_segment :]], 1)

    def merge(self, y_BHTV: Tensor) -> Tensor:
        """Apply the output projections to a sequence from its start."""
        return self.merge_from(y_BHTV, 0)

    def values(self, x_BTD: Tensor) -> Tensor:
        """Return the values `[B, H, T, K]` of all blocks."""
        return self.shared(self.project(x_BTD)[2])

    def dense_weights(self, x_BTD: Tensor) -> Tensor:
        """Return the weights of all blocks; the first block's rows use its own queries and keys if it has them."""
        q, k, v = self.project(x_BTD)
        w_BHTS = self.pattern_weights(self.rotated(q, 0), self.rotated(self.norm(k), 0))
        if not self.special_first_block:
            return w_BHTS
        q, k, _ = self.first_block(x_BTD, (q, k, v))
        first = self.in_first_block(0, x_BTD.shape[1], x_BTD)[:, None]
        return torch.where(first, self.pattern_weights(self.rotated(q, 0), self.rotated(k, 0)), w_BHTS)

    def definition(self, x_BTD: Tensor) -> Tensor:
        """Return `merge(weights @ values)`, with the first block's own values if it has them."""
        w_BHTS = self.weights(x_BTD)
        y_BHTV = w_BHTS @ self.values(x_BTD)
        if self.special_first_block:
            v_BHTV = self.shared(self.first_block(x_BTD, self.project(x_BTD))[2])
            y_BHTV = torch.where(self.in_first_block(0, x_BTD.shape[1], x_BTD)[:, None], w_BHTS @ v_BHTV, y_BHTV)
        return self.merge(y_BHTV)

    def sent(self, tokens: int, ranks: int) -> list[Sent]:
        """Return the bytes of keys and values in reach, and of the first half segment's own if ranks share it."""
        near = super().sent(tokens, ranks)
        if not self.special_first_block or tokens > self.half_segment:
            return near
        return added(near, self.sent_for(self.first_patterns, tokens, ranks))
