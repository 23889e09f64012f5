"""Loss curves: one row for each evaluation during training."""

import math
import statistics
from typing import TYPE_CHECKING

from subquad.reproduction.claims import FAILS, HOLDS, NOISE, SIGMAS, difference, pooled, select
from subquad.reproduction.plots import COLORS
from subquad.reproduction.units import Row, Unit
from subquad.training import RunResult
from subquad.training.progress import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure(result: RunResult, unit: Unit) -> list[Row]:
    """Held-out loss over steps, and over seconds of training steps: evaluations are left out of those."""
    records = read_metrics(result.folder)
    seconds = {record["step"]: record["seconds"] for record in records if "seconds" in record}
    return [
        {"step": record["step"], "held_out_loss": record["eval_loss"], "seconds": seconds.get(record["step"])}
        for record in records
        if "eval_loss" in record
    ]


def claim_curves(rows: list[Row]) -> tuple[str, str] | None:
    """Attention's curve lies below Latte's at every evaluation of the second half."""
    steps = sorted({row["step"] for row in rows})
    found = [_gap(rows, step) for step in steps[len(steps) // 2 :]]
    known = [(step, gap, error) for step, gap, error in found if not math.isnan(gap)]
    if not known:
        return None
    shown = ", ".join(f"{gap:+.3f}" for _, gap, _ in known)
    text = f"Latte - attention, from step {known[0][0]} to {known[-1][0]}: {shown} nats (± {known[-1][2]:.2g})"
    if any(gap < -SIGMAS * error for _, gap, error in known):
        return FAILS, text
    return (HOLDS if all(gap > SIGMAS * error for _, gap, error in known) else NOISE), text


def claim_distance(rows: list[Row]) -> tuple[str, str] | None:
    """The distance at the end against that in the middle of the training."""
    steps = sorted({row["step"] for row in rows})
    if len(steps) < 2:
        return None
    middle, end = _gap(rows, steps[(len(steps) - 1) // 2]), _gap(rows, steps[-1])
    if math.isnan(middle[1]) or math.isnan(end[1]):
        return None
    change, noise = end[1] - middle[1], SIGMAS * math.hypot(middle[2], end[2])
    verdict = NOISE if abs(change) <= noise else HOLDS if change < 0 else FAILS
    return verdict, f"{middle[1]:+.3f} nats at step {middle[0]}, {end[1]:+.3f} at step {end[0]}"


def claim_seconds(rows: list[Row]) -> tuple[str, str] | None:
    """Loss of both after as many seconds as Latte's whole training took, attention's read off its curve."""
    seeds = sorted({row["seed"] for row in rows})
    gaps = []
    for seed in seeds:
        latte, attention = (_curve(select(rows, {"mechanism": name, "seed": seed})) for name in ("Latte", "attention"))
        if not latte or not attention:
            continue
        end = min(latte[-1][0], attention[-1][0])
        gaps.append(_at(latte, end) - _at(attention, end))
    if not gaps:
        return None
    mean = statistics.mean(gaps)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    verdict = NOISE if abs(mean) <= SIGMAS * error else HOLDS if mean < 0 else FAILS
    return verdict, f"Latte - attention after the same seconds: {mean:+.3f} ± {error:.2g} nats"


def draw(figure: "Figure", rows: list[Row]) -> None:
    """A line for each run, over steps and over seconds."""
    figure.set_size_inches(9.6, 4.2)
    for axis, x, name in zip(figure.subplots(1, 2), ("step", "seconds"), ("step", "seconds of training"), strict=True):
        for color, mechanism in zip(COLORS, dict.fromkeys(row["mechanism"] for row in rows), strict=False):
            for index, seed in enumerate(sorted({row["seed"] for row in rows})):
                same = [row for row in select(rows, {"mechanism": mechanism, "seed": seed}) if row[x] is not None]
                points = [(row[x], row["held_out_loss"]) for row in same]
                label = mechanism if index == 0 else None
                axis.plot(*zip(*points, strict=True), color=color, marker=".", linewidth=1.2, label=label)
        axis.set(xlabel=name, ylabel="held-out loss in nats a token")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)


def _gap(rows: list[Row], step: int) -> tuple[int, float, float]:
    """Latte's loss minus attention's after a step, and its standard error; NaN where one is missing."""
    same = select(rows, {"step": step})
    sides = (select(same, {"mechanism": name}) for name in ("Latte", "attention"))
    found = difference(*sides, "held_out_loss", _noise(same))
    return (step, math.nan, 0.0) if found is None else (step, found.value, found.error)


def _noise(rows: list[Row]) -> float:
    """Deviation between seeds; 0 where there is one seed."""
    noise = pooled(rows, "held_out_loss")
    return 0.0 if math.isnan(noise) else noise


def _curve(rows: list[Row]) -> list[tuple[float, float]]:
    return sorted((row["seconds"], row["held_out_loss"]) for row in rows if row["seconds"] is not None)


def _at(curve: list[tuple[float, float]], second: float) -> float:
    """The loss at that second, on the straight line between two evaluations."""
    before, after = ([point for point in curve if keep(point[0])] for keep in (second.__ge__, second.__le__))
    if not before or not after:
        return (before or after)[-1 if before else 0][1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (second - x0) / (x1 - x0)
