"""Sliding-window attention (Beltagy et al. 2020, arXiv:2004.05150, section 3.1): softmax over the last `width` tokens.

    y_t = sum_{t - width < s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s

Bidirectional, the window lies around the query: `width // 2` tokens before it and the others after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from subquad.attention.base import takes_options
from subquad.attention.sinks import SinkAttention
from subquad.ops.patterns import Band, Sinks
from subquad.ops.patterns import Window as WindowPattern


class Window(SinkAttention):
    """The last `width` tokens, the query's own included; the state keeps `width - 1` keys and values."""

    name = "window"
    summary = "the `width` tokens next to it"
    paper = "Beltagy et al. 2020, arXiv:2004.05150"
    forms = ("causal", "bidirectional")
    softmax_reach = "width"

    @dataclass(frozen=True, kw_only=True)
    class Config(SinkAttention.Config):
        """Options of sliding-window attention."""

        width: int = 256
        """Tokens that a query sees, its own included."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(width=1)

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        before = config.width // 2
        band = Band(before=before, after=config.width - 1 - before)
        self.patterns = (WindowPattern(width=config.width) if config.causal else band,)
        if config.sinks:
            self.far = (Sinks(count=config.sinks, back=config.width - 1),)
