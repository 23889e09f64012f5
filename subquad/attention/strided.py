"""The Sparse Transformer's two factorised patterns (Child et al. 2019, arXiv:1904.10509, section 4.2 and 4.3).

    y_t = sum_{s in A_h(t)} softmax_s(q_t . k_s / sqrt(K)) v_s

With l = `stride`, half of the heads have A1 and half A2 (the paper's third way of using two patterns, section 5.2):

    kind = strided:  A1(t) = {t - l, ..., t},              A2(t) = {s <= t : (t - s) mod l = 0}
    kind = fixed:    A1(t) = {s <= t : s // l = t // l},   A2(t) = {s <= t : s mod l >= l - columns}

The cost per head is T (l + T / l), least for l about sqrt(T); for a given l it is quadratic. With `fixed`, queries
before the first column see no key in A2, and the output of those heads is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from subquad.attention.base import Attention, takes_options
from subquad.attention.memories.key_values import Sight
from subquad.attention.parts import SoftmaxConfig, add_softmax_projections, softmax_over
from subquad.attention.past import Past
from subquad.ops.patterns import Pattern, Segments, Window
from subquad.ops.patterns import Strided as StridedPattern
from subquad.ops.patterns.sparse import Columns

Kind = Literal["strided", "fixed"]


class Strided(Attention):
    """Half of the heads see near tokens, half every `stride`-th token or a column of each block; all keys are kept."""

    name = "strided"
    summary = "near tokens, and every `stride`-th earlier one"
    paper = "Child et al. 2019, arXiv:1904.10509"
    cost_order = "quadratic"
    state_grows = True
    rotates = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of the Sparse Transformer's patterns."""

        stride: int = 128
        """The paper's l: size of the window or block, and distance between far tokens."""
        kind: Kind = "strided"
        """Pair of patterns: strided (images, audio) or fixed (text)."""
        columns: int = 8
        """For kind=fixed, the paper's c: tokens at the end of each block that all later tokens see."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.num_heads < 2:
                raise ValueError(f"strided has two patterns and needs at least 2 heads, got num_heads={self.num_heads}")
            self.check_least(stride=1)
            if self.kind == "fixed" and not 1 <= self.columns <= self.stride:
                raise ValueError(f"columns must be from 1 to stride={self.stride}, got {self.columns}")

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        if config.kind == "strided":
            near: tuple[Pattern, Pattern] = Window(width=config.stride + 1), StridedPattern(stride=config.stride)
        else:
            near = Segments(size=config.stride, back=0), Columns(size=config.stride, last=config.columns)
        self.sight = Sight(tuple((pattern,) for pattern in near))
        self.is_distribution = config.kind == "strided"  # fixed: rows before the first column see no key

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the keys in sight."""
        return softmax_over(self, self.sight, x_BTD, past)
