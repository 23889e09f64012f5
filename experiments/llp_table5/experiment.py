"""Count tokens per word, and convert the paper's perplexities per token to words."""

from __future__ import annotations

from functools import partial

from experiments.harness.claims import INCOMPARABLE
from experiments.harness.noise import Row, number, select
from experiments.harness.units import Unit
from subquad.data import DataConfig, prepare


def run(unit: Unit) -> Row:
    """Train the tokenizer and count the tokens and whitespace-separated words of the held-out text."""
    corpus = prepare(DataConfig.from_dict(unit.settings["data"]))
    shard = corpus.held_out
    return {"vocabulary": corpus.train.vocab_size, "tokens_per_word": len(shard) / shard.words}


def _per_word(rows: list[Row], arm: str, printed: float) -> tuple[str, str] | None:
    """Raise the printed figure to our tokens per word."""
    found = select(rows, {"arm": arm})
    if not found:
        return None
    ratio = found[0]["tokens_per_word"]
    return INCOMPARABLE, f"with {number(ratio)} tokens per word, about {printed**ratio:.0f} per word"


claim_conversion = partial(_per_word, arm="books", printed=18.83)
claim_conversion_wikitext = partial(_per_word, arm="wikitext", printed=17.82)
