"""Choose each arm's learning rate before its seeds: short runs with a seed of their own, on data its result never uses.

A scale with `rates` tries each of them (`optimizer.lr`; `matrix_lr` keeps its ratio) for a third of the steps and the
warm-up. If the best is the lowest or highest, the next one of the series follows. Of a text, the loss is that of the
`held.tokens` tokens after those of the result; of a classification, that of the validation part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness.noise import number
from experiments.harness.recipe import merged
from experiments.harness.units import DONE, Unit
from subquad.config import digest
from subquad.parsing import read_json

SEED = 1000
"""Seed of all searches."""
SHARE = 3
"""A search's runs have one `SHARE`-th of the steps and the warm-up."""


def searches_of(units: Sequence[Unit]) -> list[Unit]:
    """Return a unit of kind `search` for each arm whose rate is to be chosen."""
    found = {}
    for unit in units:
        if unit.rates and unit.arm not in found:
            same, folder = digest([unit.settings, unit.rates, unit.held]), str(_folder(unit))
            found[unit.arm] = replace(unit, kind="search", seed=SEED, folder=folder, identity=same, training=same)
    return list(found.values())


def _folder(unit: Unit) -> Path:
    return Path(unit.folder).with_name(f"{unit.arm.replace(' ', '-')}-rates")


def choose(rates: Sequence[float], loss: Callable[[float], float]) -> dict[float, float]:
    """Return the loss of each rate, and of those beyond the series while the best is at its end; best first."""
    tried: dict[float, float] = {}
    waiting = list(rates)
    while waiting:
        tried |= {rate: loss(rate) for rate in waiting}
        series, best = sorted(tried), min(tried, key=lambda rate: tried[rate])
        beside = {series[0]: series[1], series[-1]: series[-2]}.get(best)
        waiting = [] if beside is None or tried[best] == math.inf else [float(f"{best * best / beside:.3g}")]
    return dict(sorted(tried.items(), key=lambda item: item[1]))


def with_rate(settings: dict[str, Any], rate: float) -> dict[str, Any]:
    """Return settings with `rate` as the peak of `optimizer.lr`; a `matrix_lr` keeps its ratio to it."""
    known = settings.get("optimizer", {})
    rates = {"lr": rate}
    if known.get("matrix_lr") is not None:
        rates["matrix_lr"] = known["matrix_lr"] * rate / known["lr"]
    return merged(settings, {"optimizer": rates})


def with_chosen_rate(unit: Unit) -> tuple[Unit, dict[str, Any]]:
    """Return the unit with the rate of its arm's search, and the columns that tell it: `lr` and `lr_tried`."""
    if not unit.rates:
        return unit, {}
    file = _folder(unit) / DONE
    if not file.is_file():
        raise FileNotFoundError(f"{unit.arm} has no learning rate yet: {file} is missing; run the search first")
    tried = {row["lr"]: row["loss"] for row in read_json(file)["rows"]}
    best = min(tried, key=lambda rate: tried[rate])
    told = "; ".join(f"{rate:g}: {number(tried[rate])}" for rate in sorted(tried))
    return replace(unit, settings=with_rate(unit.settings, best)), {"lr": best, "lr_tried": told}
