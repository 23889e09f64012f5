"""Time trained models that generate images, with and without their state (`python -m benchmarks images`)."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Literal

from jsonargparse import Namespace

from benchmarks.report import described
from subquad.cli.arguments import Parser, check_output
from subquad.cli.tables import print_table, write_json
from subquad.evaluation.provenance import provenance
from subquad.generation.images import generate_images
from subquad.memory import keep_freed_memory
from subquad.training.runs import LoadedImageModel, load_image_run

REPORTED = {
    "linear": {100: 33.45, 200: 67.46, 300: 76.46},
    "softmax": {100: 367.91, 200: 811.99, 300: 1248.15},
}
"""Seconds by number of images in a report on linear attention (section 1.2.2, MNIST), without batch size or cache."""
DESCRIPTION = (
    "Time the generation of images by trained models. Models whose state grows (softmax, which keeps keys and values) "
    "are also timed without it, so that every pixel reads all earlier ones again. Each line is measured with its "
    "own number of images."
)
HEADERS = ("model", "way", "images", "seconds", "images/s", "state, bytes", "times the first")


def make_parser() -> Parser:
    """Return the command line's parser."""
    name = "python -m benchmarks images"
    parser = Parser(description=DESCRIPTION, prog=name, usage=f"{name} RUN ... [options]")
    runs = "Folders of runs with task=image; ratios are relative to the first."
    parser.add_argument("runs", type=str, nargs="+", help=runs)
    parser.add_argument("--images", type=str, default="100,200,300", help="Numbers of images, such as 100,200,300.")
    without = "Numbers of images without a state, which is slow (default: the smallest of --images; 0: none)."
    parser.add_argument("--no-cache-images", type=str | None, default=None, help=without)
    parser.add_argument("--batch_size", type=int, default=100, help="Images per batch.")
    parser.add_argument("--repeats", type=int, default=1, help="Timings per line; the table shows their median.")
    parser.add_argument("--out", type=str | None, default=None, help="JSON file to write (default: none).")
    parser.add_argument("--markdown", action="store_true", help="Print the table in Markdown.")
    device = "auto: a GPU if PyTorch finds one; cpu: never a GPU."
    parser.add_argument("--device", type=Literal["auto", "cpu"], default="auto", help=device)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, measure and print. Return the exit status."""
    parser = make_parser()
    asked = parser.parse_args(arguments)
    with parser.checking():
        counts = _counts("images", asked.images, least=1)
        given = asked.no_cache_images
        uncached = [min(counts)] if given is None else [n for n in _counts("no-cache-images", given, least=0) if n]
        for name in ("batch_size", "repeats"):
            if asked[name] < 1:
                raise ValueError(f"--{name} must be at least 1, got {asked[name]}")
        check_output("out", asked.out)
    with parser.checking():
        models = {folder: load_image_run(folder, asked.device) for folder in asked.runs}
    record = measure(models, asked, counts, uncached)
    record["command"] = shlex.join(["python", "-m", "benchmarks", "images", *arguments])
    _print(record, markdown=asked.markdown)
    if asked.out is not None:
        write_json(asked.out, record)
        sys.stdout.write(f"{asked.out}\n")
    return 0


def _counts(name: str, text: str, *, least: int) -> list[int]:
    """Parse `a,b,c` as integers of at least `least`."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} must be integers separated by commas, such as 100,200, got {text!r}") from None
    if min(counts) < least:
        raise ValueError(f"--{name} must be at least {least}, got {min(counts)}")
    return counts


def measure(
    models: dict[str, LoadedImageModel], asked: Namespace, counts: list[int], uncached: list[int]
) -> dict[str, Any]:
    """Return the rows with sizes and provenance. One image warms each model up."""
    keep_freed_memory()
    cases = []
    for folder, loaded in models.items():
        cases += [(folder, True, count) for count in counts]
        if any(block.attention.state_grows for block in loaded.model.blocks()):
            cases += [(folder, False, count) for count in uncached]
        generate_images(loaded.model, 1)
    rows: list[dict[str, Any]] = []
    for folder, cache, count in cases:
        model = models[folder].model
        name = "+".join(model.config.mechanisms)
        sys.stderr.write(f"{folder} ({name}), {'state carried' if cache else 'no state'}: {count} images ...\n")
        sizes = {"batch_size": asked.batch_size, "cache": cache}
        drawn = [generate_images(model, count, **sizes) for _ in range(asked.repeats)]
        seconds = [one.seconds for one in drawn]
        rows.append(
            {
                "run": folder,
                "attention": name,
                "cache": cache,
                "images": count,
                "seconds": statistics.median(seconds),
                "all_seconds": seconds,
                "state_bytes": drawn[0].state_bytes,
                "batch_size": drawn[0].batch_size,
            }
        )
    first = {row["images"]: row["seconds"] for row in rows if row["run"] == rows[0]["run"] and row["cache"]}
    for row in rows:
        base = first.get(row["images"])
        row["times_the_first"] = None if base is None else row["seconds"] / base
    sizes = {folder: _size(loaded) for folder, loaded in models.items()}
    return {
        "what": "images",
        "batch_size": asked.batch_size,
        "models": sizes,
        "rows": rows,
        "provenance": provenance(next(iter(models.values())).model.bias.device),
    }


def _size(loaded: LoadedImageModel) -> dict[str, Any]:
    config, parameters = loaded.model.config, loaded.model.num_parameters()
    return {"shape": list(config.shape), "layers": config.num_layers, "dim": config.dim, "parameters": parameters}


def _print(record: dict[str, Any], *, markdown: bool) -> None:
    lines, shown = [], ""
    for row in record["rows"]:
        name = f"{row['attention']} ({row['run']})"
        ratio = "-" if row["times_the_first"] is None else f"{row['times_the_first']:.2f}"
        lines.append(
            (
                name if name != shown else "",
                _way(row["attention"], row["cache"]),
                f"{row['images']:,}",
                f"{row['seconds']:.2f}",
                f"{row['images'] / row['seconds']:.2f}",
                f"{row['state_bytes']:,}" if row["cache"] else "none",
                ratio,
            )
        )
        shown = name
    counts = sorted({row["images"] for row in record["rows"]})
    for kind, seconds in REPORTED.items():
        for i, count in enumerate(n for n in counts if n in seconds):
            ratio = f"{seconds[count] / REPORTED['linear'][count]:.2f}"
            speed = f"{count / seconds[count]:.2f}"
            name = f"{kind}, published" if not i else ""
            lines.append((name, "not stated", f"{count:,}", f"{seconds[count]:.2f}", speed, "-", ratio))
    sizes = {tuple(size["shape"]): "" for size in record["models"].values()}
    shapes = ", ".join(" x ".join(map(str, shape)) for shape in sizes)
    machine = described(record["provenance"]["machine"])
    title = f"Generating images of {shapes}, {record['batch_size']} per batch, {machine}"
    print_table(title, HEADERS, lines, markdown=markdown)


def _way(attention: str, cache: bool) -> str:
    if not cache:
        return "no cache: each pixel reads the whole prefix"
    return "cache of keys and values" if attention == "full" else "state carried"
