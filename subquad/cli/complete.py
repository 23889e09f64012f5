"""`subquad complete`: what a model of images makes of the occluded part of images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace

from subquad.cli._generate_images import picture_file, show_pixels
from subquad.cli.arguments import Parser, check_output
from subquad.generation.config import SamplingConfig

DESCRIPTION = (
    "Occlude a part of images and let a trained model of images draw it. Writes a picture (original, occluded, "
    "completions) and prints bits per dimension, time, and what a small fixed classifier reads. The model draws row by "
    "row: an occluded pixel follows from the true and drawn ones before it. Given pixels that come after it, as all "
    "below `top`, have no part in it: such parts can only be drawn without seeing what comes later."
)
OCCLUDE_HELP = (
    "bottom:0.5, top:0.5, left:0.5, right:0.5 (of the rows or columns), center:0.5 (of both), random:0.5 (of the "
    "pixels), or a mask file: PNG, white where occluded, or .npy of booleans."
)
PATH_HELP = "Other images than the held-out ones of the run: as image.path, or PNG files."


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser("complete RUN", DESCRIPTION)
    parser.add_argument("run", type=str, help="The folder of a run with task=image, or one of its checkpoints.")
    parser.add_argument("--occlude", type=str, default="bottom:0.5", help=OCCLUDE_HELP)
    parser.add_argument("--images", type=int, default=100, help="Images to complete, evenly spread over all.")
    parser.add_argument("--samples", type=int, default=1, help="Completions of each image.")
    parser.add_argument("--show", type=int, default=8, help="Images in the picture, of those that are completed.")
    parser.add_argument("--path", type=str | None, default=None, help=PATH_HELP)
    parser.add_argument(
        "--out", type=str | None, default=None, help="The PNG file to write (default: RUN/completions.png)."
    )
    parser.add_argument("--json", type=str | None, default=None, help="File to write the numbers to.")
    parser.add_argument("--temperature", type=float, default=1.0, help="Divides the logarithms of probabilities.")
    parser.add_argument("--seed", type=int, default=0, help="Of what is drawn, and of --occlude random.")
    parser.add_argument("--batch_size", type=int, default=100, help="Images that are completed at once.")
    parser.add_argument(
        "--device", type=Literal["auto", "cpu"], default="auto", help="auto: a GPU where PyTorch finds one; cpu: never."
    )
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, complete, print, return the exit status."""
    parser = make_parser()
    asked = parser.parse_args(arguments)
    with parser.checking():
        out = _check(asked)
    from subquad.cli import _completions

    with parser.checking():
        subject = _completions.prepare(asked)
    found = _completions.complete(subject, asked, progress=show_pixels if sys.stderr.isatty() else None)
    _completions.picture(found, asked.show, out)
    _completions.show(found)
    if asked.json is not None:
        _completions.write(found, asked.json)
    sys.stdout.write(f"{out}\n")
    return 0


def _check(asked: Namespace) -> Path:
    """Raise `ValueError` for numbers that make no sense; where the picture goes."""
    for name in ("images", "samples", "show", "batch_size"):
        if asked[name] < 1:
            raise ValueError(f"--{name} must be at least 1, got {asked[name]}")
    if asked.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {asked.seed}")
    SamplingConfig(temperature=asked.temperature, seed=asked.seed)
    check_output("json", asked.json)
    return picture_file(asked.out, Path(asked.run) / "completions.png")
