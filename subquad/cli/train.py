"""`subquad train`: train a model, evaluate it on held-out data and report."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from subquad import training
from subquad.cli.arguments import FILES, Parser, data_is_a_path, files_first
from subquad.cli.result_tables import class_table, facts, image_table, text_table
from subquad.cli.threads import with_threads
from subquad.config import check_positive
from subquad.data.sources import text_size
from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation
from subquad.program import command
from subquad.recipes.automatic import automatic
from subquad.train_and_report import PICTURE, ProbeEvaluation, RunReport, train_and_report
from subquad.training.config import TrainConfig
from subquad.training.processes import check_parallel, first_process
from subquad.training.report import Report
from subquad.training.task import CONFIG
from subquad.training.tasks import TASKS, check

logger = logging.getLogger(__name__)
NEEDED = (
    "data.path", "run.folder", "run.minutes", "run.seed", "model.attention", "model.dim", "model.num_layers",
    "batch.length", "optimizer.lr", "recipe",
)  # fmt: skip
"""Options that most people need; the help begins with them."""


def run(arguments: Sequence[str]) -> int:
    """Parse and train; return the exit status, 130 after an interruption."""
    parser = make_parser()
    config = _read(parser, arguments)
    with parser.checking():
        TASKS[config.task].check_source(config)
        check(config)
        check_parallel(config)
    config = config.replace(run=with_threads(config.run))
    made = train_and_report(config, console=Console(stderr=True))
    result = made.run
    if not first_process():
        return 0
    if result.interrupted:
        whole = "" if result.config.run.steps is None else f" of {result.config.run.steps}"
        sys.stderr.write(f"stopped after step {result.steps}{whole}; resume with:\n  {result.command}\n")
        return 130
    PRINTERS[result.config.task](made)
    return 0


@cache  # takes 0.2 s to make
def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "train",
        "Train a model, evaluate it on held-out data and report. --task language (the default): a language model, with "
        "samples. classify: a classifier of sequences. pretrain: an encoder for a classifier. image: an image model. "
        "probe: a model of a recall task. To resume an interrupted run, repeat the command. To train on N processes: "
        "torchrun --nproc_per_node N -m subquad train ...",
    )
    parser.add_files()
    parser.add_config(TrainConfig)
    parser.begin_with(command("train", "--data.path", "my_text.txt"), "options that most people need", NEEDED)
    return parser


def read_config(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration from `--recipe`, `--config` and options; exit with status 2 if they are wrong."""
    return _read(make_parser(), arguments)


def _read(parser: Parser, arguments: Sequence[str]) -> TrainConfig:
    arguments = files_first(data_is_a_path(arguments))
    given = {argument.partition("=")[0] for argument in arguments}
    if "--run.minutes" in given and "--run.steps" not in given:
        arguments = [*arguments, "--run.steps=null"]  # the user's minutes, not a recipe's steps
    if not given.intersection(FILES):
        arguments = [*_base(parser, arguments), *arguments]
    parsed = parser.parse_args(arguments)
    steps, warmup = parsed.run.steps, parsed.schedule.warmup
    if "--run.steps" in given and "--schedule.warmup" not in given and 0 < (steps or 0) <= (warmup or 0):
        parsed.schedule.warmup = steps // 10  # the user's steps, a recipe's warm-up
    with parser.checking():
        return parser.made(TrainConfig, parsed)


def _base(parser: Parser, arguments: Sequence[str]) -> list[str]:
    """Return what options without `--recipe` and `--config` come after: the run's own configuration, or a recipe."""
    parsed = parser.parse_args([word for word in arguments if not word.startswith("--print_config")])
    if parsed.task != "language" or parsed.lora.rank:
        return []
    kept = Path(parsed.run.folder) / CONFIG
    if kept.is_file() and parsed.run.resume != "never":
        return ["--config", str(kept)]
    with parser.checking():
        check_positive("run.", minutes=parsed.run.minutes)
        TASKS[parsed.task].check_source(parsed)
        size = text_size(parsed.data.path)
    minutes, names = parsed.run.minutes, parsed.model.attention
    count = 1 if isinstance(names, str) else max(1, len(names))
    settings = automatic(max(1, size), minutes, layers=count * max(1, round(3 / count)))
    if parsed.data.pack != "stream":
        settings["run"]["weights"] = "last"
    logger.info("a recipe for %.1f MB of text and %g minutes: run.folder keeps it in config.yaml", size / 1e6, minutes)
    return list(_options("-", settings))


