"""LoRA on MNIST: the trainings of one seed, with the code of `python -m experiments.lora_mnist`.

Shape letters: N images, H rows, W columns.
"""

import statistics
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.noise import Difference, Row, gain, number, pooled, select
from experiments.harness.units import Unit
from experiments.lora_mnist import arms as lora
from experiments.lora_mnist.config import CLASSES, SETS, VARIANTS, MnistConfig

REPORT = {"quantised": (91.20, 93.19), "rotated": (37.53, 90.41), "inverted": (16.23, 71.88)}
BLOCKS = 25
"""Blocks of test images: 400 of MNIST's."""


def run(unit: Unit) -> list[Row]:
    """Train the bases, fine-tune them fully and by factors, and train factors from scratch."""
    given = dict(unit.settings)
    toy = given.pop("toy", None)
    path = given.pop("path", None) or str(toy_digits(Path(unit.folder) / "digits.npz", unit.seed, **toy))
    config = MnistConfig.from_dict({**given, "path": path})
    digits = lora.read_digits(config)
    bases, _ = lora.train_base(config, digits, unit.seed)
    cells = [lora.Cell("base", base, images, None) for base in bases for images in SETS] + lora.cells(config)
    rows: list[Row] = []
    for cell in cells:
        trains = cell.arm != "base"
        net = lora.train_cell(cell, config, digits, bases, unit.seed) if trains else bases[cell.base]
        percent_N = 100.0 * lora.right(net, digits.test[cell.images]).numpy()
        rows.append(
            {
                "way": cell.arm,
                "base": cell.base,
                "images": cell.images,
                "rank": cell.rank or 0,
                **({"parameters": trained_parameters(cell.rank)} if trains else {}),
                "accuracy": float(percent_N.mean()),
                "chance": 100 / CLASSES,
                "text": digits.fingerprint[:8],
                "accuracy_blocks": [round(float(part.mean()), 2) for part in np.array_split(percent_N, BLOCKS)],
                "block_size": len(percent_N) // BLOCKS,
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
    found = select(rows, {"way": "base", "base": "stopped", "images": "inverted"})
    if not all("chance" in row for row in found):
        return None
    one = gain(found, "accuracy", "chance", -1.0, pooled(found, "accuracy"))
    return [one], f"{number(one.left)} %, chance {number(one.right)} %"


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
