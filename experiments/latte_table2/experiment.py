"""Judge the claims of the Latte paper's Table 2 over the tasks of a scale."""

import math
from functools import partial

from experiments.harness.noise import Difference, Row, compare, gain, pooled, select

LATTE = ("Latte, L = D", "Latte, few latents")
AS_GOOD = 0.02
"""Loss of accuracy that still counts as good: the paper's two rows differ by up to 1.9 points."""


def claim_latents(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that few latents lose less than `AS_GOOD` on every task, beyond the noise."""
    found = _differences(rows, LATTE[1:], LATTE[:1], None)
    return ([one.toward(1, AS_GOOD) for one in found.values()], _shown(found)) if found else None


def claim_beyond_a_bag(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare the mean accuracy of each mechanism on each task with the bag of tokens on the same test sequences."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "bag_of_tokens" in row:
            groups.setdefault((row["task"], row["mechanism"]), []).append(row)
    if not groups:
        return None
    gains, worst = [], dict[str, tuple[float, str]]()
    for (task, mechanism), same in groups.items():
        noise = pooled(select(rows, {"task": task}), "accuracy")
        gains.append(gain(same, "accuracy", "bag_of_tokens", 1.0, noise))
        worst[task] = min(worst.get(task, (math.inf, "")), (gains[-1].value, mechanism))
    shown = "; ".join(f"{task} at least {100 * more:+.1f} points ({name})" for task, (more, name) in worst.items())
    return gains, shown


def _better(rows: list[Row], other: str, tasks: tuple[str, ...] | None) -> tuple[list[Difference], str] | None:
    """Check that both forms of Latte together are better than `other` on each of `tasks` (None: on all)."""
    found = _differences(rows, LATTE, (other,), tasks)
    return (list(found.values()), _shown(found)) if found else None


def _differences(
    rows: list[Row], left: tuple[str, ...], right: tuple[str, ...], tasks: tuple[str, ...] | None
) -> dict[str, Difference]:
    """Return the differences of mean accuracies on each task that has both sides."""
    found = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        a, b = ({"mechanism": list(names)} for names in (left, right))
        found[task] = compare(select(rows, {"task": task}), a, b, "accuracy")
    return {task: value for task, value in found.items() if value is not None and (tasks is None or task in tasks)}


def _shown(found: dict[str, Difference]) -> str:
    shown = []
    for task, value in found.items():
        low, middle, high = (f"{100 * bound:+.1f}" for bound in value.bounds())
        shown.append(f"{task} {100 * value.left:.1f} against {100 * value.right:.1f} % ({middle}, {low} to {high})")
    return "; ".join(shown)


claim_latte_above_attention = partial(_better, other="attention", tasks=None)
# The paper claims these only for the two tasks.
claim_latte_above_linformer = partial(_better, other="Linformer", tasks=("ListOps", "Image"))
claim_latte_above_performer = partial(_better, other="Performer", tasks=("ListOps", "Image"))
claim_latte_above_luna = partial(_better, other="Luna", tasks=("ListOps", "Image"))
