"""LLP, pairwise overlapping half segments (Mahmood and Huang 2024, arXiv:2412.06106, section 4.4, equations 22 to 29).

With c = segment / 2, token t of block i = t // c attends causally to block i and to all of block i - 1:

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    c (t // c - 1) <= s <= t

A token sees c + 1 to 2c tokens (1 to c in block 0). Equations and pseudocode of the paper differ; here all blocks use
one set of projections, and `llp_printed` follows the paper to the letter. Scores are divided by sqrt(K), as in equation
1.

`shifted_heads` follows the paper's conclusion: half of the heads have boundaries moved by s / 4, so that their first
block has s / 4 tokens; nothing wraps around. Bidirectional, a token sees all of its half segment and of both
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from subquad.attention.base import Attention, takes_options
from subquad.attention.memories.key_values import Sight
from subquad.attention.parts import SinkConfig, add_sink, add_softmax_projections, divisible_heads, softmax_over
from subquad.attention.past import Past
from subquad.ops.patterns import Blocks, Segments, Shifted, SinkTokens


class Llp(Attention):
    """The query's half segment, causally, and the whole one before it."""

    name = "llp"
    summary = "its half segment and the one before"
    paper = "Mahmood and Huang 2024, arXiv:2412.06106"
    forms = ("causal", "bidirectional")
    softmax_reach = "segment"
    rotates = True
    has_static_cache = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SinkConfig):
        """Options of LLP."""

        segment: int = 256
        """The paper's s: tokens of a segment, two halves; a query sees at most s tokens."""
        shifted_heads: bool = False
        """Whether half of the heads have boundaries moved by a quarter of a segment."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.segment < 2 or self.segment % 2:
                raise ValueError(f"segment must be even and at least 2 (two half segments), got {self.segment}")
            if self.shifted_heads and not self.causal:
                raise ValueError("shifted_heads is a causal form: it does not go with causal=False")
            if self.shifted_heads and (self.num_heads < 2 or self.segment % 4):
                raise ValueError(
                    "shifted_heads moves the boundaries of half of the heads by a quarter of a segment: it needs "
                    f"at least 2 heads and a multiple of 4, got num_heads={self.num_heads}, segment={self.segment}"
                )

    config: Config
    sink_logits: nn.Parameter | None

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        add_sink(self, config)
        c = config.segment // 2
        near = [Segments(size=c) if config.causal else Blocks(size=c, back=1, ahead_blocks=1)]
        if config.shifted_heads:
            near.append(Shifted(size=c, shift=c // 2, back=1))
        offsets = (0, c - c // 2)[: len(near)] if config.sinks else ()
        far = tuple(SinkTokens(count=config.sinks, back=1, size=c, offset=offset) for offset in offsets)
        self.sight = Sight(tuple((pattern,) for pattern in near), far, config.sinks)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the keys in sight."""
        return softmax_over(self, self.sight, x_BTD, past, self.sink_logits)

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)
