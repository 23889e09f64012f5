"""MNIST pixel by pixel: speed of drawing images, and quality of completing occluded ones.

Shape letters: N images, H rows, W columns, B batch, T bytes of an image.
"""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.harness.measure import in_blocks
from experiments.harness.noise import Difference, Row, pooled, select
from experiments.harness.rates import SHARE
from experiments.harness.recipe import merged
from experiments.harness.train import steps_of, train_config, trained
from experiments.harness.units import Unit
from subquad.config import digest
from subquad.data import load_images
from subquad.data.images import ImageSet
from subquad.data.occlusion import occlusion
from subquad.evaluation.images import train_reader
from subquad.generation.images import complete_images, generate_images
from subquad.inference import inference
from subquad.memory import keep_freed_memory
from subquad.models.image import ImageModel
from subquad.training import TrainConfig
from subquad.training.errors import NonFiniteError
from subquad.training.tasks import prepare_task

REPORT = {"linear": {100: 33.45, 200: 67.46, 300: 76.46}, "full": {100: 367.91, 200: 811.99, 300: 1248.15}}


def run(unit: Unit) -> list[Row]:
    """Time an untrained model if the arm has settings of drawing, else train one and measure its quality."""
    config = config_of(unit)
    if "drawing" not in unit.settings:
        return measured(trained(config).model.model, config, unit.settings["completions"])
    keep_freed_memory()
    model = prepare_task(config, None).new_model().model.to(unit.device)
    return timed(model, config, unit.settings["drawing"])


def search(unit: Unit) -> float:
    """Return the bits per dimension after a third of the steps, of test images that the result doesn't use."""
    config = config_of(unit)
    whole = steps_of(config)
    steps, shorter = max(1, whole // SHARE), {"warmup": config.schedule.warmup_of(whole) // SHARE}
    part = replace(unit, settings=merged(unit.settings, {"schedule": shorter}))
    place = f"{unit.folder}/rate-{config.optimizer.lr:g}"
    try:
        result = trained(config_of(part, steps=steps, save_every=steps, folder=place))
    except NonFiniteError:
        return math.inf
    images = load_images(str(config.image.path))["test"]
    pixels_NT = images.flat[places(images, config.image.test_images, between=True)]
    return bits(result.model.model, pixels_NT).nan_to_num(math.inf).mean().item()


def config_of(unit: Unit, **run: Any) -> TrainConfig:
    """Return the configuration of the unit's training; without a path it draws made-up images."""
    given = {name: value for name, value in unit.settings.items() if name not in ("drawing", "completions")}
    if given["image"]["path"] is None:
        given = merged(given, {"image": {"path": str(toy_images(Path(unit.folder) / "toy.npz"))}})
    return train_config(unit, given, **run)


def places(images: ImageSet, count: int, *, between: bool = False) -> np.ndarray:
    """Return the numbers of evenly spaced images, or of those halfway `between` them."""
    return (2 * np.arange(count) + between) * len(images.pixels) // (2 * count)


def bits(model: ImageModel, pixels_NT: Tensor) -> Tensor:
    """Return the bits `[N, T]` that the model needs for each byte."""
    device = next(model.parameters()).device
    with inference(model):
        parts = [model.log_prob(part_BT.long().to(device)).double().cpu() for part_BT in pixels_NT.split(16)]
    return torch.cat(parts) / -math.log(2)


def measured(model: ImageModel, config: TrainConfig, count: int) -> list[Row]:
    """Return the bits of test images, and the quality of `count` completions."""
    sets = load_images(str(config.image.path), labels=True)
    pixels_NT = sets["test"].flat[places(sets["test"], config.image.test_images)]
    bits_N = bits(model, pixels_NT).mean(1)
    share_V = pixels_NT.flatten().long().bincount().double() / pixels_NT.numel()
    row: Row = {"what": "bits", "steps": config.run.steps, "bits_per_dim": bits_N.mean().item()}
    row["constant"] = torch.special.entr(share_V).sum().item() / math.log(2)
    row |= {"text": digest(pixels_NT.tolist())[:8], **in_blocks("bits_per_dim", bits_N.numpy())}
    return [row, completions(model, sets, count)]


def completions(model: ImageModel, sets: dict[str, ImageSet], count: int) -> Row:
    """Return the bits of the lower halves of test images, and what a small classifier reads of their completions."""
    images, chosen_N = sets["test"], places(sets["test"], count)
    assert images.labels is not None
    pixels_NT, labels_N = images.flat[chosen_N], torch.from_numpy(images.labels[chosen_N])
    occluded_T, reader = lower_half(images), train_reader(sets["train"])
    made_NT = complete_images(model, pixels_NT, occluded_T, batch_size=100).pixels_NT
    row: Row = {"what": "completion", "images": count, "text": digest(pixels_NT.tolist())[:8]}
    row["read_originals"] = 100 * reader.accuracy(pixels_NT, labels_N)
    row["read_black"] = 100 * reader.accuracy(pixels_NT.masked_fill(occluded_T, 0), labels_N)
    read_N = 100.0 * reader.labels(made_NT).eq(labels_N).double()
    occluded_N = bits(model, pixels_NT)[:, occluded_T].mean(1)
    for name, value_N in {"read": read_N, "occluded_bits": occluded_N}.items():
        row |= {name: value_N.mean().item(), **in_blocks(name, value_N.numpy())}
    return row


def lower_half(images: ImageSet) -> Tensor:
    """Return a mask `[T]` of the bytes in the lower half of an image."""
    height, width, channels = images.shape
    return torch.from_numpy(occlusion("bottom:0.5", height, width, seed=0).flatten()).repeat_interleave(channels)


def timed(model: ImageModel, config: TrainConfig, drawing: dict[str, Any]) -> list[Row]:
    """Time the drawing of images, with a state or cache and without, and the completion of lower halves."""
    generate_images(model, 1)
    ways = [("state carried", True, drawing["images"], drawing["repeats"])]
    if any(block.attention.state_grows for block in model.blocks()):
        ways = [("cache", True, drawing["images"], drawing["repeats"]), ("no cache", False, drawing["no_cache"], 1)]
    rows = [
        drawn(model, way, count, cache)
        for way, cache, counts, repeats in ways
        for _ in range(repeats)
        for count in counts
    ]
    images, count = load_images(str(config.image.path))["test"], drawing["images"][0]
    for _ in range(drawing["repeats"]):
        made = complete_images(model, images.flat[places(images, count)], lower_half(images), batch_size=count)
        rows.append({"what": "completing", "images": count, "images_per_second": count / made.seconds})
    return rows


def drawn(model: ImageModel, way: str, count: int, cache: bool) -> Row:
    """Time the drawing of `count` images."""
    found = generate_images(model, count, batch_size=count, cache=cache)
    speed = {"seconds": found.seconds, "images_per_second": count / found.seconds}
    return {"what": "drawing", "way": way, "images": count, **speed, "state_bytes": found.state_bytes}


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
