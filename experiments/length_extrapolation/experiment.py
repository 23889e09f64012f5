"""Loss of the same tokens with more context than in training."""

import math
import statistics
from functools import partial
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from experiments.harness.noise import FAILS, HOLDS, Difference, Row, select
from experiments.harness.units import Unit
from subquad.evaluation.probes import context_loss
from subquad.training.run import RunResult

TIMES = (1, 2, 4, 8, 16)
WINDOWS = {"smoke": 2, "cpu": 16, "gpu": 128, "paper": 128}
SCHEMES = ("rope", "sinusoidal", "none")
KEPT = 0.05
"""Nats per token within which a loss counts as kept."""
ROUNDINGS = 1e-4
"""Change in nats that rounding explains."""


def measure(result: RunResult, unit: Unit) -> list[Row]:
    """Return a row per length: nats per token on the last half of the training length, the same tokens each time."""
    trained = result.config.batch.length
    tokens = result.corpus.held_out.tokens
    lengths = [trained * times for times in TIMES]
    found = context_loss(
        result.model.model,
        tokens,  # type: ignore[arg-type]
        lengths=lengths,
        windows=WINDOWS[unit.scale],
        batch_size=1 if trained > 256 else 2,
    )
    first = found[0].same.value
    quarter = context_loss(
        result.model.model,
        tokens,  # type: ignore[arg-type]
        lengths=[trained // 4, trained],
        windows=WINDOWS[unit.scale],
    )
    worth = quarter[0].same.value - quarter[1].same.value
    return [
        {
            "times": times,
            "length": length,
            "same": loss.same.value,
            "error": loss.same.error,
            "more": loss.same.value - first,
            "worth": worth,
        }
        for times, length, loss in zip(TIMES, lengths, found, strict=True)
    ]


def claim_which_keep(rows: list[Row]) -> tuple[str, str] | None:
    """Check that all arms lose less than `KEPT` from T to 16 T, and count them by scheme."""
    last = select(rows, {"times": TIMES[-1]})
    if not last:
        return None
    kept, shown = True, []
    for scheme in SCHEMES:
        lost = {
            arm: statistics.mean(values) for arm, values in _by_arm(select(last, {"position": scheme}), "more").items()
        }
        if lost:
            few, worst = sum(more < KEPT for more in lost.values()), max(lost, key=lambda arm: lost[arm])
            shown.append(f"{scheme}: {few} of {len(lost)} (the worst is {worst.split()[0]}, {lost[worst]:+.2f})")
            kept &= few == len(lost)
    return HOLDS if kept else FAILS, f"arms that lose less than {KEPT} nats, {'; '.join(shown)}"


def claim_within_reach(rows: list[Row]) -> tuple[str, str] | None:
    """Check that the loss stays the same, to within `ROUNDINGS`, from twice the training length to the longest."""
    change = [
        abs(long["same"] - short["same"])
        for arm in dict.fromkeys(row["arm"] for row in rows)
        for short, long in zip(*(select(rows, {"arm": arm, "times": n}) for n in (TIMES[1], TIMES[-1])), strict=True)
    ]
    return (HOLDS if max(change) < ROUNDINGS else FAILS, f"changes of at most {max(change):.0e}") if change else None


def claim_context_is_used(rows: list[Row]) -> tuple[str, str] | None:
    """Check that every arm gains more than `KEPT` at T from T / 2 to T tokens of context over windows of T / 4."""
    first = select(rows, {"times": 1})
    if not first:
        return None
    gains = {arm: statistics.mean(values) for arm, values in _by_arm(first, "worth").items()}
    used, most = sum(gain > KEPT for gain in gains.values()), max(gains, key=lambda arm: gains[arm])
    shown = f"{used} of {len(gains)} gain more than {KEPT} nats; {most} gains most, {gains[most]:.3f}"
    return HOLDS if used == len(gains) else FAILS, shown


def _by_arm(rows: list[Row], value: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(f"{row['mechanism']} {row['position']}", []).append(row[value])
    return found


def _kept(rows: list[Row], mechanism: str) -> tuple[list[Difference], str] | None:
    """Check that 16 times the context adds less than `KEPT` in each scheme, with noise pooled over the schemes."""
    last = _by_arm(select(rows, {"times": TIMES[-1], "mechanism": mechanism}), "more")
    if not last:
        return None
    freedom = sum(len(values) - 1 for values in last.values())
    squares = sum((v - statistics.mean(values)) ** 2 for values in last.values() for v in values)
    deviation = math.sqrt(squares / freedom) if freedom else math.nan
    kept, shown = [], []
    for name, values in last.items():
        error = deviation / math.sqrt(len(values))
        kept.append(Difference(KEPT - statistics.mean(values), error, freedom, len(values)))
        shown.append(f"{name.split()[-1]} {statistics.mean(values):+.3f} ± {error:.3f}")
    return kept, "; ".join(shown)


def draw(figure: Figure, rows: list[Row]) -> None:
    """Draw the loss that each mechanism adds beyond the training length, with a panel for each position scheme."""
    figure.set_size_inches(13, 4.6)
    axes = figure.subplots(1, len(SCHEMES), sharey=True)
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    palette = colormaps["tab20"]
    colors = {name: palette(number) for number, name in enumerate(names)}
    lines: dict[str, Any] = {}
    for axis, position in zip(axes, SCHEMES, strict=True):
        for number, name in enumerate(names):
            same: dict[int, list[Any]] = {}
            for row in select(rows, {"mechanism": name, "position": position}):
                same.setdefault(row["times"], []).append(row["more"])
            if same:
                mean = [statistics.mean(values) for values in same.values()]
                marker = "osD^vPX*<>hd8p"[number % 14]
                (lines[name],) = axis.plot(list(same), mean, marker=marker, markersize=5, color=colors[name])
        axis.set_xscale("log", base=2)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set(title=position, xlabel="context / training length")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("increase in nats per token over T")
    figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False, fontsize=9)


claim_latte_keeps = partial(_kept, mechanism="latte")
claim_full_keeps = partial(_kept, mechanism="full")
