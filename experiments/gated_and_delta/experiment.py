"""Baselines and states beside the losses; claims about what the models learned at all."""

from __future__ import annotations

import numpy as np

from experiments.harness.noise import Difference, Row, gain, pooled, select
from experiments.harness.units import Unit
from subquad.data import Corpus
from subquad.training import RunResult

COUNTED, PRIOR = 3_000_000, 2.0
"""Training tokens that the bigrams count, and the weight of the single tokens' shares."""


def measure(result: RunResult, unit: Unit) -> Row:
    """Return nats per token of bigram counts, and bytes of state after a training window."""
    corpus = result.corpus
    assert isinstance(corpus, Corpus)
    held_N = np.asarray(corpus.held_out.tokens[: (unit.held or {})["tokens"]], dtype=np.int64)
    train_N = np.asarray(corpus.train.tokens[:COUNTED], dtype=np.int64)
    layers = [block.attention for block in result.decoder.blocks()]
    return {
        "bigram": bigram(train_N, held_N, corpus.train.vocab_size),
        "state_bytes": sum(layer.state_bytes(result.config.batch.length) for layer in layers),
    }


def bigram(train_N: np.ndarray, held_N: np.ndarray, tokens: int) -> float:
    """Return the mean nats of `(count(a, b) + A p(b)) / (count(a) + A)`, with p the share of b and A = `PRIOR`."""
    share_V = (np.bincount(train_N, minlength=tokens) + 1) / (len(train_N) + tokens)
    pairs_VV = np.bincount(train_N[:-1] * tokens + train_N[1:], minlength=tokens**2).reshape(tokens, tokens)
    before_N, next_N = held_N[:-1], held_N[1:]
    known_N = pairs_VV[before_N, next_N] + PRIOR * share_V[next_N]
    return float(-np.log(known_N / (pairs_VV.sum(1)[before_N] + PRIOR)).mean())


def claim_learned(rows: list[Row]) -> tuple[list[Difference], str]:
    """Check that every model needs fewer bits than gzip."""
    worst = max(rows, key=lambda row: row["bits_per_byte"])
    shown = f"at most {worst['bits_per_byte']:.3f} bits per byte ({worst['arm']}), gzip {worst['gzip']:.3f}"
    return _gains(rows, "bits_per_byte", "gzip"), shown


def claim_beyond_bigrams(rows: list[Row]) -> tuple[list[Difference], str]:
    """Check that every model needs fewer nats than bigram counts, and name those that do with every seed."""
    behind = {row["arm"] for row in rows if row["loss"] >= row["bigram"]}
    ahead = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm not in behind]
    shown = f"bigrams {rows[0]['bigram']:.3f} nats per token; below: {', '.join(ahead) or 'none'}"
    return _gains(rows, "loss", "bigram"), shown


def _gains(rows: list[Row], metric: str, baseline: str) -> list[Difference]:
    """Return by how much each arm is below the baseline."""
    noise = pooled(rows, metric)
    arms = dict.fromkeys(row["arm"] for row in rows)
    return [gain(select(rows, {"arm": arm}), metric, baseline, -1.0, noise) for arm in arms]
