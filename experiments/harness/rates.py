"""Choose each arm's learning rate, and the size of its added sines, before its seeds.

Short runs have a seed of their own and are measured on data that the result never uses. A scale with `choose.lr` tries
each rate (`optimizer.lr`; `matrix_lr` keeps its ratio) for a third of the steps and the warm-up. If the best is the
lowest or highest, the next one of the series follows. With `choose.position_scale`, an arm with added sines first
chooses their size at the middle rate, then its rate at that size: the two are nearly independent, and the product of
both lists would take about twice the runs. Of a text, the loss is that of the `choose.tokens` tokens (or `held.tokens`)
after those of the result; of a classification, that of the validation part. An experiment of kind `measure` trains and
measures itself, in its function `search(unit)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness.noise import Row, number
from experiments.harness.recipe import merged
from experiments.harness.units import DONE, Unit, measuring_code
from subquad.config import digest
from subquad.parsing import read_json

SEED = 1000
"""Seed of all searches."""
SHARE = 3
"""A search's runs have one `SHARE`-th of the steps and the warm-up."""


def searches_of(units: Sequence[Unit]) -> list[Unit]:
    """Return a unit of kind `search` for each arm that has something to choose."""
    found: dict[str, Unit] = {}
    threads = min((unit.threads for unit in units), default=1)
    for unit in units:
        if unit.rates and unit.arm not in found:
            own = "" if unit.kind == "train" else measuring_code(Path(unit.experiment))
            same, folder = digest([unit.training, own]), str(_folder(unit))
            found[unit.arm] = replace(
                unit,
                kind="search",
                seed=SEED,
                folder=folder,
                identity=same,
                training=same,
                timed=False,
                threads=threads,
            )
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


def with_settings(settings: dict[str, Any], rate: float, *size: float | None) -> dict[str, Any]:
    """Return settings with `rate` as the peak of `optimizer.lr` (a `matrix_lr` keeps its ratio) and a size of sines."""
    known = settings.get("optimizer", {})
    rates = {"lr": rate}
    if known.get("matrix_lr") is not None:
        rates["matrix_lr"] = known["matrix_lr"] * rate / known["lr"]
    return merged(settings, {"optimizer": rates}, {"model": {"position_scale": size[0]}} if size else {})


def searched(
    rates: Sequence[float], sizes: Sequence[float | None], loss: Callable[[float, float | None], float]
) -> list[Row]:
    """Return the rates, sizes and losses tried: the sizes at the middle rate, then the rates at the best size.

    Without `sizes`, `loss` gets None, and rows have no size.
    """
    middle = sorted(rates)[len(rates) // 2]
    known = {size: loss(middle, size) for size in sizes}
    best = min(known, key=lambda size: known[size], default=None)
    rows: list[Row] = [{"lr": middle, "position_scale": size, "loss": of} for size, of in known.items() if size != best]
    found = choose(rates, lambda rate: known[best] if sizes and rate == middle else loss(rate, best))
    same = {"position_scale": best} if sizes else {}
    return rows + [{"lr": rate, **same, "loss": of} for rate, of in found.items()]


def with_choice(unit: Unit) -> tuple[Unit, Row]:
    """Return the unit with the best of its arm's search, and the columns that tell it and all that was tried."""
    if not unit.rates:
        return unit, {}
    file = _folder(unit) / DONE
    if not file.is_file():
        raise FileNotFoundError(f"{unit.arm} has no learning rate yet: {file} is missing; run the search first")
    rows = read_json(file)["rows"]
    best = min(rows, key=lambda row: row["loss"])
    if not math.isfinite(best["loss"]):
        raise ValueError(f"{unit.arm}: no learning rate of {_told(rows, 'lr')} trains; see {file.parent}")
    chosen = with_settings(unit.settings, best["lr"], *([best["position_scale"]] if unit.sizes else []))
    told = {"lr": best["lr"], "lr_tried": _told(rows, "lr", position_scale=best.get("position_scale"))}
    if unit.sizes:
        middle = sorted(unit.rates)[len(unit.rates) // 2]
        told["position_scale"] = _shown(best["position_scale"])
        told["position_scale_tried"] = _told(rows, "position_scale", lr=middle)
    return replace(unit, settings=chosen), told


def _told(rows: Sequence[Row], name: str, **same: Any) -> str:
    """Return the values of a column with their losses, of the rows that have the others in common."""
    tried = {row[name]: row["loss"] for row in rows if all(row.get(key) == value for key, value in same.items())}
    shown = sorted(tried, key=lambda value: -math.inf if value is None else value)
    return "; ".join(f"{_shown(value)}: {number(tried[value])}" for value in shown)


def _shown(value: float | None) -> str:
    return "own" if value is None else f"{value:g}"
