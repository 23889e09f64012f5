"""Tokens per word of each tokenizer, and the paper's perplexity converted to one per word."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.harness.claims import INCOMPARABLE
from experiments.harness.noise import FAILS, HOLDS, number
from experiments.harness.units import Unit
from subquad.data import Corpus
from subquad.training import RunResult

PRINTED = 17.82
"""LLP's perplexity in the paper's Table 4."""
WORDPIECES = 28996
"""Vocabulary size that the paper's parameter counts suggest."""
Row = dict[str, Any]


def measure(result: RunResult, unit: Unit) -> Row:
    """Return the tokens per whitespace-separated word of the held-out text."""
    assert isinstance(result.corpus, Corpus)
    shard = result.corpus.held_out
    return {"tokens_per_word": len(shard) / shard.words}


def claim_perplexity_is_the_tokenizers(rows: list[Row]) -> tuple[str, str] | None:
    """Check that perplexity per token differs between tokenizers at least three times as much as per word."""
    vocabularies = {row["vocabulary"] for row in rows}
    if len(vocabularies) < 2:
        return None
    token, word = (_range(rows, vocabularies, name) for name in ("perplexity", "word_perplexity"))
    ours = f"{token[0]} to {token[1]} per token ({token[2]:.3g} times), {word[0]} to {word[1]} per word ({word[2]:.3g})"
    return (HOLDS if token[2] > 3 * word[2] else FAILS), ours


def _range(rows: list[Row], vocabularies: set[int], name: str) -> tuple[str, str, float]:
    means = [statistics.mean(row[name] for row in rows if row["vocabulary"] == v) for v in vocabularies]
    return number(min(means)), number(max(means)), max(means) / min(means)


def claim_per_word(rows: list[Row]) -> tuple[str, str] | None:
    """Raise the printed figure to the tokens per word of a BPE of that vocabulary size on our held-out text."""
    found = [row["tokens_per_word"] for row in rows if row["vocabulary"] == WORDPIECES]
    if not found:
        return None
    ratio = statistics.mean(found)
    ours = f"with our BPE's {number(ratio)} tokens per word on our books, about {PRINTED**ratio:.0f} per word"
    return INCOMPARABLE, ours
