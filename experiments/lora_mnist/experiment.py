"""LoRA on MNIST: the trainings of one seed, with the code of `python -m experiments.lora_mnist`.

Shape letters: N images, H rows, W columns.
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.noise import Difference, select
from experiments.harness.units import Unit
from experiments.lora_mnist import arms as lora
from experiments.lora_mnist.config import VARIANTS, MnistConfig

REPORT = {"quantised": (91.20, 93.19), "rotated": (37.53, 90.41), "inverted": (16.23, 71.88)}
Row = dict[str, Any]


def run(unit: Unit) -> list[Row]:
    """Train the bases, fine-tune them fully and by factors, and train factors from scratch."""
    given = dict(unit.settings)
    toy = given.pop("toy", None)
    path = given.pop("path", None) or str(toy_digits(Path(unit.folder) / "digits.npz", unit.seed, **toy))
    config = MnistConfig.from_dict({**given, "path": path})
    digits = lora.read_digits(config)
    bases, known = lora.train_base(config, digits, unit.seed)
    rows: list[Row] = []
    for name, accuracy in known["accuracy"].items():
        _, base, images = name.split("/")
        rows.append({"way": "base", "base": base, "images": images, "rank": 0, "accuracy": accuracy})
    for cell in lora.cells(config):
        rows.append(
            {
                "way": cell.arm,
                "base": cell.base,
                "images": cell.images,
                "rank": cell.rank or 0,
                "parameters": trained_parameters(cell.rank),
                "accuracy": lora.train_cell(cell, config, digits, bases, unit.seed),
            }
        )
    return rows


def trained_parameters(rank: int | None) -> int:
    """Return the number of trained parameters (rank None: all weights)."""
    net = lora.fresh_net(0) if rank is None else lora.with_factors(lora.fresh_net(0), rank, 0)
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def toy_digits(file: Path, seed: int, *, train: int, test: int) -> Path:
    """Write ten noisy random pictures in Keras's format of MNIST, for the smoke scale."""
    random = np.random.default_rng(seed)
    picture_CHW = random.integers(0, 256, (10, 28, 28))
    made = {}
    for name, count in (("train", train), ("test", test)):
        y_N = np.arange(count) % 10
        noise_NHW = random.normal(0, 60, (count, 28, 28))
        made[f"x_{name}"] = np.clip(picture_CHW[y_N] + noise_NHW, 0, 255).astype(np.uint8)
        made[f"y_{name}"] = y_N.astype(np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **made)  # type: ignore[arg-type]
    return file


def claim_below_chance(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that the base is worse than guessing on inverted images."""
    base = {"way": "base", "base": "stopped", "images": "inverted", "rank": 0}
    found = [row["accuracy"] for row in select(rows, base)]
    if len(found) < 2:
        return None
    mean, error = statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5
    return [Difference(10 - mean, error, len(found) - 1, len(found))], f"{mean:.2f} ± {error:.2f} %"


def draw(figure: Figure, rows: list[Row]) -> None:
    """Draw accuracy over rank, with a panel for each set of images and a line for each kind of training."""
    axes = figure.subplots(1, 3)
    figure.set_size_inches(13, 4.2)
    for axis, images in zip(axes, VARIANTS, strict=True):
        lines = [("lora", "stopped"), ("lora", "trained"), ("scratch", ""), ("product", "")]
        for color, (way, base) in zip(("#4477aa", "#cc6677", "#228833", "#aa3377"), lines, strict=True):
            same = [row for row in rows if (row["way"], row["base"], row["images"]) == (way, base, images)]
            ranks = sorted({row["rank"] for row in same})
            values = [[row["accuracy"] for row in same if row["rank"] == rank] for rank in ranks]
            spread = [statistics.stdev(found) if len(found) > 1 else 0 for found in values]
            label = f"{way} {base}".strip()
            mean = [statistics.mean(found) for found in values]
            axis.errorbar(ranks, mean, spread, label=label, color=color, marker="o", markersize=4, capsize=2)
        for color, base in (("#4477aa", "stopped"), ("#cc6677", "trained")):
            whole = [r["accuracy"] for r in rows if (r["way"], r["base"], r["images"]) == ("full", base, images)]
            axis.axhline(statistics.mean(whole), color=color, linestyle=":", label=f"all weights, {base}")
        axis.plot((1, 64), REPORT[images], "k*", label="the report: LoRA, r = 1 and 64", linestyle="none")
        axis.set_xscale("log", base=2)
        axis.set(title=images, xlabel="rank", ylabel="test accuracy, %")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
