"""Report of a conversion, in sentences and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from subquad.attention import mechanism
from subquad.evaluation import drawing

STAGES = {"original": "original", "replaced": "after replacing", "matched": "after matching", "tuned": "after LoRA"}
IDLE = 0.01
"""Nats a token: a branch is idle if switching it off changes the loss by less."""
NOISE = 0.05
"""Speeds that differ by a smaller share are called equal."""
Report = Mapping[str, Any]


def explain(report: Report) -> list[str]:
    """Return sentences on the gap, its place in the context, the effect of branches, and the speed of decoding."""
    first, last = report["stages"][0], report["stages"][-1]
    gap = report["gap"]["loss"]
    verb = "loses" if gap >= 0 else "gains"
    said = [
        f"The result {verb} {abs(gap):.4f} nats a token: perplexity {first['perplexity']:.3f} became "
        f"{last['perplexity']:.3f}."
    ]
    reach = reach_of(report["attention"], report["options"])
    if reach is not None and (gap > 0 or all(part["start"] < reach for part in report["gap"]["by_position"])):
        said.append(_beyond(report, reach))
    return [*said, _branches(last["branches"]), _pays(first["decoding"], last["decoding"])]


def reach_of(attention: str, options: Mapping[str, Any]) -> int | None:
    """Return how many tokens the softmax of a mechanism sees with `options`, or None if it has no softmax."""
    kind = mechanism(attention)
    if kind.softmax_reach is None:
        return None
    return int(options.get(kind.softmax_reach, kind.Config.__dataclass_fields__[kind.softmax_reach].default))


def check_reach(attention: str, options: Mapping[str, Any], length: int) -> None:
    """Raise `ValueError` if a mechanism without other branches would see whole windows of `length` tokens."""
    reach, kind = reach_of(attention, options), mechanism(attention)
    if not kind.branches and reach is not None and reach >= length:
        option = f"options.{attention}.{kind.softmax_reach}={reach}"
        raise ValueError(f"{option} must be below batch.length={length}: otherwise it is full attention")


def _beyond(report: Report, reach: int) -> str:
    parts = report["gap"]["by_position"]
    far = _mean([part for part in parts if part["start"] >= reach])
    near = _mean([part for part in parts if part["start"] < reach])
    ways = ["stacked layers"]
    ways += [branch for branch in mechanism(report["attention"]).branches if branch != "window"]
    ways += ["the kept layers"] if report["layers"]["kept"] else []
    if far is None:
        return f"No range has {reach} tokens of context or more: a replaced layer's softmax sees nearly all of it."
    said = (
        f"With {reach} tokens of context or more, a replaced layer's softmax does not see all of them, and the rest "
        f"acts only through {' and '.join(ways)}: there the gap is {far:+.4f} nats a token"
    )
    return f"{said}." if near is None else f"{said}, with less context {near:+.4f}."


def _mean(parts: list[Mapping[str, Any]]) -> float | None:
    """Return the mean gap a token over `parts`, or None if there are none."""
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
    return f"Change of the loss with one branch switched off: {said}{ending}."


def _pays(before: list[Mapping[str, Any]], after: list[Mapping[str, Any]]) -> str:
    """Return from which measured context on the state is smaller and decoding faster, and where it is slower."""
    if not after:
        return "Decoding was not measured, so it is not known from which context on the conversion pays."
    contexts = [row["context"] for row in after]
    sizes = [b["state_bytes"] / a["state_bytes"] for a, b in zip(before, after, strict=True)]
    speeds = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(before, after, strict=True)]
    smaller = _from(contexts, [size < 1 for size in sizes])
    faster = _from(contexts, [speed > 1 + NOISE for speed in speeds])
    slower = [i for i, speed in enumerate(speeds) if speed < 1 - NOISE]
    said = (
        f"The state is smaller {smaller}, and decoding is faster {faster}: at {contexts[-1]:,} tokens {sizes[-1]:.2g} "
        f"times the original's bytes and {speeds[-1]:.2g} times its speed."
    )
    if not slower:
        return said
    worst = min(slower, key=lambda i: speeds[i])
    where = ", ".join(f"{contexts[i]:,}" for i in slower)
    return f"{said} Decoding got slower at {where} tokens: {speeds[worst]:.2g} times the speed at {contexts[worst]:,}."


def _from(contexts: list[int], better: list[bool]) -> str:
    """Return from which context on every measured one is better, in words."""
    first = len(better) - [*better[::-1], False].index(False)
    if first == len(better):
        return "at none of the measured lengths"
    return f"from {contexts[first]:,} tokens of context on" + (", the shortest measured" if not first else "")


def draw(report: Report, file: Path) -> None:
    """Draw into `file`: loss by position at each stage, loss with branches off, state size and speed by context."""
    figure = drawing.new_figure(11.0, 7.2)
    figure.suptitle(
        f"{report['attention']}: {len(report['layers']['replaced'])} layers replaced, "
        f"{len(report['layers']['kept'])} kept",
        fontsize=11,
    )
    (loss, off), (weight, speed) = figure.subplots(2, 2)
    for i, stage in enumerate(report["stages"]):
        parts = stage["by_position"]
        style = drawing.Style.number(i)._asdict()
        loss.plot([p["stop"] - 1 for p in parts], [p["loss"] for p in parts], label=STAGES[stage["stage"]], **style)
    loss.set(xscale="log", xlabel="tokens of context (up to)", ylabel="loss, nats a token", title="loss by position")
    places = [part["stop"] - 1 for part in report["stages"][0]["by_position"]]
    loss.set_xticks(places, [f"{place:,}" for place in places], fontsize=8)
    loss.minorticks_off()
    loss.legend(fontsize=8)
    found = report["stages"][-1]["branches"]
    off.barh([part["off"] for part in found], [part["loss"] for part in found], color=drawing.COLOURS[2])
    off.axvline(report["stages"][0]["loss"], color=drawing.COLOURS[0], linestyle="--", label="original")
    off.invert_yaxis()
    off.set(xlabel="loss, nats a token", title="with this switched off")
    off.legend(fontsize=8)
    for i, stage in enumerate((report["stages"][0], report["stages"][-1])):
        rows, style = stage["decoding"], drawing.Style.number(i)._asdict()
        contexts, label = [row["context"] for row in rows], ("original", "converted")[i]
        if not rows:
            continue
        weight.plot(contexts, [row["state_bytes"] / 2**10 for row in rows], label=label, **style)
        speed.plot(contexts, [row["tokens_per_second"] for row in rows], label=label, **style)
    weight.set(xlabel="tokens of context", ylabel="KiB", title="state for the next token")
    speed.set(xlabel="tokens of context", ylabel="tokens/s", title="decoding one sequence", ylim=(0, None))
    for axis in (weight, speed):
        if not axis.lines:
            axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
            continue
        axis.set(xscale="log", yscale="log" if axis is weight else "linear")
        if axis is weight:  # powers of two: between powers of ten there may be none
            shown = [value for line in axis.lines for value in np.asarray(line.get_ydata())]
            low, high = math.floor(math.log2(min(shown))), math.ceil(math.log2(max(shown)))
            ticks = [2.0**power for power in range(low, high + 1, 1 + (high - low) // 8)]
            axis.set_yticks(ticks, [f"{tick:,g}" for tick in ticks], fontsize=8)
        axis.set_xticks(contexts, [f"{context:,}" for context in contexts], fontsize=8)
        axis.minorticks_off()
        axis.legend(fontsize=8)
    drawing.save(figure, file)
