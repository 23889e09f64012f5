"""`subquad train`: train a model, evaluate it on held-out data and report."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad import training
from subquad.cli.arguments import FILES, Parser, data_is_a_path, files_first
from subquad.cli.finishing import finish
from subquad.cli.threads import with_threads
from subquad.config import check_positive
from subquad.data.sources import text_size
from subquad.program import command
from subquad.recipes.automatic import automatic
from subquad.training.config import TrainConfig
from subquad.training.processes import check_parallel, leave
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
    result = training.train(config, console=Console(stderr=True))
    leave()
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    if result.interrupted:
        whole = "" if result.config.run.steps is None else f" of {result.config.run.steps}"
        sys.stderr.write(f"stopped after step {result.steps}{whole}; resume with:\n  {result.command}\n")
        return 130
    finish(result)
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
    if "--run.steps" in given and "--schedule.warmup" not in given and steps and warmup and warmup >= steps:
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
