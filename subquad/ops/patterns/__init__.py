"""Which keys a query may see: a predicate (the truth) and key ranges that cover it (what makes it cheap)."""

from subquad.ops.patterns.base import Pattern
from subquad.ops.patterns.drawn import Random
from subquad.ops.patterns.local import Band, Blocks, Segments, Shifted, Window
from subquad.ops.patterns.sparse import Columns, Dilated, DilatedBand, Globals, Ranks, Sinks, Strided
from subquad.ops.patterns.whole import Causal, Full, Prefix, Suffix

__all__ = [
    "Band",
    "Blocks",
    "Causal",
    "Columns",
    "Dilated",
    "DilatedBand",
    "Full",
    "Globals",
    "Pattern",
    "Prefix",
    "Random",
    "Ranks",
    "Segments",
    "Shifted",
    "Sinks",
    "Strided",
    "Suffix",
    "Window",
]
