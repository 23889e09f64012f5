"""Judge the claims of the Latte paper's Table 2 over the tasks of a scale."""

import math
import statistics
from functools import partial

from experiments.harness.noise import FAILS, HOLDS, NOISE, Difference, Margin, Row, difference, judge, pooled, select

LATTE = ("Latte, L = D", "Latte, few latents")
AS_GOOD = 0.02
"""Loss of accuracy that still counts as good: the paper's two rows differ by up to 1.9 points."""


def claim_latents(rows: list[Row]) -> tuple[str, str] | None:
    """Check that few latents lose less than `AS_GOOD` on every task, beyond the noise."""
    found = _differences(rows, LATTE[1:], LATTE[:1], None)
    if not found:
        return None
    within = judge([Margin(value.value + AS_GOOD, value.error, value.freedom) for value in found.values()])
    worse = judge([Margin(value.value, value.error, value.freedom) for value in found.values()]) == FAILS
    return (HOLDS if within == HOLDS else FAILS if worse else NOISE), _shown(found)


def claim_beyond_a_bag(rows: list[Row]) -> tuple[str, str] | None:
    """Compare the mean accuracy of each mechanism on each task with the bag of tokens on the same test sequences."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "bag_of_tokens" in row:
            groups.setdefault((row["task"], row["mechanism"]), []).append(row)
    if not groups:
        return None
    noise = pooled(rows, "accuracy")
    margins, worst = [], dict[str, tuple[float, str]]()
    for (task, mechanism), same in groups.items():
        margin = statistics.mean(row["accuracy"] - row["bag_of_tokens"] for row in same)
        margins.append(Margin(margin, noise.deviation / math.sqrt(len(same)), noise.freedom))
        worst[task] = min(worst.get(task, (math.inf, "")), (margin, mechanism))
    shown = "; ".join(f"{task} at least {100 * margin:+.1f} points ({name})" for task, (margin, name) in worst.items())
    return judge(margins), shown


def _better(rows: list[Row], other: str, tasks: tuple[str, ...] | None) -> tuple[str, str] | None:
    """Check that both forms of Latte together are better than `other` on each of `tasks` (None: on all)."""
    found = _differences(rows, LATTE, (other,), tasks)
    margins = [Margin(value.value, value.error, value.freedom) for value in found.values()]
    return (judge(margins), _shown(found)) if found else None


def _differences(
    rows: list[Row], left: tuple[str, ...], right: tuple[str, ...], tasks: tuple[str, ...] | None
) -> dict[str, Difference]:
    """Return the differences of mean accuracies on each task that has both sides."""
    found = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        same = select(rows, {"task": task})
        ours, others = (select(same, {"mechanism": list(names)}) for names in (left, right))
        found[task] = difference(ours, others, "accuracy", pooled(same, "accuracy"))
    return {task: value for task, value in found.items() if value is not None and (tasks is None or task in tasks)}


def _shown(found: dict[str, Difference]) -> str:
    return "; ".join(
        f"{task} {100 * value.left:.1f} against {100 * value.right:.1f} % "
        f"({100 * value.value:+.1f} {'(one seed each)' if math.isnan(value.error) else f'± {100 * value.error:.1f}'})"
        for task, value in found.items()
    )


claim_latte_above_attention = partial(_better, other="attention", tasks=None)
# The paper claims these only for the two tasks.
claim_latte_above_linformer = partial(_better, other="Linformer", tasks=("ListOps", "Image"))
claim_latte_above_performer = partial(_better, other="Performer", tasks=("ListOps", "Image"))
claim_latte_above_luna = partial(_better, other="Luna", tasks=("ListOps", "Image"))
