"""Patterns of the keys that a query may see: a predicate (the definition) and key ranges that cover it (for speed)."""

from subquad.ops.patterns.base import Pattern
from subquad.ops.patterns.local import Band, Blocks, Causal, Full, Prefix, Segments, Shifted, Suffix, Window
from subquad.ops.patterns.sparse import Dilated, DilatedBand, Globals, Random, Sinks, SinkTokens, Strided

__all__ = [
    "Band",
    "Blocks",
    "Causal",
    "Dilated",
    "DilatedBand",
    "Full",
    "Globals",
    "Pattern",
    "Prefix",
    "Random",
    "Segments",
    "Shifted",
    "SinkTokens",
    "Sinks",
    "Strided",
    "Suffix",
    "Window",
]
