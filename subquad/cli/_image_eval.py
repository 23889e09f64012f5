"""What `subquad eval` does with a model of images."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from subquad.evaluation import ImageEvaluation, evaluate_images
from subquad.training.runs import LoadedImageModel, chosen, flat, images_for, load_image_run

if TYPE_CHECKING:
    from subquad.data.images import ImageSet
    from subquad.evaluation import EvalConfig


def load(folder: str, options: EvalConfig) -> tuple[LoadedImageModel, ImageSet]:
    """The model in `folder` and the images to measure it on; `ValueError` for options that only a text has."""
    data = options.data
    texts = {"length": options.length, "stride": options.stride, "data.cache": data.cache}
    for name, value in {**texts, "data.skip_bad_files": data.skip_bad_files or None}.items():
        if value is not None:
            raise ValueError(f"{folder} holds a model of images: {name}={value!r} is for texts; leave it out")
    loaded = load_image_run(folder, options.device)
    return loaded, chosen(images_for(loaded, data.path).held_out, options.windows)


def evaluate_run(loaded: LoadedImageModel, images: ImageSet, batch_size: int) -> ImageEvaluation:
    """Bits per dimension of the images."""
    progress: Any = show_progress if sys.stderr.isatty() else None
    return evaluate_images(loaded.model, flat(images), batch_size=batch_size, progress=progress)


def evaluation_table(evaluation: ImageEvaluation) -> Table:
    """The numbers of all images."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_row("images", f"{evaluation.images:,} of {evaluation.dimensions:,} bytes, all of them predicted")
    error = "" if evaluation.error is None else f" ± {evaluation.error:.4f}"
    table.add_row("bits per dimension", f"{evaluation.bits_per_dim:.4f}{error}")
    table.add_row("", f"{evaluation.constant:.4f} by the frequencies of the levels alone")
    if evaluation.occluded_bits_per_dim is not None:
        table.add_row("", f"{evaluation.occluded_bits_per_dim:.4f} of the {evaluation.occluded:,} occluded bytes")
    table.add_row("speed", f"{evaluation.images / evaluation.seconds:,.1f} images/s")
    return table


def show_progress(done: int, images: int) -> None:
    """One line that counts the images."""
    end = "\n" if done == images else ""
    sys.stderr.write(f"\rimage {done:,} of {images:,}{end}")
    sys.stderr.flush()
