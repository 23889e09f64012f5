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
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.attention.base import Attention, takes_options
from subquad.attention.memories.key_values import Sight, attend
from subquad.attention.parts import (
    SoftmaxConfig,
    add_softmax_projections,
    divisible_heads,
    softmax_heads,
    softmax_over,
)
from subquad.attention.past import Past
from subquad.ops import merge_attention
from subquad.ops.attend import softmax_weights
from subquad.ops.counting import first_replaced
from subquad.ops.patterns import Blocks, Full, Globals, Pattern, Random, Segments, Sinks


class Bigbird(Attention):
    """Neighbouring, global and random blocks; the state keeps every key, since any block may be drawn."""

    name = "bigbird"
    summary = "blocks: next to it, the first ones, random ones"
    paper = "Zaheer et al. 2020, arXiv:2007.14062"
    forms = ("causal", "bidirectional")
    state_grows = True
    rotates = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
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
        add_softmax_projections(self, config)
        self.sight = Sight((blocks_of(config, 0),))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the blocks; bidirectional, those of the whole sequence."""
        if self.causal:
            return softmax_over(self, self.sight, x_BTD, past)
        q_BHTK, k_BGTK, v_BGTK = softmax_heads(self, x_BTD, past.start)
        (blocks,) = past.keep(blocks=AllBlocks(k_BGTK, past.values(v_BGTK), self.config, self.dropout_p))
        return blocks.read(q_BHTK)

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)


def blocks_of(config: Bigbird.Config, tokens: int) -> tuple[Pattern, ...]:
    """Return the disjoint patterns of a sequence of `tokens` tokens, without the global rows."""
    c = config
    blocks, ahead = (0, 0) if c.causal else (-(-tokens // c.block), c.back)
    near: Pattern = Blocks(size=c.block, back=c.back, ahead_blocks=c.back)
    first: Pattern = Globals(count=c.num_global, back=c.back, ahead_blocks=c.back, size=c.block)
    if c.causal:
        near = Segments(size=c.block, back=c.back)
        first = Sinks(count=c.num_global, back=c.back, size=c.block)
    shape = {"size": c.block, "of": c.num_random, "skip": c.num_global, "back": c.back, "ahead_blocks": ahead}
    drawn = [Random(index=i, blocks=blocks, seed=c.seed, **shape) for i in range(c.num_random)]
    return (near, *([first] if c.num_global else []), *drawn)


@dataclass(frozen=True, eq=False)
class AllBlocks:
    """Keys and values of the bidirectional form; `read(q)` merges the blocks, and queries of global blocks see all."""

    k: Tensor
    v: Tensor
    config: Bigbird.Config
    dropout_p: float

    slots: ClassVar[tuple[str, ...]] = ()

    def read_all(self, q_BHTK: Tensor, at: Past) -> Tensor:
        """Return the outputs; rows of different lengths go one by one."""
        if at.lengths is None:
            return self.found(q_BHTK, self.k, self.v)
        T, rows = q_BHTK.shape[2], []
        for b, n in enumerate(at.lengths.tolist()):
            q, k, v = (x[b : b + 1, :, :n] for x in (q_BHTK, self.k, self.v))
            rows.append(F.pad(self.found(q, k, v), (0, 0, 0, T - n)))
        return torch.cat(rows) if rows else q_BHTK

    def found(self, q_BHTK: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the outputs of whole sequences."""
        first = self.config.num_global * self.config.block
        with first_replaced(first):
            union = blocks_of(self.config, q_BHTK.shape[2])
            parts = [attend((pattern,), q_BHTK, k, v, self.dropout_p) for pattern in union]
            y_BHTK, _ = merge_attention(*zip(*parts, strict=True))
        if first == 0:
            return y_BHTK
        rows_BHGK, _ = attend((Full(),), q_BHTK[:, :, :first], k, v, self.dropout_p)
        return torch.cat([rows_BHGK, y_BHTK[:, :, first:]], 2)

    def literal(self, q_BHTK: Tensor, causal: bool) -> Tensor:
        """Return the product of the weights and the values."""
        share, T = q_BHTK.shape[1] // self.k.shape[1], q_BHTK.shape[2]
        k, v = (x.repeat_interleave(share, 1) for x in (self.k, self.v))
        w_BHTS = softmax_weights(q_BHTK, k, *blocks_of(self.config, T))
        is_global_T1 = torch.arange(T, device=k.device)[:, None] < self.config.num_global * self.config.block
        w_BHTS = torch.where(is_global_T1, softmax_weights(q_BHTK, k, Full()), w_BHTS)
        return w_BHTS.to(v.dtype) @ v
