"""`subquad generate --images`: images that a model draws, as one picture."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.cli.arguments import Parser, check_output
from subquad.generation.config import SamplingConfig

IMAGES_HELP = "Draw so many images with a model of images, instead of going on with a text."
OUT_HELP = "The PNG file to write the images to, side by side (--images; default: RUN/images.png)."
BATCH_HELP = "Images that are drawn at once (--images)."
READ = ("run", "adapter", "device", "images", "out", "batch_size", "temperature", "seed")
"""The options that drawing images reads."""


@dataclass(frozen=True)
class Asked:
    """What is to be drawn, and where to."""

    run: str
    adapter: str | None
    device: str
    images: int
    out: Path
    batch_size: int
    temperature: float
    seed: int

    @classmethod
    def of(cls, values: dict[str, Any], parser: Parser) -> Asked:
        """From the parsed arguments; `ValueError` for those that a model of images does not read."""
        for name, value in values.items():
            if name not in READ and value != parser.get_default(name):
                raise ValueError(
                    f"--{name.replace('_', '-')} is for texts and has no effect with --images; leave it out"
                )
        for name in ("images", "batch_size"):
            if values[name] < 1:
                raise ValueError(f"--{name} must be at least 1, got {values[name]}")
        sampling = SamplingConfig(temperature=values["temperature"], seed=values["seed"])
        return cls(
            run=values["run"],
            adapter=values["adapter"],
            device=values["device"],
            images=values["images"],
            out=picture_file(values["out"], Path(values["run"]) / "images.png"),
            batch_size=values["batch_size"],
            temperature=sampling.temperature,
            seed=int.from_bytes(os.urandom(4), "little") if sampling.seed is None else sampling.seed,
        )


def refuse_with_text(values: dict[str, Any], parser: Parser) -> None:
    """Raise `ValueError` for options that only --images reads."""
    for name in ("out", "batch_size"):
        if values.pop(name) != parser.get_default(name):
            raise ValueError(f"--{name} is for --images; leave it out")
    values.pop("images")


def picture_file(asked: str | None, default: Path) -> Path:
    """Where to write a picture. Raises `ValueError` for no .png file, `FileNotFoundError` for no folder."""
    if asked is None:
        return default
    if Path(asked).suffix.lower() != ".png" or Path(asked).is_dir():
        raise ValueError(f"--out must name a .png file, got {asked!r}")
    check_output("out", asked)
    return Path(asked)


def add_arguments(parser: Parser) -> None:
    """--images and what goes with it."""
    parser.add_argument("--images", type=int | None, default=None, help=IMAGES_HELP)
    parser.add_argument("--out", type=str | None, default=None, help=OUT_HELP)
    parser.add_argument("--batch_size", type=int, default=100, help=BATCH_HELP)


def run(values: dict[str, Any], parser: Parser) -> None:
    """Draw the images, write the picture; speed and state go to standard error."""
    with parser.checking():
        asked = Asked.of(values, parser)
    from subquad.cli import _image_grid
    from subquad.generation.images import generate_images
    from subquad.memory import keep_freed_memory
    from subquad.training.runs import load_image_run

    keep_freed_memory()
    with parser.checking():
        loaded = load_image_run(asked.run, asked.device, asked.adapter)
    drawn = generate_images(
        loaded.model,
        asked.images,
        temperature=asked.temperature,
        seed=asked.seed,
        batch_size=asked.batch_size,
        progress=show_pixels if sys.stderr.isatty() else None,
    )
    images = drawn.pixels_NT.view(-1, *loaded.model.config.shape).numpy()
    _image_grid.save(_image_grid.grid(_image_grid.square(list(images))), asked.out)
    sys.stderr.write(
        f"drawn: {asked.images} images in {drawn.seconds:.2f} s ({asked.images / drawn.seconds:.2f} images/s), "
        f"{drawn.batch_size} at once, seed {asked.seed}; state: {drawn.state_bytes:,} bytes\n"
    )
    sys.stdout.write(f"{asked.out}\n")


def show_pixels(done: int, pixels: int) -> None:
    """One line that counts the pixels, in hundredths."""
    if done == pixels or done * 100 // pixels != (done - 100) * 100 // pixels:
        end = "\n" if done == pixels else ""
        sys.stderr.write(f"\r{done / pixels:4.0%} of {pixels:,} bytes{end}")
        sys.stderr.flush()
