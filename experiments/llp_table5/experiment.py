"""Tokens per word of the test books, and the paper's perplexity converted to one per word."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from experiments.harness.claims import INCOMPARABLE
from experiments.harness.noise import number
from experiments.harness.units import Unit
from subquad.data import Corpus
from subquad.training import RunResult

PRINTED = 18.83
"""LLP's perplexity in the paper's Table 5."""
Row = dict[str, Any]


def measure(result: RunResult, unit: Unit) -> Row:
    """Return the tokens per whitespace-separated word of the test books."""
    assert isinstance(result.corpus, Corpus)
    shard = result.corpus.held_out
    return {"tokens_per_word": len(shard) / shard.words}


def claim_conversion(rows: list[Row]) -> tuple[str, str] | None:
    """Raise the printed figure to our tokens per word."""
    if not rows:
        return None
    ratio = statistics.mean(row["tokens_per_word"] for row in rows)
    return INCOMPARABLE, f"with {number(ratio)} tokens per word, about {PRINTED**ratio:.0f} per word"


def draw(figure: Figure, rows: list[Row]) -> None:
    """Draw the perplexities of the same models per token and per word."""
    axis = figure.subplots()
    names = {"perplexity": "per token", "word_perplexity": "per word"}
    for place, name in enumerate(names):
        axis.plot([place] * len(rows), [row[name] for row in rows], "o", color="#4477aa")
    axis.set_xticks(range(len(names)), names.values())
    axis.set(title="one model, one loss, two perplexities", ylabel="perplexity", yscale="log")
    axis.set(xlim=(-0.5, len(names) - 0.5), ylim=(100, 10_000))
    axis.grid(alpha=0.3, axis="y")
