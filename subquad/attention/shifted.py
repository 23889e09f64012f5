"""LongLoRA's shifted sparse attention, S2 (Chen et al. 2023, arXiv:2309.12307, section 3.2).

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    s <= t in the same group of `group` tokens as t

For half of the heads the boundaries of the groups are moved by `group // 2`. The default moves them and nothing else:
the first group of those heads has `group // 2` tokens. It is exactly causal and can be decoded with two windows of
keys.

`wrap=True` is the published form: the tokens of those heads are rolled by half a group, so the first half group shares
a group with the last one and, under a mask that is triangular in the rolled order, sees the LAST tokens of the
sequence. It LEAKS THE FUTURE, needs whole groups, and is here for comparison only. The authors use S2 in training alone
and full attention afterwards, with a group of a quarter of the sequence; here the group has a fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.attention.base import Attention, takes_options
from subquad.attention.laws import OF_STATES, Law
from subquad.attention.memories.key_values import KeyValues, Sight
from subquad.attention.parts import SoftmaxConfig, add_softmax_projections, softmax_heads, softmax_over
from subquad.attention.past import Past
from subquad.ops.patterns import Segments
from subquad.ops.patterns import Shifted as ShiftedPattern


class Shifted(Attention):
    """Its group of tokens, causally; half of the heads have other groups."""

    name = "shifted"
    rotates = True
    has_static_cache = True
    summary = "its group; half of the heads have moved groups"
    paper = "Chen et al. 2023, arXiv:2309.12307"
    exempt_options = {"wrap": True}  # noqa: RUF012 (read only)

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of shifted attention."""

        group: int = 256
        """Tokens of a group, the paper's G."""
        wrap: bool = False
        """Whether the moved groups wrap around, as published: this LEAKS the last tokens to the first ones."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.num_heads < 2:
                raise ValueError(
                    f"shifted moves the groups of half of the heads: num_heads={self.num_heads} has no half"
                )
            if self.group < 2 or self.group % 2:
                raise ValueError(f"group must be even and at least 2 (two halves), got {self.group}")

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        own = Segments(size=config.group, back=0)
        moved = own if config.wrap else ShiftedPattern(size=config.group, shift=config.group // 2)
        self.sight = Sight(((own,), (moved,)))
        self.causal = not config.wrap

    def exemptions(self) -> dict[Law, str]:
        """Return the laws that wrap=True breaks: it is not causal."""
        if self.causal:
            return {}
        leak = "wrap=True leaks the last tokens to the first ones, as published"
        whole = "wrap=True takes whole groups without padding only"
        return dict.fromkeys((*OF_STATES, Law.NO_FUTURE), leak) | dict.fromkeys(
            (Law.BLOCK_SIZES, Law.PADDING, Law.DOCUMENTS), whole
        )

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the keys in sight; with wrap=True the last half of the heads is rolled before and rolled back after."""
        if not self.config.wrap:
            return softmax_over(self, self.sight, x_BTD, past)
        if past.lengths is not None or x_BTD.shape[1] % self.config.group:
            raise ValueError(
                f"wrap=True takes sequences of whole groups of {self.config.group} tokens without padding, "
                f"got {x_BTD.shape[1]} tokens{'' if past.lengths is None else ' with padding'}"
            )
        q_BHTK, k_BGTK, v_BGTK = softmax_heads(self, x_BTD, past.start)
        share = q_BHTK.shape[1] // k_BGTK.shape[1]
        k_BHTK, v_BHTK = (x.repeat_interleave(share, 1) for x in (k_BGTK, past.values(v_BGTK)))
        half = self.config.group // 2
        q_BHTK, k_BHTK, v_BHTK = (rolled(x, -half) for x in (q_BHTK, k_BHTK, v_BHTK))
        (near,) = past.keep(near=KeyValues(k_BHTK, v_BHTK, self.sight, self.dropout_p))
        return rolled(near.read(q_BHTK), half)


def rolled(x_BHTK: Tensor, tokens: int) -> Tensor:
    """Roll the last half of the heads by some tokens."""
    moved = x_BHTK.shape[1] // 2
    plain_BHTK, moved_BHTK = x_BHTK.split([x_BHTK.shape[1] - moved, moved], 1)
    return torch.cat([plain_BHTK, moved_BHTK.roll(tokens, 2)], 1)
