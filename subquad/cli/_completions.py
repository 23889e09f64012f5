"""What `subquad complete` measures and draws. Shape letters: N images, T bytes of one, H rows, W columns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from subquad.cli import _image_grid
from subquad.cli.tables import write_json
from subquad.data.images import ImageSet
from subquad.data.occlusion import occlusion
from subquad.evaluation import ImageEvaluation, evaluate_images
from subquad.evaluation.images import train_reader
from subquad.generation.images import DrawnImages, complete_images
from subquad.memory import keep_freed_memory
from subquad.training.runs import LoadedImageModel, chosen, flat, images_for, load_image_run

MOST_AT_ONCE = 16
"""Images whose bits are measured at once."""


@dataclass(frozen=True)
class Subject:
    """A model, images, and what is occluded of them."""

    loaded: LoadedImageModel
    images: ImageSet
    train: ImageSet | None
    mask_HW: NDArray[np.bool_]

    @property
    def occluded(self) -> Tensor:
        """The mask for the bytes of an image, `[T]`."""
        return torch.from_numpy(self.mask_HW.flatten()).repeat_interleave(self.images.shape[2])


@dataclass(frozen=True)
class Completions:
    """What was found."""

    subject: Subject
    occlude: str
    evaluation: ImageEvaluation
    drawn: DrawnImages
    """Image after image, each with all of its completions."""
    samples: int
    blind: int
    """Occluded pixels before the last given one: drawn without seeing what comes later."""
    read: dict[str, float]
    """Accuracy of the fixed classifier on originals, completions and occluded images; empty without labels."""
    reader_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        mask_HW, drawn = self.subject.mask_HW, self.drawn
        return {
            "run": str(self.subject.loaded.folder),
            "attention": self.subject.loaded.model.config.attention,
            "occlude": self.occlude,
            "images": self.evaluation.images,
            "samples": self.samples,
            "pixels": mask_HW.size,
            "occluded_pixels": int(mask_HW.sum()),
            "blind_pixels": self.blind,
            "bits_per_dim": self.evaluation.bits_per_dim,
            "occluded_bits_per_dim": self.evaluation.occluded_bits_per_dim,
            "accuracy": self.read or None,
            "seconds": drawn.seconds,
            "completions_per_second": len(drawn.pixels_NT) / drawn.seconds,
            "batch_size": drawn.batch_size,
            "state_bytes": drawn.state_bytes,
        }


def prepare(asked: Namespace) -> Subject:
    """Read model, images and mask. Raises `ValueError` and `FileNotFoundError` for those that do not fit."""
    loaded = load_image_run(asked.run, asked.device)
    height, width, _ = loaded.model.config.shape
    mask_HW = occlusion(asked.occlude, height, width, seed=asked.seed)
    found = images_for(loaded, asked.path)
    return Subject(loaded, chosen(found.held_out, asked.images), found.train, mask_HW)


def complete(subject: Subject, asked: Namespace, *, progress: Callable[[int, int], None] | None) -> Completions:
    """Draw the completions and measure."""
    pixels_NT, occluded_T = flat(subject.images), subject.occluded
    keep_freed_memory()
    drawn = complete_images(
        subject.loaded.model,
        pixels_NT.repeat_interleave(asked.samples, 0),
        occluded_T,
        temperature=asked.temperature,
        seed=asked.seed,
        batch_size=asked.batch_size,
        progress=progress,
    )
    evaluation = evaluate_images(
        subject.loaded.model, pixels_NT, occluded_T=occluded_T, batch_size=min(asked.batch_size, MOST_AT_ONCE)
    )
    begin = time.perf_counter()
    read = _read(subject, pixels_NT, drawn.pixels_NT)
    given = np.flatnonzero(~subject.mask_HW)
    return Completions(
        subject=subject,
        occlude=asked.occlude,
        evaluation=evaluation,
        drawn=drawn,
        samples=asked.samples,
        blind=int(subject.mask_HW.flatten()[: given[-1]].sum()) if given.size else 0,
        read=read,
        reader_seconds=time.perf_counter() - begin,
    )


def _read(subject: Subject, pixels_NT: Tensor, drawn_NT: Tensor) -> dict[str, float]:
    """Accuracies of the classifier that the training images alone make; empty where labels are missing."""
    if subject.train is None or subject.train.labels is None or subject.images.labels is None:
        return {}
    reader = train_reader(subject.train)
    labels_N = torch.from_numpy(subject.images.labels)
    return {
        "originals": reader.accuracy(pixels_NT, labels_N),
        "completions": reader.accuracy(drawn_NT, labels_N.repeat_interleave(len(drawn_NT) // len(labels_N))),
        "occluded": reader.accuracy(pixels_NT.masked_fill(subject.occluded, 0), labels_N),
    }


def picture(found: Completions, most: int, file: Path) -> None:
    """Write a row for each of the first `most` images: original, occluded, completions."""
    subject, shape = found.subject, found.subject.images.shape
    drawn = found.drawn.pixels_NT.view(-1, found.samples, *shape).numpy()
    rows = [
        [image, _image_grid.occluded(image, subject.mask_HW), *drawn[i]]
        for i, image in enumerate(subject.images.pixels[:most])
    ]
    captions = ["original", "occluded", *(f"drawn {k}" for k in range(1, found.samples + 1))]
    _image_grid.save(_image_grid.grid(rows, captions), file)


def show(found: Completions) -> None:
    """Print the numbers."""
    evaluation, drawn, mask_HW = found.evaluation, found.drawn, found.subject.mask_HW
    occluded = int(mask_HW.sum())
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_row("images", f"{evaluation.images:,}, {found.samples} completions each")
    table.add_row("occluded", f"{found.occlude}: {occluded:,} of {mask_HW.size:,} pixels")
    if found.blind:
        table.add_row("", f"{found.blind:,} of them come before given pixels, which have no part in what is drawn")
    table.add_row("bits per dimension", f"{evaluation.bits_per_dim:.4f} of all pixels")
    table.add_row("", f"{evaluation.occluded_bits_per_dim:.4f} of the occluded pixels")
    if found.read:
        for name, text in (
            ("originals", "of the originals"),
            ("completions", "of the completions"),
            ("occluded", "of the images with the occluded part black"),
        ):
            first = "read rightly" if name == "originals" else ""
            table.add_row(first, f"{found.read[name]:.2%} {text}")
        table.add_row("", f"by a small classifier of the training images ({found.reader_seconds:.1f} s)")
    speed = len(drawn.pixels_NT) / drawn.seconds
    table.add_row("time", f"{drawn.seconds:.2f} s, {speed:,.2f} completions/s, {drawn.batch_size} at once")
    table.add_row("state", f"{drawn.state_bytes:,} bytes of {drawn.batch_size} images")
    Console().print(table)


def write(found: Completions, file: str) -> None:
    """Write the numbers as JSON."""
    write_json(file, found.to_dict())
