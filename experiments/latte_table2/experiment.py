"""Claims of the Latte paper's Table 2, over whatever tasks a scale has."""

import math
import statistics

from subquad.reproduction.claims import FAILS, HOLDS, NOISE, SIGMAS, Difference, difference, pooled, select
from subquad.reproduction.units import Row

LATTE = ("Latte, L = D", "Latte, few latents")


def claim_latte_above_attention(rows: list[Row]) -> tuple[str, str] | None:
    """On every task."""
    return _better(rows, "attention", None)


def claim_latte_above_linformer(rows: list[Row]) -> tuple[str, str] | None:
    """On the tasks where the paper's Latte is the better."""
    return _better(rows, "Linformer", ("ListOps", "Image"))


def claim_latte_above_performer(rows: list[Row]) -> tuple[str, str] | None:
    """On the tasks where the paper's Latte is the better."""
    return _better(rows, "Performer", ("ListOps", "Image"))


def claim_latte_above_luna(rows: list[Row]) -> tuple[str, str] | None:
    """On the tasks where the paper's Latte is the better."""
    return _better(rows, "Luna", ("ListOps", "Image"))


def claim_latents(rows: list[Row]) -> tuple[str, str] | None:
    """Whether few latents lose, on no task, more than the noise."""
    found = _differences(rows, LATTE[1:], LATTE[:1], None)
    if not found:
        return None
    worse = any(value.value < -SIGMAS * _error(value) for value in found.values())
    return (FAILS if worse else NOISE), _shown(found)


def claim_beyond_a_bag(rows: list[Row]) -> tuple[str, str] | None:
    """The mean accuracy of every mechanism, on every task, against the baseline of the same test sequences."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "bag_of_tokens" in row:
            groups.setdefault((row["task"], row["mechanism"]), []).append(row)
    if not groups:
        return None
    noise = pooled(rows, "accuracy")
    margins, worst = [], {}
    for (task, mechanism), same in groups.items():
        margin = statistics.mean(row["accuracy"] - row["bag_of_tokens"] for row in same)
        margins.append((margin, 0.0 if math.isnan(noise) else noise / math.sqrt(len(same))))
        worst[task] = min(worst.get(task, (math.inf, "")), (margin, mechanism))
    shown = "; ".join(f"{task} at least {100 * margin:+.1f} points ({name})" for task, (margin, name) in worst.items())
    return _verdict(margins), shown


def _better(rows: list[Row], other: str, tasks: tuple[str, ...] | None) -> tuple[str, str] | None:
    """Whether both forms of Latte together are better than the other, on each of the tasks."""
    found = _differences(rows, LATTE, (other,), tasks)
    return (_verdict([(value.value, _error(value)) for value in found.values()]), _shown(found)) if found else None


def _differences(
    rows: list[Row], left: tuple[str, ...], right: tuple[str, ...], tasks: tuple[str, ...] | None
) -> dict[str, Difference]:
    """Of the mean accuracies in each task that has both."""
    found = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        same = select(rows, {"task": task})
        sides = (select(same, {"mechanism": list(names)}) for names in (left, right))
        found[task] = difference(*sides, "accuracy", pooled(same, "accuracy"))
    return {task: value for task, value in found.items() if value is not None and (tasks is None or task in tasks)}


def _error(value: Difference) -> float:
    return 0.0 if math.isnan(value.error) else value.error


def _verdict(margins: list[tuple[float, float]]) -> str:
    """All margins, each with its standard error, must be above zero beyond the noise."""
    if any(margin < -SIGMAS * error for margin, error in margins):
        return FAILS
    return HOLDS if all(margin > SIGMAS * error for margin, error in margins) else NOISE


def _shown(found: dict[str, Difference]) -> str:
    return "; ".join(
        f"{task} {100 * value.left:.1f} against {100 * value.right:.1f} % "
        f"({100 * value.value:+.1f} ± {100 * _error(value):.1f})"
        for task, value in found.items()
    )
