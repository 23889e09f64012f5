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

from subquad.attention.base import takes_options
from subquad.attention.blocked import BlockedAttention, Places
from subquad.ops.patterns import Pattern, Segments
from subquad.ops.patterns import Shifted as ShiftedPattern


class Shifted(BlockedAttention):
    """Its group of tokens, causally; half of the heads have other groups."""

    name = "shifted"
    rings = True
    summary = "its group; half of the heads have moved groups"
    paper = "Chen et al. 2023, arXiv:2309.12307"
    exempting = {"wrap": True}  # noqa: RUF012 (read only)

    @dataclass(frozen=True, kw_only=True)
    class Config(BlockedAttention.Config):
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
        own = Segments(size=config.group, back=0)
        self.patterns = (own, own if config.wrap else ShiftedPattern(size=config.group, shift=config.group // 2))
        self.causal = not config.wrap

    def exemptions(self) -> dict[int, str]:
        """Return the laws that wrap=True breaks: it is not causal."""
        if self.causal:
            return {}
        leak = "wrap=True leaks the last tokens to the first ones, as published"
        whole = "wrap=True takes whole groups without padding only"
        return {3: leak, 4: leak, 5: leak, 7: whole, 8: whole, 9: leak, 15: whole}

    def attend_slots(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, patterns: tuple[Pattern, ...], places: Places
    ) -> Tensor:
        """Attend; with wrap=True the last half of the heads is rolled before and rolled back after."""
        if not self.config.wrap:
            return super().attend_slots(q_BHTK, k_BGSK, v_BGSK, patterns, places)
        if places.lengths is not None or q_BHTK.shape[2] % self.config.group:
            raise ValueError(
                f"wrap=True takes sequences of whole groups of {self.config.group} tokens without padding, "
                f"got {q_BHTK.shape[2]} tokens{'' if places.lengths is None else ' with padding'}"
            )
        q, k, v = (self.rolled(x, -1) for x in (q_BHTK, self.shared(k_BGSK), self.shared(v_BGSK)))
        return self.rolled(super().attend_slots(q, k, v, patterns, places), 1)

    def rolled(self, x_BHTK: Tensor, sign: int) -> Tensor:
        """Roll the last half of the heads by half a group, forwards or backwards."""
        plain, moved = x_BHTK.split(self.heads_of(self.patterns), 1)
        return torch.cat([plain, moved.roll(sign * (self.config.group // 2), 2)], 1)

    def pattern_weights(self, q_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
        """Return the weights; with wrap=True rolled back to the order of the tokens."""
        if not self.config.wrap:
            return super().pattern_weights(q_BHTK, k_BGSK)
        w_BHTS = super().pattern_weights(self.rolled(q_BHTK, -1), self.rolled(self.shared(k_BGSK), -1))
        return self.rolled(self.rolled(w_BHTS, 1).mT, 1).mT
