"""Longformer: a sliding window and global tokens with projections of their own (Beltagy et al. 2020, arXiv:2004.05150,
section 3.1).

    y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s        over the window of t and the first `num_global` tokens
    y_g = sum_s softmax_s(q'_g . k'_s / sqrt(K)) v'_s     over all tokens, for a global token g; q', k', v' are its own

Global tokens are the first ones. Causal, every query (a global one too) sees nothing after itself, the window is the
last `width` tokens, and the state keeps the window's keys and the global tokens'. Other tokens see a global token
through the ordinary projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from subquad.attention.base import Attention, split, takes_options
from subquad.attention.memories.key_values import KeyValues, Sight, attend
from subquad.attention.parts import (
    SoftmaxConfig,
    add_softmax_projections,
    divisible_heads,
    instead_of_first,
    keys,
    projection,
    queries,
    softmax_over,
)
from subquad.attention.past import Past
from subquad.ops.counting import first_replaced
from subquad.ops.patterns import Band, Full, Globals, Segments, Sinks, Window


class Longformer(Attention):
    """A window, and the first tokens, which see everything and are seen by all."""

    name = "longformer"
    summary = "the `width` tokens next to it, and global tokens"
    paper = "Beltagy et al. 2020, arXiv:2004.05150"
    forms = ("causal", "bidirectional")
    rotates = True
    weight_map = {f"global_{name}": name for name in ("query", "key", "value")}  # noqa: RUF012 (read only)

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of Longformer."""

        width: int = 256
        """Tokens of the window, the query's own included."""
        num_global: int = 1
        """Number of global tokens: the first ones."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(width=1)
            if self.num_global < 1:
                raise ValueError(f"num_global must be at least 1 (else use window), got {self.num_global}")

    config: Config

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        self.global_query = projection(config, config.num_heads)
        self.global_key, self.global_value = (projection(config, config.key_heads) for _ in range(2))
        before, count = config.width // 2, config.num_global
        if config.causal:
            sinks = Sinks(count=count, back=config.width - 1)
            self.sight = Sight(((Window(width=config.width),),), (sinks,), count)
            self.global_sight = Sight(((Segments(size=count, back=0),),))
        else:
            after = config.width - 1 - before
            far = Globals(count=count, back=before, ahead_blocks=after)
            self.sight = Sight(((Band(before=before, after=after), far),))
            self.global_sight = Sight(((Full(),),))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the window and the global keys; then compute the global tokens' own rows."""
        count = self.config.num_global
        with first_replaced(count):
            y_BHTK = softmax_over(self, self.sight, x_BTD, past)
        first = past.first(count, "own")
        if first is None:
            return y_BHTK
        # In the causal form global tokens see only global tokens.
        seen, x_BSD = (first, x_BTD[:, :count]) if self.causal else (past, x_BTD)
        (q_BHCK,) = split(self.config.channels, self.global_query(x_BTD[:, :count]))
        k_BGSK, v_BGSK = split(self.config.channels, self.global_key(x_BSD), self.global_value(x_BSD))
        k_BGSK, v_BGSK = keys(self, k_BGSK, past.start), seen.values(v_BGSK)
        (own,) = seen.keep(own=GlobalKeys(k_BGSK, v_BGSK, self.global_sight, self.dropout_p))
        return instead_of_first(count, own.read(queries(self, q_BHCK, past.start)), y_BHTK, past.start)

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)


class GlobalKeys(KeyValues):
    """The keys that global tokens see; in the bidirectional form few queries read all keys."""

    def read_all(self, q_BHCK: Tensor, at: Any) -> Tensor:
        """Return the outputs of the first tokens."""
        return attend(self.sight.near[0], q_BHCK, self.k, self.v, self.dropout_p, key_lengths=at.lengths)[0]
