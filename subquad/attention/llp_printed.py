"""LLP as its paper prints it: the first half segment apart (Mahmood and Huang 2024, arXiv:2412.06106, section 4.4).

With c = segment / 2, token t of block i = t // c attends causally to block i and to all of block i - 1, as in `llp`:

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    c (t // c - 1) <= s <= t

Equations and pseudocode differ. The default is the pseudocode (figure 5): one tensor is key and value (`shared_kv`),
keys are normalised for the scores of blocks after the first (`key_norm`), and block 0 has its own output projection
(`split_output`). The mask as printed raises an error; here it is applied, and the mechanism is exactly causal.
`first_block_projections` alone, without the three, is equations 22 to 24: block 0 has its own q, k and v. Scores are
divided by sqrt(K), as in equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from subquad.attention.base import Attention, join, split, takes_options
from subquad.attention.divided import check_even
from subquad.attention.memories.key_values import KeyValues, Sight
from subquad.attention.parts import (
    SoftmaxConfig,
    add_softmax_projections,
    divisible_heads,
    instead_of_first,
    normed,
    output_projection,
    projection,
    queries,
    rotated,
)
from subquad.attention.past import Past
from subquad.ops.counting import first_replaced
from subquad.ops.patterns import Segments


class LlpPrinted(Attention):
    """The query's half segment, causally, and the whole one before it; the first half segment in its own way."""

    name = "llp_printed"
    summary = "as `llp`, with the first half segment apart"
    paper = "Mahmood and Huang 2024, arXiv:2412.06106"
    rotates = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
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
        add_softmax_projections(self, config)
        c = self.half_segment = config.segment // 2
        self.sight, self.first_sight = (Sight(((Segments(size=c, back=back),),)) for back in (1, 0))
        self.special_first_block = config.first_block_projections or config.key_norm
        if config.first_block_projections:
            self.first_query = projection(config, config.num_heads)
            self.first_key, self.first_value = (projection(config, config.key_heads) for _ in range(2))
        self.norm = nn.LayerNorm(config.channels) if config.key_norm else nn.Identity()
        if config.split_output:
            self.first_out = output_projection(config)
        if config.shared_kv:
            del self.value
            if config.first_block_projections:
                del self.first_value

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read all blocks, then the first one again if an option gives it its own queries, keys or values."""
        c, special = self.half_segment, self.special_first_block
        q, k, v = raw = self.heads(x_BTD, "")
        check_even(self, q, k, self.config.query_share)
        with first_replaced(c if special else 0):
            y_BHTK = self.read(past, "near", self.sight, q, self.norm(k), v)
        first = past.first(c, "first") if special else None
        if first is None:
            return y_BHTK
        own = self.config.first_block_projections
        q, k, v = self.heads(x_BTD[:, :c], "first_") if own else (x[:, :, :c] for x in raw)
        return instead_of_first(c, self.read(first, "first", self.first_sight, q, k, v), y_BHTK, past.start)

    def heads(self, x_BTD: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the projections of all blocks, or of the first one's."""
        channels = self.config.channels
        (k_BGTK,) = split(channels, getattr(self, f"{prefix}key")(x_BTD))
        k_BGTK = v_BGTK = normed(k_BGTK, self.key_norm)
        if not self.config.shared_kv:
            (v_BGTK,) = split(channels, getattr(self, f"{prefix}value")(x_BTD))
        return split(channels, getattr(self, f"{prefix}query")(x_BTD))[0], k_BGTK, v_BGTK

    def read(self, past: Past, name: str, sight: Sight, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax attention to rotated keys: keep them, and read them."""
        k_BGTK = rotated(self.config, k, past.start)
        (blocks,) = past.keep(**{name: KeyValues(k_BGTK, past.values(v), sight, self.dropout_p)})
        return blocks.read(queries(self, q, past.start))

    def outputs(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Return the mixed tokens; overridden, since `finish` does not know which tokens are in the first block."""
        c, y_BHTV = self.half_segment, self.mix(x_BTD, past)
        y_BTD = self.out(join(y_BHTV))
        # Every rank of a group takes part in the gradient of `first_out`.
        beyond = isinstance(past.start, int) and past.start >= c and past.group is None
        if not self.config.split_output or beyond:
            return y_BTD
        return instead_of_first(c, self.first_out(join(y_BHTV[:, :, :c])), y_BTD, past.start)

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)
