"""Tables and plot of the LoRA experiment on MNIST: our means and standard deviations next to the report's numbers."""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.lora_mnist.arms import Cell
from experiments.lora_mnist.config import NET_PARAMETERS, PER_RANK, SETS, VARIANTS, MnistConfig, default_rates
from subquad.cli.tables import print_table, size
from subquad.evaluation import drawing

REPORT_BASE = {"plain": 93.2, "quantised": 85.58, "rotated": 12.38, "inverted": 5.52}
REPORT_FULL = {"quantised": 93.57, "rotated": 91.97, "inverted": 76.41}
REPORT_LORA = {
    1: (91.20, 37.53, 16.23),
    2: (91.30, 49.01, 17.92),
    4: (91.42, 69.10, 16.32),
    8: (91.39, 77.49, 32.19),
    16: (91.72, 86.95, 62.26),
    32: (92.31, 89.50, 68.06),
    64: (93.19, 90.41, 71.88),
}
"""Accuracy on quantised, rotated and inverted images after fine-tuning the factors of a rank."""
REPORT_SCRATCH = {
    1: (56.79, 23.50, 25.91, 22.21),
    2: (71.90, 37.48, 43.96, 45.81),
    4: (84.33, 64.87, 62.60, 69.67),
    8: (89.12, 77.96, 82.39, 83.11),
    16: (92.64, 88.2, 86.76, 87.38),
    32: (93.98, 90.13, 90.62, 90.25),
    64: (94.85, 91.66, 91.85, 86.01),
}
"""Accuracy on plain, quantised, rotated and inverted images after training the factors of a rank from scratch."""

CONSTANT = 11.35
"""Accuracy in percent of the best constant answer on MNIST's test images, the digit 1."""


def values_of(results: Mapping[str, Any], name: str, config: MnistConfig) -> list[float]:
    """Return the accuracies of one training for all seeds."""
    seeds = (results["seeds"].get(str(seed), {}) for seed in range(config.seeds))
    return [entry["accuracy"][name] for entry in seeds if name in entry.get("accuracy", {})]


def reported(arm: str, images: str, rank: int | None) -> float | None:
    """Return the report's number, or None if it has none."""
    if arm == "base":
        return REPORT_BASE[images]
    if arm == "full":
        return REPORT_FULL[images]
    rows: Mapping[int, tuple[float, ...]] = REPORT_LORA if arm == "lora" else REPORT_SCRATCH
    order = VARIANTS if arm == "lora" else SETS
    row = None if rank is None else rows.get(rank)
    return None if row is None else row[order.index(images)]


def show(results: Mapping[str, Any], config: MnistConfig, markdown: str | None) -> None:
    """Print all tables, and also write them to the file `markdown` if given."""
    _tables(results, config, markdown=False)
    if markdown is not None:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            _tables(results, config, markdown=True)
        Path(markdown).write_text(text.getvalue(), encoding="utf-8")


def _tables(results: Mapping[str, Any], config: MnistConfig, *, markdown: bool) -> None:
    def mean(images: str, arm: str, base: str, rank: int | None) -> str:
        return _mean(values_of(results, Cell(arm, base, images, rank).name, config))

    def table(title: str, sets: Sequence[str], rows: Sequence[tuple[str, str, str, int | None]]) -> None:
        """Print our number and the report's for each `(label, arm, base, rank)`."""
        lines = []
        for label, arm, base, rank in rows:
            pairs = [(mean(images, arm, base, rank), _number(reported(arm, images, rank))) for images in sets]
            lines.append([label, *(cell for pair in pairs for cell in pair)])
        print_table(title, ["", *(head for images in sets for head in (images, "report"))], lines, markdown=markdown)

    kinds = (("stopped", "stopped in the band"), ("trained", "fully trained"))
    seeds = f"{config.seeds} seed{'s' if config.seeds > 1 else ''}"
    lines = [[label, *(mean(images, "base", kind, None) for images in SETS)] for kind, label in kinds]
    lines.append(["the report", *(_number(reported("base", images, None)) for images in SETS)])
    title = f"The base, {seeds}: mean ± sample standard deviation of the test accuracy, %"
    print_table(title, ("", *SETS), lines, markdown=markdown)
    for kind, label in kinds:
        ranks = [(f"r = {rank}", "lora", kind, rank) for rank in config.ranks]
        table(f"Fine-tuned from the base {label}", VARIANTS, [("all weights", "full", kind, None), *ranks])
    for arm, label in (("scratch", "frozen random weights + B A"), ("product", "B A alone")):
        ranks = [(f"r = {rank}", arm, "", rank) for rank in config.ranks]
        table(f"From scratch, training only the factors: {label}", SETS, ranks)
    _costs(results, markdown=markdown)
    sys.stdout.write("\n".join(_notes(results, config)) + "\n")


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def _costs(results: Mapping[str, Any], *, markdown: bool) -> None:
    lines = [
        [
            "all weights" if name == "full" else f"r = {name}",
            f"{step['trainable']:,}",
            f"{step['trainable'] / NET_PARAMETERS:.1%}",
            f"{1000 * step['median']:.3f}",
            f"{1000 * step['p20']:.3f} to {1000 * step['p80']:.3f}",
            size(step["trained_bytes"]),
            size(step["step_peak_bytes"]),
        ]
        for name, step in results["steps"].items()
    ]
    headers = ("", "trained", "of the net", "step, ms", "20 % to 80 %", "trained + momentum", "peak of a step")
    print_table("Cost, measured side by side in one process with one thread", headers, lines, markdown=markdown)


