"""The picture of a run: training and held-out loss over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LATER = 0.05
"""The share of the steps after which the losses set the scale: the first ones are many times as high."""


def draw_curves(records: Sequence[dict[str, float]], path: Path, *, title: str, unit: str = "token") -> None:
    """Draw the losses of `metrics.jsonl` records, in nats a `unit`, as a PNG.

    The training losses of the first steps may lie above the picture; then the legend has the first one.

    Raises `ValueError` where there is no loss to draw.
    """
    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    if not train and not held_out:
        raise ValueError(f"there is no loss to draw among {len(records)} records")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    low, high = loss_range(train, held_out)
    if train:
        first = train[0][1]
        label = f"training, from {first:.2f} on" if first > high else "training"
        axes.plot(*zip(*train, strict=True), color="#4477aa", linewidth=1.2, label=label)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#cc6677", markersize=4, label="held-out")
    axes.set(xlabel="optimizer step", ylabel=f"loss (nats a{'n' if unit[0] in 'aeiou' else ''} {unit})", title=title)
    axes.set_ylim(low, high)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def loss_range(train: Sequence[tuple[float, float]], held_out: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """What the picture shows: all held-out losses, and the training losses but for the first steps'; (step, loss)."""
    begin = LATER * max(step for step, _ in [*train, *held_out])
    seen = [loss for step, loss in train if step >= begin] + [loss for _, loss in held_out]
    low, high = min(seen), max(seen)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room
