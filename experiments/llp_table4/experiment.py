"""Measure all tokenizers on the same bytes, and judge what their perplexities say."""

from __future__ import annotations

import math
import zlib

import numpy as np

from experiments.harness.measure import BLOCKS, COUNTED, token_nats, unigram
from experiments.harness.noise import Difference, Row, compare, select
from experiments.harness.recipe import Held
from experiments.harness.units import Unit, held_of
from subquad.data import Corpus
from subquad.data.special_tokens import separator_id
from subquad.training import RunResult

BYTES = 500_000
"""Bytes at the end of the held-out text on which all tokenizers are measured; rates are chosen on its beginning."""
SMALL, LARGE = ({"mechanism": "LLP", "vocabulary": size} for size in (256, 4096))


def measure(result: RunResult, unit: Unit) -> Row:
    """Return the measures of the last `BYTES` of the held-out text (all, if `held` has no limit), in equal blocks."""
    assert isinstance(result.corpus, Corpus)
    corpus, vocabulary = result.corpus, result.corpus.train.vocab_size
    text = corpus.held_out_text()[-BYTES if held_of(unit).tokens else 0 :]
    spelled = [corpus.tokenizer.id_to_token(token) for token in range(vocabulary)]  # a character for each byte
    size_V = np.array(
        [0 if token == separator_id(corpus.tokenizer) else len(spelled[token] or "") for token in range(vocabulary)]
    )
    tokens_N = np.asarray(corpus.held_out.tokens, dtype=np.int64)
    tokens_N = tokens_N[size_V[tokens_N][::-1].cumsum()[::-1] <= len(text)]
    nats_N, scored_N, words = token_nats(result, tokens_N, Held()), tokens_N[1:], len(text.split())
    return {
        "vocabulary": vocabulary,
        "text": corpus.fingerprint[:8],
        "scored_tokens": len(nats_N),
        "tokens_per_word": len(tokens_N) / words,
        "word_perplexity": math.exp(min(nats_N.sum() / words, 700.0)),
        "unigram": unigram(np.asarray(corpus.train.tokens[:COUNTED]), scored_N, vocabulary),
        "gzip": 8 * len(zlib.compress(text, 9)) / len(text),
        **in_bytes(nats_N, size_V[scored_N]),
    }


def in_bytes(nats_N: np.ndarray, size_N: np.ndarray) -> Row:
    """Return nats per token and bits per byte of tokens of `size_N` bytes, over all and in equal parts of the bytes.

    A part's loss is its nats per byte times the bytes of a mean token.
    """
    part_N = (size_N.cumsum() - 1).clip(0) * BLOCKS // size_N.sum()
    nats_P, bytes_P = (np.bincount(part_N, values_N, BLOCKS) for values_N in (nats_N, size_N))
    loss, size = float(nats_N.mean()), float(size_N.mean())
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) / size,
        "loss_blocks": [round(float(value), 4) for value in nats_P / bytes_P * size],
        "block_size": int(size_N.sum()) // BLOCKS,
    }


def claim_llp_below_llama(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare the two mechanisms with the vocabulary that full attention has."""
    same = {row["vocabulary"] for row in select(rows, {"mechanism": "full"})}
    found = compare(rows, {"mechanism": "LLP", "vocabulary": [*same]}, {"mechanism": "full"}, "loss")
    return None if found is None else ([found.toward(-1)], str(found))


def claim_perplexity_is_the_tokenizers(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare two tokenizers by both measures."""
    token, byte = compare(rows, SMALL, LARGE, "loss"), compare(rows, SMALL, LARGE, "bits_per_byte")
    if token is None or byte is None:
        return None
    return [token.toward(-1), byte], f"nats per token {token}; bits per byte {byte}"
