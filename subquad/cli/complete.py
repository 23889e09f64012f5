"""`subquad complete`: fill in hidden parts of images with an image model.

Shape letters: N images, T bytes of one, H rows, W columns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import Namespace
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from subquad import training
from subquad.bars import READING, progress, waiting
from subquad.cli.arguments import Parser, check_output, picture_file
from subquad.cli.result_tables import facts
from subquad.cli.threads import keep_to_idle_cores
from subquad.config import check_at_least
from subquad.data.files import write_json
from subquad.data.images import ImageSet
from subquad.data.occlusion import occlusion
from subquad.evaluation import ImageEvaluation, evaluate_images
from subquad.evaluation.images import train_reader
from subquad.generation import SamplingConfig, complete_images
from subquad.generation.images import DrawnImages, occluded, picture_of, write_png

MOST_AT_ONCE = 16
"""Largest batch in which bits are measured."""
DESCRIPTION = (
    "Hide a part of each image and let a trained image model fill it in. Writes a picture (original, occluded, "
    "completions) and prints bits per dimension, time, and the accuracy of a small classifier on the completions. The "
    "model draws row by row, from left to right: a pixel depends only on the pixels before it. Of `top:0.5`, for "
    "example, it draws the upper half without seeing the lower half."
)
OCCLUDE_HELP = (
    "Part to hide. bottom:0.5, top:0.5, left:0.5 or right:0.5: a share of rows or columns. center:0.5: a share of "
    "both. random:0.5: a share of pixels. Or a mask file: a PNG, white where hidden, or a .npy of booleans."
)
PATH_HELP = (
    "Images to complete: PNG files, or anything that image.path of `subquad train` accepts. null: the run's held-out "
    "images."
)


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser("complete RUN", DESCRIPTION)
    parser.add_argument("run", type=str, help="Folder of a run with task=image, or of one of its checkpoints.")
    parser.add_argument("--occlude", type=str, default="bottom:0.5", help=OCCLUDE_HELP)
    parser.add_argument("--images", type=int, default=100, help="Number of images to complete, evenly spread.")
    parser.add_argument("--samples", type=int, default=1, help="Completions per image.")
    parser.add_argument("--show", type=int, default=8, help="Number of completed images to show in the picture.")
    parser.add_optional("--path", PATH_HELP)
    parser.add_optional("--out", "PNG file to write. null: RUN/completions.png.")
    parser.add_optional("--json", "Also write the numbers to this JSON file.")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="Below 1: likelier pixels. 1: the model's own probabilities."
    )
    parser.add_argument("--seed", type=int, default=0, help="Random seed of completions and of --occlude random.")
    parser.add_argument("--batch_size", type=int, default=100, help="Images completed in one batch.")
    parser.add_device()
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, complete, print, return the exit status."""
    parser = make_parser()
    asked = parser.parse_args(arguments)
    keep_to_idle_cores(asked.device)
    with parser.checking():
        out = _check(asked)
        subject = prepare(asked)
    found = complete(subject, asked)
    save_picture(found, asked.show, out)
    show(found)
    if asked.json is not None:
        write_json(asked.json, found.to_dict())
    sys.stdout.write(f"{out}\n")
    return 0


def _check(asked: Namespace) -> Path:
    """Return the file of the picture; raise `ValueError` for a number out of range."""
    for name, least in (("images", 1), ("samples", 1), ("show", 1), ("batch_size", 1), ("seed", 0)):
        check_at_least(least, "--", **{name: asked[name]})
    SamplingConfig(temperature=asked.temperature, seed=asked.seed)
    check_output("json", asked.json)
    return picture_file(asked.out, Path(asked.run) / "completions.png")


@dataclass(frozen=True)
class Subject:
    """A model, images, and the mask of occluded pixels."""

    loaded: training.runs.LoadedImageModel
    images: ImageSet
    train: ImageSet | None
    mask_HW: NDArray[np.bool_]

    @property
    def occluded(self) -> Tensor:
        """Return the mask over the bytes of an image, `[T]`."""
        return torch.from_numpy(self.mask_HW.flatten()).repeat_interleave(self.images.shape[2])


