"""What `subquad train` does after training on images."""

from __future__ import annotations

import json
import platform
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from subquad.cli._image_eval import evaluation_table, show_progress
from subquad.data.images import ImageSet
from subquad.evaluation import evaluate_images
from subquad.generation.images import generate_images, picture_of, square
from subquad.training.checkpoint import write_atomically
from subquad.training.runs import chosen, flat

if TYPE_CHECKING:
    from subquad.training.run import RunResult

SAMPLES = "samples.png"


def finish(result: RunResult) -> None:
    """Write evaluation.json, samples.png and report.json into the run's folder and print them."""
    from subquad.hf import SubquadForImages

    options, images = result.config.image, result.corpus
    assert isinstance(result.model, SubquadForImages)
    assert isinstance(images, ImageSet)
    model = result.model.model
    sys.stderr.write("measuring on held-out images ...\n")
    evaluation = evaluate_images(
        model,
        flat(chosen(images, options.test_images)),
        batch_size=result.config.batch.size,
        progress=show_progress if sys.stderr.isatty() else None,
    )
    report = {
        "bits_per_dim": evaluation.bits_per_dim,
        "error": evaluation.error,
        "test_images": evaluation.images,
        "python": platform.python_version(),
        "parameters": result.parameters,
        "steps": result.steps,
        "train_images": result.tokens // model.config.tokens,
        "train_tokens_per_second": result.tokens_per_second,
    }
    table = evaluation_table(evaluation)
    table.add_row("parameters, steps", f"{result.parameters:,}, {result.steps:,}")
    table.add_row("training", f"{report['train_images']:,} images, {result.tokens_per_second:,.0f} bytes/s")
    if options.samples:
        sys.stderr.write(f"drawing {options.samples} images ...\n")
        drawn = generate_images(model, options.samples, seed=result.config.run.seed)
        shown = drawn.pixels_NT.view(-1, *model.config.shape).numpy()
        picture_of(square(list(shown))).save(result.folder / SAMPLES, format="PNG")
        report["generated_images_per_second"] = options.samples / drawn.seconds
        table.add_row("generation", f"{options.samples / drawn.seconds:,.2f} images/s, {drawn.batch_size} at once")
    for name, values in (("evaluation", evaluation.to_dict()), ("report", report)):
        write_atomically(result.folder / f"{name}.json", (json.dumps(values, indent=2) + "\n").encode())
    console = Console()
    console.print(table)
    kept = f", the metrics and {SAMPLES}" if options.samples else " and the metrics"
    console.print(f"{result.folder} holds the model{kept}. Go on with:", markup=False, soft_wrap=True)
    for command in (f"subquad generate {result.folder} --images 100", f"subquad complete {result.folder}"):
        console.print(f"  {command}", markup=False, soft_wrap=True)
