"""The loss of the same tokens with more context than any training sequence had."""

import math
import statistics
from typing import Any

from matplotlib.figure import Figure

from subquad.evaluation.probes import context_loss
from subquad.reproduction import Unit
from subquad.reproduction.claims import FAILS, HOLDS, NOISE, Row, select
from subquad.training.run import RunResult

TIMES = (1, 2, 4, 8, 16)
WINDOWS = {"smoke": 2, "cpu": 16, "gpu": 128, "paper": 128}
SCHEMES = ("rope", "sinusoidal", "none")


def measure(result: RunResult, unit: Unit) -> list[Row]:
    """A row for each length: nats a token of the last half of the training length, the same tokens at every length."""
    trained = result.config.batch.length
    tokens = result.corpus.held_out.tokens
    lengths = [trained * times for times in TIMES]
    found = context_loss(
        result.model.model, tokens, lengths=lengths, windows=WINDOWS[unit.scale], batch_size=1 if trained > 256 else 2
    )
    first = found[0].same.value
    return [
        {
            "times": times,
            "length": length,
            "same": loss.same.value,
            "error": loss.same.error,
            "more": loss.same.value - first,
        }
        for times, length, loss in zip(TIMES, lengths, found, strict=True)
    ]


def claim_which_keep(rows: list[Row]) -> tuple[str, str] | None:
    """Which arms lose less than 0.05 nats a token from T to 16 T, and which do not; holds where all keep it."""
    last = select(rows, {"times": TIMES[-1]})
    if not last:
        return None
    more: dict[str, list[float]] = {}
    for row in last:
        more.setdefault(f"{row['mechanism']} {row['position']}", []).append(row["more"])
    lost = {name: statistics.mean(values) for name, values in more.items()}
    broken = sorted((name for name in lost if not lost[name] < 0.05), key=lambda name: -lost[name])
    shown = f"{len(lost) - len(broken)} of {len(lost)} lose less than 0.05 nats; the others: "
    shown += ", ".join(f"{name} {lost[name]:+.2f}" for name in broken) or "none"
    return HOLDS if not broken else FAILS, shown


def claim_latte_keeps(rows: list[Row]) -> tuple[str, str] | None:
    """Latte's loss at 16 T against that at T, in each scheme, beyond two standard errors between seeds."""
    return _kept(rows, "latte")


def claim_full_keeps(rows: list[Row]) -> tuple[str, str] | None:
    """The same for full attention."""
    return _kept(rows, "full")


def _kept(rows: list[Row], mechanism: str) -> tuple[str, str] | None:
    """Holds where in no scheme the loss of the same tokens is higher with 16 times the context."""
    last = select(rows, {"times": TIMES[-1], "mechanism": mechanism})
    states, shown = [], []
    for position in SCHEMES:
        more = [row["more"] for row in select(last, {"position": position})]
        if not more:
            continue
        error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.nan
        shown.append(f"{position} {statistics.mean(more):+.3f} ± {error:.3f}")
        states.append(statistics.mean(more) / error if error else 0.0)
    if not shown:
        return None
    verdict = NOISE if any(math.isnan(state) for state in states) else HOLDS if max(states) < 2 else FAILS
    return verdict, "; ".join(shown)


def draw(figure: Figure, rows: list[Row]) -> None:
    """What each mechanism loses by more context than in training: a panel for each position scheme."""
    figure.set_size_inches(13, 4.6)
    axes = figure.subplots(1, len(SCHEMES), sharey=True)
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    for axis, position in zip(axes, SCHEMES, strict=True):
        for number, name in enumerate(names):
            same: dict[int, list[Any]] = {}
            for row in select(rows, {"mechanism": name, "position": position}):
                same.setdefault(row["times"], []).append(row["more"])
            if same:
                mean = [statistics.mean(values) for values in same.values()]
                style = {"linestyle": ("-", "--", ":")[number % 3], "marker": "osD^vPX*<>"[number % 10]}
                axis.plot(list(same), mean, markersize=4, label=name, color=f"C{number % 10}", **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set(title=position, xlabel="context / training length")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("nats a token more than at T")
