"""Measure n-gram baselines and judge the claims of the Latte paper's Table 3."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch

from experiments.harness.noise import FAILS, HOLDS, Difference, Row, compare, select
from experiments.harness.units import Unit
from subquad.models.build import build_model
from subquad.models.config import DecoderConfig
from subquad.training import RunResult
from subquad.training.progress import read_metrics

CLOSE = 1.10
"""Ratio of Latte's and attention's perplexity that still counts as close: the paper's are 1.081 and 1.086."""
LATTE = {"mechanism": "Latte", "latents": "L = D", "position": "sines"}
COUNTED, PRIOR = 3_000_000, 2.0
"""Number of training tokens for the n-gram counts, and the weight of the next lower order."""
SINES = {"mechanism": "attention", "position": "sines"}
SMALL = {"position": "small sines"}
"""Labels of sines of the library's size."""


def measure(result: RunResult, unit: Unit) -> Row:
    """Return the nats per token of unigram, bigram and trigram counts, and the held-out losses during training."""
    corpus = result.corpus
    held_N = np.asarray(corpus.held_out.tokens[: (unit.held or {}).get("tokens")], dtype=np.int64)
    train_N = np.asarray(corpus.train.tokens[:COUNTED], dtype=np.int64)
    names = ("unigram", "bigram", "trigram")
    baselines: Row = dict(zip(names, ngrams(train_N, held_N, corpus.train.vocab_size), strict=True))
    curve = [(record["step"], record["eval_loss"]) for record in read_metrics(result.folder) if "eval_loss" in record]
    return {**baselines, "curve_steps": [step for step, _ in curve], "curve_losses": [loss for _, loss in curve]}


def ngrams(train_N: np.ndarray, held_N: np.ndarray, tokens: int) -> list[float]:
    """Return the mean nats of each order: `(count + A p) / (total + A)` with p of the order below, A = `PRIOR`."""
    below_N, losses = np.full(len(held_N), 1 / tokens), []
    for order in range(3):
        count_N, total_N = (
            _counted(_keys(train_N, tokens, order, own), _keys(held_N, tokens, order, own)) for own in (True, False)
        )
        below_N[order:] = (count_N + PRIOR * below_N[order:]) / (total_N + PRIOR)
        losses.append(float(-np.log(below_N[2:]).mean()))
    return losses


def _counted(train_N: np.ndarray, held_N: np.ndarray) -> np.ndarray:
    """Return how often each of `held_N` occurs in `train_N`."""
    values_N, counts_N = np.unique(train_N, return_counts=True)
    place_N = np.searchsorted(values_N, held_N).clip(max=len(values_N) - 1)
    return np.where(values_N[place_N] == held_N, counts_N[place_N], 0)


def _keys(tokens_N: np.ndarray, tokens: int, order: int, own: bool) -> np.ndarray:
    """Encode each token and the `order` tokens before it as a number; without `own`, only the tokens before it."""
    key_N = tokens_N[order:] if own else np.zeros(len(tokens_N) - order, dtype=np.int64)
    for back in range(1, order + 1):
        key_N = key_N + tokens_N[order - back : len(tokens_N) - back] * tokens**back
    return key_N


def _differences(rows: list[Row], left: Row, right: Row, metric: str) -> dict[str, Difference]:
    """Return left - right for each corpus that has both; a scale may lack a corpus."""
    names = dict.fromkeys(row["corpus"] for row in rows)
    found = {corpus: compare(select(rows, {"corpus": corpus}), left, right, metric) for corpus in names}
    return {corpus: value for corpus, value in found.items() if value is not None}


def _lower(rows: list[Row], left: Row, right: Row) -> tuple[list[Difference], str] | None:
    """Check that the left rows need fewer bits than the right ones in every corpus."""
    found = _differences(rows, left, right, "bits_per_byte")
    if not found:
        return None
    shown = "; ".join(f"{corpus} {value}" for corpus, value in found.items())
    return [value.toward(-1) for value in found.values()], shown


def _close(rows: list[Row], attention: Row) -> tuple[list[Difference], str] | None:
    """Check that Latte is close in every corpus; a ratio of perplexities is a difference of losses."""
    found = _differences(rows, LATTE, attention, "loss")
    if not found:
        return None
    shown = []
    for corpus, value in found.items():
        low, middle, high = (f"{100 * math.expm1(bound):+.1f}" for bound in value.bounds())
        shown.append(f"{corpus} {middle} % ({low} to {high})")
    return [value.toward(-1, math.log(CLOSE)) for value in found.values()], "; ".join(shown)


def claim_bits_agree(rows: list[Row]) -> tuple[str, str]:
    """Check bits per character against log2 of the perplexity, the bits per token; a token has several characters."""
    figures = json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))["figures"]
    agree, shown = True, []
    for found in select(figures, {"corpus": "OpenWebText"}):
        bits = math.log2(found["perplexity"])
        agree = agree and found["bits_per_character"] <= bits
        shown.append(
            f"perplexity {found['perplexity']} is {bits:.2f} bits per token, not {found['bits_per_character']}"
        )
    return (HOLDS if agree else FAILS), f"{'; '.join(shown)}; bits per character must be fewer"


def claim_parameters(rows: list[Row]) -> tuple[str, str]:
    """Count on the meta device; enwik8 has 205 byte values, and the paper's head has a bias, unlike ours."""
    shown, same = [], []
    for tokens, printed in ((50257, 90.31), (205, 38.61)):
        for attention in ("full", "latte"):
            config = DecoderConfig(
                vocab_size=tokens,
                dim=516,
                num_layers=12,
                num_heads=12,
                attention=attention,
                options={attention: {"bias": False}},
                position="sinusoidal",
                norm="layer",
                feedforward="gelu",
                bias=True,
                tie_embeddings=False,
            )
            with torch.device("meta"):
                count = sum(weights.numel() for weights in build_model(config).parameters()) + tokens
            same.append(round(count / 1e6, 2) == printed)
        shown.append(f"{count:,}")
    return (HOLDS if all(same) else FAILS), f"{' and '.join(shown)}, with a bias in the head"


def claim_size_of_sines(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare the two sizes within each mechanism."""
    found = {side["mechanism"]: _lower(rows, side | SMALL, side) for side in (SINES, LATTE)}
    if None in found.values():
        return None
    differences = [one for value in found.values() if value for one in value[0]]
    return differences, "; ".join(f"{name}: {value[1]}" for name, value in found.items() if value)


claim_attention_is_better = partial(_lower, left=SINES, right=LATTE)
claim_small_sines = partial(_lower, left=SINES | SMALL, right=LATTE | SMALL)
claim_macchiato = partial(_lower, left={"mechanism": "Latte-Macchiato"}, right=LATTE)
claim_linear = partial(_lower, left=LATTE, right={"mechanism": "linear attention"})
claim_latte_comes_close = partial(_close, attention=SINES)
claim_latte_comes_close_to_rope = partial(_close, attention={"mechanism": "attention", "position": "RoPE"})
