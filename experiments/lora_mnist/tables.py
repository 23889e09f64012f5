"""The tables of the LoRA experiment on MNIST: our mean and standard deviation beside the report's numbers."""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lora_mnist.config import NET_PARAMETERS, PER_RANK, SETS, VARIANTS, MnistConfig, default_rates
from subquad.cli.tables import print_table, size

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
"""Quantised, rotated, inverted after fine-tuning the factors of a rank."""
REPORT_SCRATCH = {
    1: (56.79, 23.50, 25.91, 22.21),
    2: (71.90, 37.48, 43.96, 45.81),
    4: (84.33, 64.87, 62.60, 69.67),
    8: (89.12, 77.96, 82.39, 83.11),
    16: (92.64, 88.2, 86.76, 87.38),
    32: (93.98, 90.13, 90.62, 90.25),
    64: (94.85, 91.66, 91.85, 86.01),
}
"""Plain, quantised, rotated, inverted after training the factors of a rank from scratch."""

CONSTANT = 11.35
"""The best constant answer on MNIST's test images, in percent: 1."""


def values_of(results: Mapping[str, Any], name: str, config: MnistConfig) -> list[float]:
    """The accuracies of one training over the seeds."""
    seeds = (results["seeds"].get(str(seed), {}) for seed in range(config.seeds))
    return [entry["accuracy"][name] for entry in seeds if name in entry.get("accuracy", {})]


def reported(arm: str, images: str, rank: int | None) -> float | None:
    """The report's number; None where it has none."""
    if arm == "base":
        return REPORT_BASE[images]
    if arm == "full":
        return REPORT_FULL[images]
    rows: Mapping[int, tuple[float, ...]] = REPORT_LORA if arm == "lora" else REPORT_SCRATCH
    order = VARIANTS if arm == "lora" else SETS
    row = None if rank is None else rows.get(rank)
    return None if row is None else row[order.index(images)]


def show(results: Mapping[str, Any], config: MnistConfig, markdown: str | None) -> None:
    """Print all tables; write them to the file `markdown` too, where it is given."""
    _tables(results, config, markdown=False)
    if markdown is not None:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            _tables(results, config, markdown=True)
        Path(markdown).write_text(text.getvalue(), encoding="utf-8")


def _tables(results: Mapping[str, Any], config: MnistConfig, *, markdown: bool) -> None:
    what = "mean ± sample standard deviation of the test accuracy, %"
    seeds = f"{config.seeds} seed{'s' if config.seeds > 1 else ''}: {what}"

    def cells(arm: str, base: str, sets: Sequence[str], rank: int | None = None) -> list[str]:
        parts = [arm, base, "{}", None if rank is None else str(rank)]
        name = "/".join(part for part in parts if part)
        return [_mean(values_of(results, name.format(images), config)) for images in sets]

    def report(arm: str, sets: Sequence[str], rank: int | None = None) -> list[str]:
        numbers = [reported(arm, images, rank) for images in sets]
        return ["" if number is None else f"{number:.2f}" for number in numbers]

    kinds = (("stopped", "stopped in the band"), ("trained", "fully trained"))
    lines = [[label, *cells("base", kind, SETS)] for kind, label in kinds]
    print_table(f"The base, {seeds}", ("", *SETS), [*lines, ["the report", *report("base", SETS)]], markdown=markdown)
    for kind, label in kinds:
        lines = [["all weights", *_beside(cells("full", kind, VARIANTS), report("full", VARIANTS))]]
        for rank in config.ranks:
            ours = cells("lora", kind, VARIANTS, rank)
            lines.append([f"r = {rank}", *_beside(ours, report("lora", VARIANTS, rank))])
        headers = ("", *_beside(VARIANTS, ["report"] * len(VARIANTS)))
        print_table(f"Fine-tuned from the base {label}", headers, lines, markdown=markdown)
    for arm, label in (("scratch", "frozen first weights + B A"), ("product", "B A alone")):
        lines = []
        for rank in config.ranks:
            lines.append([f"r = {rank}", *_beside(cells(arm, "", SETS, rank), report(arm, SETS, rank))])
        headers = ("", *_beside(SETS, ["report"] * len(SETS)))
        print_table(f"From scratch, the factors alone train: {label}", headers, lines, markdown=markdown)
    _costs(results, markdown=markdown)
    sys.stdout.write("\n".join(_notes(results, config)) + "\n")


def _beside(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    return [cell for pair in zip(ours, theirs, strict=True) for cell in pair]


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
    headers = ("", "train", "of the net", "step, ms", "20 % to 80 %", "trained + momentum", "peak of a step")
    print_table("What it costs, side by side in one process of one thread", headers, lines, markdown=markdown)


def _notes(results: Mapping[str, Any], config: MnistConfig) -> list[str]:
    seeds = [results["seeds"].get(str(seed), {}) for seed in range(config.seeds)]
    stops = [entry["stopped_step"] for entry in seeds if "stopped_step" in entry]
    steps = [entry["base_steps"] for entry in seeds if "base_steps" in entry]
    low, high = config.band
    chosen = ""
    if config.rates == default_rates():
        chosen = ", the best of five on held-out training images (the base's: the second best)"
    notes = [
        f"Factors of rank r have {PER_RANK} r numbers, biases do not train; the net has {NET_PARAMETERS:,}. From rank "
        f"{-(-NET_PARAMETERS // PER_RANK)} on there are more factors than weights, and from rank 10 on those of the "
        "last layer are of full rank.",
        f"SGD with momentum 0.9, batches of {config.batch}, {config.epochs} epochs for every arm ({config.base_epochs} "
        f"for the base), the rate rising for {config.warmup} steps, then falling linearly to zero. Peak rates"
        f"{chosen}: " + ", ".join(f"{arm} {rate:g}" for arm, rate in config.rates.items()) + ".",
        f"Quantised: {config.levels} grey levels. Rotated: 90 degrees to the {config.turn}. Inverted: 255 - x.",
    ]
    if stops:
        notes.append(
            f"The stopped base: the first look (every {config.look_every} steps) between {low:g} and {high:g} % on the "
            f"test images, after {', '.join(map(str, stops))} steps of {steps[0]:,}."
        )
    names = [name for entry in seeds for name in entry.get("accuracy", {}).items() if not name[0].startswith("base/")]
    if constant := [name for name, found in names if found <= CONSTANT]:
        notes.append(
            f"{len(constant)} of {len(names)} trainings ended with a constant answer ({CONSTANT} % or less); they "
            f"count in the means: {', '.join(f'{name} ({constant.count(name)})' for name in dict.fromkeys(constant))}."
        )
    if "wall" in results["seconds"]:
        minutes, processes = results["seconds"]["wall"] / 60, results["seconds"]["processes"]
        notes.append(f"All of it took {minutes:.1f} minutes in {processes} process{'es' if processes > 1 else ''}.")
    return notes


def rates_yaml(rates: Mapping[str, float]) -> str:
    """The rates as a configuration file has them."""
    lines = [f"  {arm}: {rate:g}" for arm, rate in rates.items()]
    return "\n".join(["rates:", *lines]) + "\n"
