"""Loss of the same tokens with more context than in training, on books in ciphers that only the context tells.

Shape letters: N documents, T tokens, S scored tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.measure import unigram
from experiments.harness.noise import FAILS, HOLDS, Difference, Row, gain, pooled, select
from experiments.harness.rates import SHARE
from experiments.harness.recipe import merged
from experiments.harness.train import train_config, trained
from experiments.harness.units import Unit
from subquad.config import digest
from subquad.data.sources import open_source
from subquad.evaluation.text import ScoredSpan, losses
from subquad.models import Decoder
from subquad.training import RunResult

TIMES = (1, 2, 4, 8, 16)
SYMBOLS = b" etaoinshrdlucmfwygpbvkxjqz,.\n;'"
"""The 32 symbols of a text, which a document's cipher permutes; others are left out."""
KEPT = 0.05
"""Nats per token within which a loss counts as kept: about what half of T and more is worth over an eighth of T."""
ROUNDINGS = 1e-4
"""Change in nats that rounding explains."""
NOTHING = "nothing"
"""Column of zeros, the baseline of differences."""


def run(unit: Unit) -> list[Row]:
    """Train; return a row per length: nats per token on the last T / 2 tokens of the same documents."""
    T, held_NT = _length(unit), documents(unit)[0]
    model = trained_on(unit, unit.settings).decoder
    found = {times: nats(model, held_NT, times * T, T // 2) for times in TIMES}
    short_NS = nats(model, held_NT, T // 8, T // 2)
    scored_NS = held_NT[:, -(T // 2) :].astype(np.int64)
    same = {
        NOTHING: 0.0,
        "unigram": unigram(np.frombuffer(_file(unit).read_bytes(), np.uint8), scored_NS, 256),
        "scored_tokens": scored_NS.size,
        "text": digest(scored_NS.tolist())[:8],
        **by_document("worth", short_NS - found[1]),
    }
    return [
        {
            "times": times,
            "length": times * T,
            **by_document("same", found[times]),
            **by_document("more", found[times] - found[1]),
            **same,
        }
        for times in TIMES
    ]


def search(unit: Unit) -> float:
    """Train for a third of the steps; return nats per token at T on documents that the result never uses."""
    given = unit.settings
    tried = f"rate-{given['optimizer']['lr']:g}-sines-{given['model'].get('position_scale')}"
    run = {"steps": max(1, given["run"]["steps"] // SHARE), "folder": str(Path(unit.folder) / tried)}
    shorter = {"run": run, "schedule": {"warmup": given["schedule"]["warmup"] // SHARE}}
    model = trained_on(unit, merged(given, shorter)).decoder
    return float(nats(model, documents(unit)[1], _length(unit), _length(unit) // 2).mean())


def trained_on(unit: Unit, settings: dict[str, Any]) -> RunResult:
    """Train on many short documents in ciphers, drawn by the unit's seed."""
    given = {name: value for name, value in settings.items() if name not in ("text", "documents")}
    place, (size, count) = _file(unit), (2 * _length(unit), settings["documents"]["train"])
    place.write_bytes(ciphered(settings["text"]["train"], size, count, unit.seed).tobytes())
    held = place.with_name("held.txt")
    held.write_bytes(documents(unit)[1].tobytes())
    return trained(train_config(unit, merged(given, {"data": {"path": str(place), "held_out_path": str(held)}})))


def documents(unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents `[N, 16 T + 1]` of the result and those of the choice of rates, the same for all seeds."""
    size, count = TIMES[-1] * _length(unit) + 1, unit.settings["documents"]["held"]
    found_NT = ciphered(unit.settings["text"]["held"], size, 2 * count, 0)
    return found_NT[::2], found_NT[1::2]


def ciphered(path: str, size: int, count: int, seed: int) -> np.ndarray:
    """Return `count` pieces of a text in small letters, evenly spread, each with its symbols permuted."""
    text = b"".join(document.text for document in open_source(path).documents()).lower()
    symbols, codes_T = np.frombuffer(SYMBOLS, np.uint8), np.frombuffer(text, np.uint8)
    codes_T, random = codes_T[np.isin(codes_T, symbols)], np.random.default_rng(seed)
    starts = np.linspace(0, len(codes_T) - size, count).astype(int)
    tables = np.zeros((count, 256), np.uint8)
    tables[:, symbols] = random.permuted(np.tile(symbols, (count, 1)), axis=1)
    return np.stack([table[codes_T[start : start + size]] for table, start in zip(tables, starts, strict=True)])


def nats(model: Decoder, documents_NT: np.ndarray, length: int, scored: int) -> np.ndarray:
    """Return the nats `[N, S]` of each document's last tokens in windows of `length`, of which at most half count."""
    part, last = min(scored, length // 2), documents_NT.shape[1]
    ends = range(last - scored + part - 1, last, part)
    windows = [ScoredSpan(end - length, end, end - part + 1) for end in ends]
    return np.stack([losses(model, tokens_T, windows)[:, -part:].ravel() for tokens_T in documents_NT])


def by_document(name: str, nats_NS: np.ndarray) -> Row:
    """Return the mean, and the means of documents as blocks."""
    return {name: float(nats_NS.mean()), f"{name}_blocks": [round(float(value), 5) for value in nats_NS.mean(1)]}


def _length(unit: Unit) -> int:
    return int(unit.settings["batch"]["length"]) - 1


def _file(unit: Unit) -> Path:
    return Path(unit.folder) / "train.txt"


def _gains(rows: list[Row], metric: str, sign: float, shift: float = 0.0) -> tuple[list[Difference], str] | None:
    """Return `shift + sign * metric` of each arm."""
    if not rows or any(f"{metric}_blocks" not in row for row in rows):
        return None
    noise, found = pooled(rows, metric), {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        found[arm] = gain(select(rows, {"arm": arm}), metric, NOTHING, sign, noise)
    shown = "; ".join(f"{arm} {one.left:+.3f} ± {one.error:.3f}" for arm, one in found.items())
    return [one.toward(1.0, shift) for one in found.values()], shown


def claim_within_reach(rows: list[Row]) -> tuple[str, str] | None:
    """Check that the loss stays the same, to within `ROUNDINGS`, from twice the training length to the longest."""
    if any("same_blocks" not in row for row in rows):
        return None
    ends = [select(rows, {"times": times}) for times in (TIMES[1], TIMES[-1])]
    change = [abs(long["same"] - short["same"]) for short, long in zip(*ends, strict=True)]
    return (HOLDS if max(change) < ROUNDINGS else FAILS, f"changes of at most {max(change):.0e}") if change else None


claim_context_is_used = partial(_gains, metric="worth", sign=1.0)
claim_latte_keeps = claim_macchiato_keeps = claim_full_keeps = claim_recurrence_keeps = partial(
    _gains, metric="more", sign=-1.0, shift=KEPT
)
