"""The picture of the LoRA experiment on MNIST: accuracy against rank, with the report's points."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from experiments.lora_mnist.config import SETS, VARIANTS, MnistConfig
from experiments.lora_mnist.tables import reported, values_of

ROWS = (
    ("lora", "stopped", "LoRA, stopped base"),
    ("lora", "trained", "LoRA, trained base"),
    ("scratch", "", "from scratch, random + BA"),
    ("product", "", "from scratch, BA alone"),
)


def draw(results: Mapping[str, Any], config: MnistConfig, path: str) -> None:
    """Write the picture: a panel for each set of images, lines with the standard deviation, crosses for the report."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(SETS), 4.2), layout="constrained")
    axes = figure.subplots(1, len(SETS), sharey=True, squeeze=False)[0]
    for axis, images in zip(axes, SETS, strict=True):
        for number, (arm, base, label) in enumerate(ROWS):
            if arm == "lora" and images not in VARIANTS:
                continue
            names = [(rank, "/".join(part for part in (arm, base, images, str(rank)) if part)) for rank in config.ranks]
            points = [(rank, values) for rank, name in names if (values := values_of(results, name, config))]
            means = [statistics.mean(values) for _, values in points]
            spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points]
            ranks = [rank for rank, _ in points]
            axis.errorbar(ranks, means, yerr=spreads, marker="o", ms=3, capsize=2, color=f"C{number}", label=label)
        for arm, color, label in (("lora", "C0", "report, LoRA"), ("scratch", "C2", "report, from scratch")):
            known = (
                [(r, y) for r in config.ranks if (y := reported(arm, images, r)) is not None]
                if (arm != "lora" or images in VARIANTS)
                else []
            )
            axis.plot([r for r, _ in known], [y for _, y in known], "x", color=color, ms=7, label=label)
        if images in VARIANTS and (full := values_of(results, f"full/stopped/{images}", config)):
            axis.axhline(statistics.mean(full), color="0.5", lw=1, ls="--", label="all weights, stopped base")
        axis.set_xscale("log", base=2)
        axis.set_xticks(config.ranks, [str(rank) for rank in config.ranks])
        axis.set(title=images, xlabel="rank", ylim=(0, 100))
    axes[0].set_ylabel("test accuracy, %")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
