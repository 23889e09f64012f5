"""Sliding-window attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1): softmax over the last `width` tokens.

    y_t = sum_{t - width < s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s

Bidirectional, the window lies around the query: `width // 2` tokens before it and the others after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from subquad.attention.base import Attention, takes_options
from subquad.attention.memories.key_values import Sight
from subquad.attention.parts import SinkConfig, add_sink, add_softmax_projections, divisible_heads, softmax_over
from subquad.attention.past import Past
from subquad.ops.patterns import Band, Sinks
from subquad.ops.patterns import Window as WindowPattern


class Window(Attention):
    """The last `width` tokens, the query's own included; the state keeps `width - 1` keys and values."""

    name = "window"
    summary = "the `width` tokens next to it"
    paper = "Beltagy et al. 2020, arXiv:2004.05150"
    forms = ("causal", "bidirectional")
    softmax_reach = "width"
    rotates = True
    has_static_cache = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SinkConfig):
        """Options of sliding-window attention."""

        width: int = 256
        """Tokens that a query sees, its own included."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(width=1)

    config: Config
    sink_logits: nn.Parameter | None

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        add_sink(self, config)
        before = config.width // 2
        band = Band(before=before, after=config.width - 1 - before)
        far = (Sinks(count=config.sinks, back=config.width - 1),) if config.sinks else ()
        self.sight = Sight(((WindowPattern(width=config.width) if config.causal else band,),), far, config.sinks)

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        """Read the keys in sight."""
        return softmax_over(self, self.sight, x_BTD, past, self.sink_logits)

    @property
    def divisible(self) -> tuple[int, ...]:
        """Query heads and key heads."""
        return divisible_heads(self.config, self.sight)