def _options(name: str, value: Any) -> Iterator[str]:
    """Yield the settings below `name` as options."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _options(f"{name}{'.' if name != '-' else '-'}{key}", below)
    else:
        yield f"{name}={json.dumps(value) if not isinstance(value, str) else value}"


def _print_language(made: RunReport) -> None:
    """Print samples, tables, and how to continue a text."""
    result, console = made.run, Console()
    assert made.samples is not None
    sys.stdout.write(made.samples)
    if made.evaluation is None:
        length = result.config.batch.length
        best = "" if result.best_loss is None else f" The lowest held-out loss in training was {result.best_loss:.4f}."
        console.print(
            f"No evaluation.json: {result.config.parallel.context} processes shared a window of {length} tokens, which "
            f"may be too long for one.{best} Measure it with enough memory, or with a smaller --length:",
            markup=False,
        )
        console.print(f"  {command('eval', result.folder, '--length', length)}", markup=False, soft_wrap=True)
    else:
        assert isinstance(made.evaluation, Evaluation)
        console.print(text_table(made.evaluation))
        if isinstance(made.report, Report):
            console.print(made.report.table())
        else:
            console.print("No report.json: token shards don't keep the text, which it compares with compressors.")
    console.print(f"{result.folder} holds the model, the metrics and the samples. Continue a text with:", markup=False)
    console.print(f"  {command('generate', result.folder, '--prompt', made.prompt)}", markup=False, soft_wrap=True)


def _print_classify(made: RunReport) -> None:
    """Print accuracy and baselines."""
    assert isinstance(made.evaluation, ClassEvaluation)
    table = class_table(made.evaluation)
    _add_training(table, made.run, f"{made.run.tokens_per_second:,.0f} tokens/s, padding included")
    _print(table, f"{made.run.folder} holds the model and the metrics.")


def _print_pretrain(made: RunReport) -> None:
    """Print the loss on held-out training sequences and the folder of the encoder."""
    result = made.run
    table = facts(("learned", "hidden tokens" if result.config.pretrain.kind == "denoise" else "the next token"))
    if result.best_loss is not None:
        table.add_row("lowest loss", f"{result.best_loss:.4f} nats per predicted token, at step {result.best_step:,}")
    _add_training(table, result, f"{result.tokens_per_second:,.0f} tokens/s, padding included")
    _print(table, f"{result.folder} holds the encoder and the metrics.")


def _print_images(made: RunReport) -> None:
    """Print bits per dimension and the speed of drawing."""
    result, drawn, report = made.run, made.images, made.report
    assert isinstance(made.evaluation, ImageEvaluation)
    assert isinstance(report, dict)
    table = image_table(made.evaluation)
    _add_training(table, result, f"{report['train_images']:,} images, {result.tokens_per_second:,.0f} bytes/s")
    if drawn is not None:
        speed = f"{len(drawn.pixels_NT) / drawn.seconds:,.2f} images/s"
        table.add_row("generation", f"{speed}, {drawn.batch_size} at once")
    kept = f", the metrics and {PICTURE}" if drawn is not None else " and the metrics"
    commands = command("generate", result.folder, "--images", 100), command("complete", result.folder)
    _print(table, f"{result.folder} holds the model{kept}. Next:", *commands)


def _print_probe(made: RunReport) -> None:
    """Print the accuracy beside chance."""
    result, found = made.run, made.evaluation
    assert isinstance(found, ProbeEvaluation)
    table = facts(
        ("held-out sequences", f"{found.sequences:,} of {found.length:,} tokens, {found.asked:,} tokens asked"),
        ("accuracy", f"{found.accuracy:.2%} ± {found.error:.2%}"),
        ("", f"{found.chance:.2%} by chance"),
    )
    _add_training(table, result, f"{result.tokens_per_second:,.0f} tokens/s")
    text = f"{result.folder} holds the model and the metrics. Probe it further with:"
    _print(table, text, command("probe", result.folder))


PRINTERS: dict[str, Callable[[RunReport], None]] = {
    "language": _print_language,
    "classify": _print_classify,
    "pretrain": _print_pretrain,
    "image": _print_images,
    "probe": _print_probe,
}


def _add_training(table: Table, result: training.RunResult, speed: str) -> None:
    """Add the number of parameters and steps, and the speed."""
    table.add_row("parameters, steps", f"{result.parameters:,}, {result.steps:,}")
    table.add_row("training", speed)


def _print(table: Table, text: str, *commands: str) -> None:
    """Print a table, a text and indented commands."""
    console = Console()
    console.print(table)
    for line in (text, *(f"  {each}" for each in commands)):
        console.print(line, markup=False, soft_wrap=True)
