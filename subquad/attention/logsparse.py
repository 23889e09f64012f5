"""LogSparse attention: the last tokens and those a power of two behind (Li et al. 2019, arXiv:1907.00235).

y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s,    t - s < width or t - s = 2^j from width to below max_tokens
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from subquad.attention.base import Attention, takes_options
from subquad.attention.memories.key_values import Sight
from subquad.attention.parts import SoftmaxConfig, add_softmax_projections, softmax_over
from subquad.attention.past import Past
from subquad.ops.patterns import Dilated, Pattern, Window


class Powers(Dilated):
    """The tokens d, 2 d, 4 d, ... up to (width - 1) d behind, d = `dilation` a power of two: near keys once folded."""

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos < q_pos) & ((q_pos - k_pos) & (q_pos - k_pos - 1) == 0) & super().allowed(q_pos, k_pos)

    @property
    def nearest(self) -> int:
        return self.dilation

    @property
    def folded(self) -> tuple[int, Pattern] | None:  # type: ignore[override]
        return (self.dilation, Powers(self.width, 1)) if self.dilation > 1 else None


class Logsparse(Attention):
    """The last `width` tokens, and those a power of two behind."""

    name = "logsparse"
    summary = "the last `width` tokens, and those a power of two behind"
    paper = "Li et al. 2019, arXiv:1907.00235"
    cost_order, rotates = "T log T", True

    @dataclass(frozen=True, kw_only=True)
    class Config(SoftmaxConfig):
        """Options of LogSparse attention."""

        width: int = 16
        """Tokens of the window, the query's own included."""
        max_tokens: int = 65_536
        """Bound on the powers of two, and so on the tokens that the state keeps."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.check_least(width=1, max_tokens=self.width)

    @takes_options(Config)
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_softmax_projections(self, config)
        first, stop = (config.width - 1).bit_length(), (config.max_tokens - 1).bit_length()
        powers = (Powers(2 ** min(5, stop - 1 - j) + 1, 2**j) for j in range(first, stop, 6))
        self.sight = Sight(((Window(width=config.width), *powers),))

    def mix(self, x_BTD: Tensor, past: Past) -> Tensor:
        return softmax_over(self, self.sight, x_BTD, past)
