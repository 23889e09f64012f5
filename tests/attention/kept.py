"""What a layer's `mix` keeps of its tokens, and what it reads that with."""

from typing import Any

from torch import Tensor

from subquad.attention import Attention
from subquad.attention.past import Kept, Literal


class Watched(Literal):
    """The interpreter `literal`, which remembers the last read."""

    last: tuple[Any, Any]

    def read(self, kept: Kept, q: Any) -> Tensor:
        self.last = kept.memory, q
        return super().read(kept, q)


def kept(layer: Attention, x_BTD: Tensor) -> tuple[Any, Any]:
    """Return the memory that a layer keeps of these tokens, and the queries that it reads it with."""
    past = Watched(x_BTD, causal=layer.causal)
    layer.mix(x_BTD, past)
    return past.last
