"""MNIST pixel by pixel: speed of drawing images, and quality of completing occluded ones.

Shape letters: N images, H rows, W columns, T bytes of an image.
"""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.harness.noise import EXACT, Difference, Row, pooled, select
from experiments.harness.train import train_unit
from experiments.harness.units import Unit
from subquad.data import load_images
from subquad.data.occlusion import occlusion
from subquad.evaluation import evaluate_images
from subquad.evaluation.images import Reader, train_reader
from subquad.generation.images import complete_images, generate_images
from subquad.hf import SubquadForImages
from subquad.memory import keep_freed_memory
from subquad.models.image import ImageModel

REPORT = {"linear": {100: 33.45, 200: 67.46, 300: 76.46}, "full": {100: 367.91, 200: 811.99, 300: 1248.15}}


def run(unit: Unit) -> list[Row]:
    """Train, and measure bits, drawing and completions."""
    given = {name: value for name, value in unit.settings.items() if name != "drawing"}
    drawing = unit.settings["drawing"]
    if given["image"]["path"] is None:
        given["image"] = {**given["image"], "path": str(toy_images(Path(unit.folder) / "toy.npz"))}
    rows: list[Row] = [{"what": "bits", **row} for row in train_unit(replace(unit, settings=given))]
    model = SubquadForImages.from_pretrained(f"{unit.folder}/run").model.eval()
    model = model.to(unit.device)
    keep_freed_memory()
    generate_images(model, 1)
    ways = [("state carried", True, drawing["images"], drawing["repeats"])]
    if any(block.attention.state_grows for block in model.blocks()):
        ways = [("cache", True, drawing["images"], drawing["repeats"]), ("no cache", False, drawing["no_cache"], 1)]
    for way, cache, counts, repeats in ways:
        rows += [drawn(model, way, count, cache) for _ in range(repeats) for count in counts]
    return rows + completions(model, given["image"]["path"], drawing["completions"])


def drawn(model: ImageModel, way: str, count: int, cache: bool) -> Row:
    """Time the drawing of `count` images."""
    found = generate_images(model, count, batch_size=count, cache=cache)
    speed = {"seconds": found.seconds, "images_per_second": count / found.seconds}
    return {"what": "drawing", "way": way, "images": count, **speed, "state_bytes": found.state_bytes}


def completions(model: ImageModel, path: str, count: int) -> list[Row]:
    """Complete held-out images without their lower half, in three parts, whose spread is the noise."""
    sets = load_images(path, labels=True)
    images, size = sets["test"], len(sets["test"].pixels)
    height, width, channels = images.shape
    mask_HW = occlusion("bottom:0.5", height, width, seed=0)
    occluded_T = torch.from_numpy(mask_HW.flatten()).repeat_interleave(channels)
    reader = train_reader(sets["train"])
    chosen_N = np.arange(3 * count) * size // (3 * count)
    return [completed(model, reader, images, chosen_N[part::3], occluded_T) for part in range(3)]


def completed(model: ImageModel, reader: Reader, images: Any, chosen_N: np.ndarray, occluded_T: torch.Tensor) -> Row:
    """Return the bits of the occluded pixels, a small classifier's accuracy on the completions, and their speed."""
    pixels_NT = torch.from_numpy(images.pixels[chosen_N].reshape(len(chosen_N), -1))
    labels_N = torch.from_numpy(images.labels[chosen_N])
    bits = evaluate_images(model, pixels_NT, occluded_T=occluded_T, batch_size=16)
    made = complete_images(model, pixels_NT, occluded_T, batch_size=100)
    return {
        "what": "completion",
        "images": len(chosen_N),
        "occluded_bits": bits.occluded_bits_per_dim,
        "read": 100 * reader.accuracy(made.pixels_NT, labels_N),
        "read_originals": 100 * reader.accuracy(pixels_NT, labels_N),
        "read_black": 100 * reader.accuracy(pixels_NT.masked_fill(occluded_T, 0), labels_N),
        "images_per_second": len(chosen_N) / made.seconds,
    }


