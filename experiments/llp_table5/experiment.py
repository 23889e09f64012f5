"""One loss in three currencies, and the paper's figure as it would be per word."""

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
    """Tokens for each whitespace word of the test books."""
    assert isinstance(result.corpus, Corpus)
    shard = result.corpus.held_out
    return {"tokens_per_word": len(shard) / shard.words}


def claim_conversion(rows: list[Row]) -> tuple[str, str] | None:
    """The printed figure to the power of our tokens a word."""
    if not rows:
        return None
    ratio = statistics.mean(row["tokens_per_word"] for row in rows)
    return INCOMPARABLE, f"at {number(ratio)} tokens a word it would be about {PRINTED**ratio:.0f} a word"


def draw(figure: Figure, rows: list[Row]) -> None:
    """The same models' perplexity a token and a word."""
    axis = figure.subplots()
    names = {"perplexity": "a token", "word_perplexity": "a word"}
    for place, name in enumerate(names):
        axis.plot([place] * len(rows), [row[name] for row in rows], "o", color="#4477aa")
    axis.set_xticks(range(len(names)), names.values())
    axis.set(title="one model, one loss, two perplexities", ylabel="perplexity", yscale="log")
    axis.set(xlim=(-0.5, len(names) - 0.5), ylim=(100, 10_000))
    axis.grid(alpha=0.3, axis="y")
