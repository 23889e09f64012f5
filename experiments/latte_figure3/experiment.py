"""Loss curves, with one row for each evaluation during training."""

import math
import statistics

from matplotlib.figure import Figure

from experiments.harness.noise import Difference, Noise, Row, difference, pooled, select
from experiments.harness.plots import COLORS
from experiments.harness.units import Unit
from subquad.training import RunResult
from subquad.training.progress import read_metrics


def measure(result: RunResult, unit: Unit) -> list[Row]:
    """Return the held-out loss over steps and over seconds of training, which leave out evaluations."""
    records = read_metrics(result.folder)
    seconds = {record["step"]: record["seconds"] for record in records if "seconds" in record}
    return [
        {"step": record["step"], "held_out_loss": record["eval_loss"], "seconds": seconds.get(record["step"])}
        for record in records
        if "eval_loss" in record
    ]


def claim_curves(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that attention is below Latte at every evaluation in the second half of the training."""
    steps = sorted({row["step"] for row in rows})
    found = [_gap(rows, step) for step in steps[len(steps) // 2 :]]
    known = [(step, gap) for step, gap in found if gap is not None]
    if not known:
        return None
    shown = ", ".join(f"{gap.value:+.3f}" for _, gap in known)
    text = f"Latte - attention, from step {known[0][0]} to {known[-1][0]}: {shown} nats (± {known[-1][1].error:.2g})"
    return [gap for _, gap in known], text


def claim_distance(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare the distance at the end with that in the middle of the training."""
    steps = sorted({row["step"] for row in rows})
    if len(steps) < 2:
        return None
    (first, middle), (last, end) = _gap(rows, steps[(len(steps) - 1) // 2]), _gap(rows, steps[-1])
    if middle is None or end is None:
        return None
    change = Difference(middle.value - end.value, math.hypot(middle.error, end.error), end.freedom, end.seeds)
    return [change], f"{middle.value:+.3f} nats at step {first}, {end.value:+.3f} at step {last}"


def claim_seconds(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare the losses after the seconds of the shorter training, interpolating the other curve."""
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
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    shown = f"Latte - attention after the same seconds: {mean:+.3f} ± {error:.2g} nats"
    return [Difference(-mean, error, len(gaps) - 1, len(gaps))], shown


def draw(figure: Figure, rows: list[Row]) -> None:
    """Draw a line for each run, over steps and over seconds."""
    figure.set_size_inches(9.6, 4.2)
    for axis, x, name in zip(figure.subplots(1, 2), ("step", "seconds"), ("step", "seconds of training"), strict=True):
        for color, mechanism in zip(COLORS, dict.fromkeys(row["mechanism"] for row in rows), strict=False):
            for index, seed in enumerate(sorted({row["seed"] for row in rows})):
                same = [row for row in select(rows, {"mechanism": mechanism, "seed": seed}) if row[x] is not None]
                points = [(row[x], row["held_out_loss"]) for row in same]
                label = mechanism if index == 0 else None
                axis.plot(*zip(*points, strict=True), color=color, marker=".", linewidth=1.2, label=label)
        axis.set(xlabel=name, ylabel="held-out loss in nats per token")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)


def _gap(rows: list[Row], step: int) -> tuple[int, Difference | None]:
    """Return Latte's loss minus attention's after a step (None if one is missing), with the noise of all steps."""
    same = select(rows, {"step": step})
    latte, attention = (select(same, {"mechanism": name}) for name in ("Latte", "attention"))
    return step, difference(latte, attention, "held_out_loss", _noise(rows))


def _noise(rows: list[Row]) -> Noise:
    """Pool the noise between seeds over steps; as these are correlated, only runs count as degrees of freedom."""
    noise = pooled(rows, "held_out_loss")
    runs = {(row["mechanism"], row["seed"]) for row in rows}
    return Noise(noise.deviation, len(runs) - len({mechanism for mechanism, _ in runs}))


def _curve(rows: list[Row]) -> list[tuple[float, float]]:
    return sorted((row["seconds"], row["held_out_loss"]) for row in rows if row["seconds"] is not None)


def _at(curve: list[tuple[float, float]], second: float) -> float:
    """Return the loss at that second, interpolated linearly between two evaluations."""
    before, after = ([point for point in curve if keep(point[0])] for keep in (second.__ge__, second.__le__))
    if not before or not after:
        return (before or after)[-1 if before else 0][1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (second - x0) / (x1 - x0)
