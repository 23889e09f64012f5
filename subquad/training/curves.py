"""The picture of a run: training and held-out loss over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def draw_curves(records: Sequence[dict[str, float]], path: Path, *, title: str, unit: str = "token") -> None:
    """Draw the losses of `metrics.jsonl` records, in nats a `unit`, as a PNG.

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
    if train:
        axes.plot(*zip(*train, strict=True), color="#4477aa", linewidth=1.2, label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#cc6677", markersize=4, label="held-out")
    axes.set(xlabel="optimizer step", ylabel=f"loss (nats a{'n' if unit[0] in 'aeiou' else ''} {unit})", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")
