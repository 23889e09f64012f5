"""BigBird: a window of blocks, global blocks and random blocks (Zaheer et al. 2020, arXiv:2007.14062, section 2; the
blocks are those of its appendix D).

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s    over the keys of t's block and of `back` blocks beside it, of the
                                                      first `num_global` blocks and of `num_random` random blocks

Bidirectional, the window has `back` blocks on both sides, and queries of the global blocks see everything. Causal (not
in the paper), all of these lie at or before the query. A random block is drawn for each block of queries by a hash of
`seed`: the candidates are cut into `num_random` equal strata and one is drawn from each, so no block is drawn twice,
and causal draws do not depend on how long the sequence is. Bidirectional ones do: rows of different lengths are
attended one by one, which torch.compile cannot trace (a mask breaks the graph there).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import takes_options
from subquad.attention.blocked import BlockedAttention, Places
from subquad.layers.positions import positions
from subquad.ops import merge_attention
from subquad.ops.attend import softmax_weights
from subquad.ops.counting import first_replaced
from subquad.ops.patterns import Blocks, Full, Globals, Pattern, Random, Segments, Sinks


class Bigbird(BlockedAttention):
    """Blocks: those next to it, the first ones, and random ones; the state keeps every key, as any may be drawn."""

    name = "bigbird"
    summary = "blocks: next to it, the first ones, random ones"
    paper = "Zaheer et al. 2020, arXiv:2007.14062"
    forms = ("causal", "bidirectional")
    state_grows = True

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockedAttention.Config):
        """Options of BigBird."""

        block: int = 64
        """Tokens in a block."""
        back: int = 1
        """Blocks of the window before the query's own (bidirectional: on each side)."""
        num_global: int = 2
        """Number of global blocks: the first ones."""
        num_random: int = 3
        """Random blocks that each block of queries sees."""
        seed: int = 0
        """Seed of the random blocks."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.seed >= 2**32:
                raise ValueError(f"seed must be below 2**32, got {self.seed}")
            self.check_least(block=1, back=0, num_global=0, num_random=0, seed=0)

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        near = Segments(size=config.block, back=config.back)
        both = Blocks(size=config.block, back=config.back, ahead_blocks=config.back)
        self.patterns = (near if config.causal else both,)

    def reach(self, patterns: tuple[Pattern, ...]) -> int | None:
        """Return None: a random or global block may be the first one."""
        return None

    def union(self, tokens: int) -> list[Pattern]:
        """Return the disjoint patterns of a sequence of `tokens` tokens, without the global rows."""
        c = self.config
        blocks = 0 if c.causal else -(-tokens // c.block)
        far: list[Pattern] = []
        if c.num_global and c.causal:
            far.append(Sinks(count=c.num_global, back=c.back, size=c.block))
        elif c.num_global:
            far.append(Globals(count=c.num_global, back=c.back, ahead_blocks=c.back, size=c.block))
        ahead = 0 if c.causal else c.back
        shape = {"size": c.block, "of": c.num_random, "skip": c.num_global, "back": c.back, "ahead_blocks": ahead}
        far += [Random(index=i, blocks=blocks, seed=c.seed, **shape) for i in range(c.num_random)]
        return [*self.patterns, *far]

    def unions(self, tokens: int) -> list[tuple[int, tuple[Pattern, ...]]]:
        """Return one group: all heads see the union."""
        return [(self.config.num_heads, tuple(self.union(tokens)))]

    def attend_slots(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, patterns: tuple[Pattern, ...], places: Places
    ) -> Tensor:
        """Attend to all blocks and merge; bidirectional rows of different lengths go one by one."""
        T = q_BHTK.shape[2]
        if not self.causal and places.lengths is not None:
            rows = []
            for b, n in enumerate(places.lengths.tolist()):
                q, k, v = (x[b : b + 1, :, :n] for x in (q_BHTK, k_BGSK, v_BGSK))
                rows.append(F.pad(self.attend_slots(q, k, v, patterns, Places()), (0, 0, 0, T - n)))
            return torch.cat(rows) if rows else q_BHTK
        first = 0 if self.causal else self.config.num_global * self.config.block
        with first_replaced(first):
            y_BHTK, _ = self.attend_with_lse(q_BHTK, k_BGSK, v_BGSK, patterns, places)
        if first == 0:
            return y_BHTK
        rows_BHGK, _ = self.attend_to(q_BHTK[:, :, :first], k_BGSK, v_BGSK, Full())
        return torch.cat([rows_BHGK, y_BHTK[:, :, first:]], 2)

    def attend_with_lse(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, patterns: tuple[Pattern, ...], places: Places
    ) -> tuple[Tensor, Tensor]:
        """Attend to all blocks and merge, without the global rows."""
        union = self.union(q_BHTK.shape[2])
        parts = [self.attend_to(q_BHTK, k_BGSK, v_BGSK, pattern, **places._asdict()) for pattern in union]
        return merge_attention(*zip(*parts, strict=True))

    def pattern_weights(self, q_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
        """Return the softmax over all blocks; in the bidirectional form global rows see everything."""
        w_BHTS = super().pattern_weights(q_BHTK, k_BGSK)
        if self.causal:
            return w_BHTS
        first = self.config.num_global * self.config.block
        is_global_T1 = (positions(0, q_BHTK.shape[2], q_BHTK.device) < first)[0, :, None]
        return torch.where(is_global_T1, softmax_weights(q_BHTK, k_BGSK, Full()), w_BHTS)