def toy_images(file: Path) -> Path:
    """Write ten noisy random pictures of 5 x 5 in Keras's format of MNIST, for the smoke scale."""
    random = np.random.default_rng(0)
    picture_CHW = random.integers(0, 256, (10, 5, 5))
    made = {}
    for name in ("train", "test"):
        y_N = np.arange(40) % 10
        noise_NHW = random.normal(0, 30, (40, 5, 5))
        made[f"x_{name}"] = np.clip(picture_CHW[y_N] + noise_NHW, 0, 255).astype(np.uint8)
        made[f"y_{name}"] = y_N.astype(np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **made)  # type: ignore[arg-type]
    return file


def claim_bits(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that softmax needs fewer bits, with the noise over images, treated as independent for the two models."""
    linear, full = (select(rows, {"what": "bits", "attention": name}) for name in ("linear", "full"))
    if not linear or not full:
        return None
    a, b = (statistics.mean(row["bits_per_dim"] for row in side) for side in (full, linear))
    error = math.hypot(*(max(row["error"] for row in side) for side in (full, linear)))
    found = Difference(b - a, error, EXACT, len({row["seed"] for row in full}), complete=True)
    return [found], f"{a:.3f} against {b:.3f} ({a - b:+.3f} ± {error:.3f} over images)"


def claim_faster_than_no_cache(rows: list[Row]) -> tuple[str, str] | None:
    """Compare the slowest timing with a state with the one without a cache, in images per second."""
    linear, slow = (select(rows, {"what": "drawing", "way": way}) for way in ("state carried", "no cache"))
    if not linear or not slow:
        return None
    least = min(row["images_per_second"] for row in linear) / max(row["images_per_second"] for row in slow)
    shown = f"at least {least:.1f} times as fast ({slow[0]['images']} images without a cache, timed once)"
    return "holds" if least > 1 else "does not hold", shown


def claim_factor(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that the time of softmax with its cache relative to linear attention grows with the number of images."""
    timed = [{**row, "log": math.log(row["seconds"])} for row in rows if row["what"] == "drawing"]
    for row in timed:
        del row["seconds"], row["images_per_second"]
    counts = sorted({row["images"] for row in select(timed, {"way": "state carried"})})
    found = []
    for count in (counts[0], counts[-1]) if counts else ():
        sides = [select(timed, {"way": way, "images": count}) for way in ("cache", "state carried")]
        if not all(sides):
            return None
        found.append(statistics.mean(r["log"] for r in sides[0]) - statistics.mean(r["log"] for r in sides[1]))
    if len(found) < 2:
        return None
    noise = pooled(timed, "log")
    repeats = min(len(side) for side in sides)
    error = noise.deviation * math.sqrt(4 / repeats)
    growth = Difference(found[1] - found[0], error, noise.freedom, repeats)
    shown = ", ".join(f"{math.exp(value):.2f}" for value in found)
    return [growth], f"{shown} times for {counts[0]} and {counts[-1]} images (± {100 * error:.0f} % on the growth)"


def draw(figure: Figure, rows: list[Row]) -> None:
    """Draw seconds over images, ours and the report's, and the classifier's accuracy on completions."""
    left, right = figure.subplots(1, 2)
    figure.set_size_inches(10, 4.2)
    for color, way in (("#4477aa", "state carried"), ("#cc6677", "cache"), ("#228833", "no cache")):
        same = select(rows, {"what": "drawing", "way": way})
        name = "linear" if way == "state carried" else f"softmax, {way}"
        left.plot([r["images"] for r in same], [r["seconds"] for r in same], "o", color=color, label=name)
    for color, name in (("#4477aa", "linear"), ("#cc6677", "full")):
        label = f"the report's {'softmax' if name == 'full' else name}"
        left.plot(list(REPORT[name]), list(REPORT[name].values()), "--", color=color, label=label)
    left.set(yscale="log", xlabel="images", ylabel="seconds", title="drawing")
    left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=3)
    for place, name in enumerate(("linear", "full")):
        same = select(rows, {"what": "completion", "attention": name})
        right.plot([place] * len(same), [r["read"] for r in same], "o", color="#4477aa")
    for key, label, style in (("read_originals", "originals", "--"), ("read_black", "lower half black", ":")):
        values = [row[key] for row in rows if key in row]
        right.axhline(statistics.mean(values), linestyle=style, color="#777777", label=label)
    right.set_xticks((0, 1), ("linear", "softmax"))
    right.set(title="completions of the lower half", ylabel="read correctly, %")
    right.legend(frameon=False, fontsize=8)