@dataclass(frozen=True)
class Completions:
    """Completions with their measurements."""

    subject: Subject
    occlude: str
    evaluation: ImageEvaluation
    drawn: DrawnImages
    """Ordered by image, then by completion."""
    samples: int
    blind: int
    """Occluded pixels before the last given one, drawn without seeing given pixels after them."""
    read: dict[str, float]
    """Accuracy of the small classifier on originals, completions and occluded images; empty without labels."""
    reader_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
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
    """Load model, images and mask; `ValueError` or `FileNotFoundError` if one is missing or doesn't fit."""
    with waiting(READING):
        loaded = training.runs.load_image_run(asked.run, asked.device)
    height, width, _ = loaded.model.config.shape
    mask_HW = occlusion(asked.occlude, height, width, seed=asked.seed)
    found = training.runs.images_for(loaded, asked.path)
    return Subject(loaded, training.runs.chosen(found.held_out, asked.images), found.train, mask_HW)


def complete(subject: Subject, asked: Namespace) -> Completions:
    """Draw the completions and measure them."""
    pixels_NT, occluded_T = subject.images.flat, subject.occluded
    with progress("byte") as shown:
        drawn = complete_images(
            subject.loaded.model,
            pixels_NT.repeat_interleave(asked.samples, 0),
            occluded_T,
            temperature=asked.temperature,
            seed=asked.seed,
            batch_size=asked.batch_size,
            progress=shown,
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
    """Return accuracies of a classifier trained on the run's training images; empty without labels."""
    if subject.train is None or subject.train.labels is None or subject.images.labels is None:
        return {}
    reader = train_reader(subject.train)
    labels_N = torch.from_numpy(subject.images.labels)
    return {
        "originals": reader.accuracy(pixels_NT, labels_N),
        "completions": reader.accuracy(drawn_NT, labels_N.repeat_interleave(len(drawn_NT) // len(labels_N))),
        "occluded": reader.accuracy(pixels_NT.masked_fill(subject.occluded, 0), labels_N),
    }


def save_picture(found: Completions, most: int, file: Path) -> None:
    """Write a picture with a row for each of the first `most` images: original, occluded, completions."""
    subject, shape = found.subject, found.subject.images.shape
    drawn = found.drawn.pixels_NT.view(-1, found.samples, *shape).numpy()
    rows = [
        [image, occluded(image, subject.mask_HW), *drawn[i]] for i, image in enumerate(subject.images.pixels[:most])
    ]
    captions = ["original", "occluded", *(f"drawn {k}" for k in range(1, found.samples + 1))]
    write_png(file, picture_of(rows, captions))


def show(found: Completions) -> None:
    """Print the numbers."""
    evaluation, drawn, mask_HW = found.evaluation, found.drawn, found.subject.mask_HW
    count = int(mask_HW.sum())
    table = facts(
        ("images", f"{evaluation.images:,}, {found.samples} completions each"),
        ("occluded", f"{found.occlude}: {count:,} of {mask_HW.size:,} pixels"),
    )
    if found.blind:
        table.add_row("", f"{found.blind:,} of them drawn without seeing given pixels that come after them")
    table.add_row("bits per dimension", f"{evaluation.bits_per_dim:.4f} of all pixels")
    table.add_row("", f"{evaluation.occluded_bits_per_dim:.4f} of the occluded pixels")
    if found.read:
        table.add_row("classified correctly", f"{found.read['originals']:.2%} of the originals")
        table.add_row("", f"{found.read['completions']:.2%} of the completions")
        table.add_row("", f"{found.read['occluded']:.2%} of the images with the occluded part black")
        table.add_row("", f"by a small classifier trained on the training images ({found.reader_seconds:.1f} s)")
    speed = len(drawn.pixels_NT) / drawn.seconds
    table.add_row("time", f"{drawn.seconds:.2f} s, {speed:,.2f} completions/s, {drawn.batch_size} at once")
    table.add_row("state", f"{drawn.state_bytes:,} bytes of {drawn.batch_size} images")
    Console().print(table)