def _notes(results: Mapping[str, Any], config: MnistConfig) -> list[str]:
    seeds = [results["seeds"].get(str(seed), {}) for seed in range(config.seeds)]
    stops = [entry["stopped_step"] for entry in seeds if "stopped_step" in entry]
    steps = [entry["base_steps"] for entry in seeds if "base_steps" in entry]
    low, high = config.band
    chosen = ""
    if config.rates == default_rates():
        chosen = ", the best of five on held-out training images (the base's: the second best)"
    notes = [
        f"Factors of rank r have {PER_RANK} r parameters; biases do not train. The net has {NET_PARAMETERS:,}. From "
        f"rank {-(-NET_PARAMETERS // PER_RANK)} on the factors have more parameters than the net, and from rank 10 on "
        "the last layer's update can have full rank.",
        f"SGD with momentum 0.9, batches of {config.batch}, {config.epochs} epochs for every arm ({config.base_epochs} "
        f"for the base); the rate rises for {config.warmup} steps and then falls linearly to zero. Peak rates"
        f"{chosen}: " + ", ".join(f"{arm} {rate:g}" for arm, rate in config.rates.items()) + ".",
        f"Quantised: {config.levels} grey levels. Rotated: 90 degrees to the {config.turn}. Inverted: 255 - x.",
    ]
    if stops:
        notes.append(
            f"Stopped base: at the first measurement (every {config.look_every} steps) between {low:g} and {high:g} % "
            f"on the test images, after {', '.join(map(str, stops))} steps of {steps[0]:,}."
        )
    names = [name for entry in seeds for name in entry.get("accuracy", {}).items() if not name[0].startswith("base/")]
    if constant := [name for name, found in names if found <= CONSTANT]:
        notes.append(
            f"{len(constant)} of {len(names)} trainings ended with a constant answer ({CONSTANT} % or less); the means "
            f"include them: {', '.join(f'{name} ({constant.count(name)})' for name in dict.fromkeys(constant))}."
        )
    if "wall" in results["seconds"]:
        minutes, processes = results["seconds"]["wall"] / 60, results["seconds"]["processes"]
        notes.append(f"The whole run took {minutes:.1f} minutes in {processes} process{'es' if processes > 1 else ''}.")
    return notes


def rates_yaml(rates: Mapping[str, float]) -> str:
    """Return the rates in the format of a configuration file."""
    lines = [f"  {arm}: {rate:g}" for arm, rate in rates.items()]
    return "\n".join(["rates:", *lines]) + "\n"


DRAWN = (
    ("lora", "stopped", "LoRA, stopped base"),
    ("lora", "trained", "LoRA, trained base"),
    ("scratch", "", "from scratch, random + BA"),
    ("product", "", "from scratch, BA alone"),
)


def draw(results: Mapping[str, Any], config: MnistConfig, path: str) -> None:
    """Draw accuracy over rank: a panel per set of images, with standard deviations and the report's numbers."""
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    figure.suptitle("MNIST: test accuracy against the rank of the factors, ours and the report's")
    axes = figure.subplots(2, len(SETS) // 2, sharex=True, sharey=True).flat
    for axis, images in zip(axes, SETS, strict=True):
        for number, (arm, base, label) in enumerate(DRAWN):
            if arm == "lora" and images not in VARIANTS:
                continue
            names = [(rank, Cell(arm, base, images, rank).name) for rank in config.ranks]
            points = [(rank, values) for rank, name in names if (values := values_of(results, name, config))]
            means = [statistics.mean(values) for _, values in points]
            spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points]
            ranks = [rank for rank, _ in points]
            style = drawing.Style.number(number + 1)._asdict()
            axis.errorbar(ranks, means, yerr=spreads, **style, ms=5, capsize=3, label=label)
        for arm, marker, label in (("lora", "x", "report, LoRA"), ("scratch", "+", "report, from scratch")):
            known = (
                [(r, y) for r in config.ranks if (y := reported(arm, images, r)) is not None]
                if (arm != "lora" or images in VARIANTS)
                else []
            )
            axis.plot([r for r, _ in known], [y for _, y in known], marker, color="k", ms=8, zorder=3, label=label)
        if images in VARIANTS and (full := values_of(results, f"full/stopped/{images}", config)):
            axis.axhline(statistics.mean(full), color="0.5", lw=1, ls="--", label="all weights, stopped base")
        axis.set_xscale("log", base=2)
        axis.set_xticks(config.ranks, [str(rank) for rank in config.ranks])
        axis.set(title=f"{images} images", xlabel="rank", ylabel="test accuracy, %", ylim=(0, 100))
        axis.label_outer()
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
