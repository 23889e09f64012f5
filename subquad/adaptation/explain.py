"""What stands behind the gap between a converted model and the original, in sentences made of the report's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subquad.attention import mechanism

REACH = {"latte_macchiato": "width", "llp": "segment", "window": "width"}
"""The option that says how many tokens a replaced layer sees by softmax."""
IDLE = 0.01
"""Nats a token: a branch without which the loss changes by less carries nothing worth having."""
Report = Mapping[str, Any]


def explain(report: Report) -> list[str]:
    """How large the gap is, where in the context it stands, and which branches carry the result."""
    first, last = report["stages"][0], report["stages"][-1]
    gap = report["gap"]["loss"]
    verb = "loses" if gap >= 0 else "gains"
    said = [
        f"The result {verb} {abs(gap):.4f} nats a token: perplexity {first['perplexity']:.3f} became "
        f"{last['perplexity']:.3f}."
    ]
    reach = softmax_reach(report)
    if reach is not None and (gap > 0 or all(part["start"] < reach for part in report["gap"]["by_position"])):
        said.append(_beyond(report, reach))
    return [*said, _branches(last["branches"])]


def softmax_reach(report: Report) -> int | None:
    """Tokens that a replaced layer sees by softmax; None where it has none."""
    return reach_of(report["attention"], report["options"])


def reach_of(attention: str, options: Mapping[str, Any]) -> int | None:
    """Tokens that the mechanism sees by softmax with these options; None where it has none."""
    option = REACH.get(attention)
    if option is None:
        return None
    return int(options.get(option, mechanism(attention).Config.__dataclass_fields__[option].default))


def check_reach(attention: str, options: Mapping[str, Any], length: int) -> None:
    """Raise `ValueError` where `llp` or `window` would see all of the windows that are trained on and measured."""
    reach = reach_of(attention, options)
    if attention in ("llp", "window") and reach is not None and reach >= length:
        raise ValueError(
            f"options.{attention}.{REACH[attention]}={reach} must be below batch.length={length}: in no window would "
            "there be anything to leave out"
        )


def _beyond(report: Report, reach: int) -> str:
    parts = report["gap"]["by_position"]
    far = _mean([part for part in parts if part["start"] >= reach])
    near = _mean([part for part in parts if part["start"] < reach])
    ways = ["layer upon layer"]
    ways += ["through latents"] if report["attention"] == "latte_macchiato" else []
    ways += ["through the kept layers"] if report["layers"]["kept"] else []
    if far is None:
        return f"No range has {reach} tokens of context or more: a replaced layer's softmax sees nearly all there is."
    said = (
        f"In ranges of {reach} tokens of context or more, where a replaced layer's softmax does not see all and what "
        f"came before reaches a token {' and '.join(ways)} alone, the gap is {far:+.4f} a token"
    )
    return f"{said}." if near is None else f"{said}; in the ranges before them it is {near:+.4f}."


def _mean(parts: list[Mapping[str, Any]]) -> float | None:
    """The gap a token over these ranges; None where there is none."""
    tokens: int = sum(part["tokens"] for part in parts)
    return sum(part["tokens"] * part["gap"] for part in parts) / tokens if tokens else None


def _branches(branches: list[Mapping[str, Any]]) -> str:
    base = branches[0]["loss"]
    rises = sorted(((part["loss"] - base, part["off"]) for part in branches[1:]), reverse=True)
    said = ", ".join(f"{name} {rise:+.4f}" for rise, name in rises)
    idle = [name for rise, name in rises if abs(rise) < IDLE]
    harmful = [name for rise, name in rises if rise <= -IDLE]
    ending = f"; idle (less than {IDLE} nats): {', '.join(idle)}" if idle else "; none is idle"
    ending += f"; better without: {', '.join(harmful)}" if harmful else ""
    return f"Switched off, each branch changes the loss by: {said}{ending}."
