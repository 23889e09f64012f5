"""`subquad train`: train a model, evaluate it on held-out data and report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache

from rich.console import Console

from subquad import training
from subquad.cli.arguments import Parser, data_is_a_path, files_first
from subquad.cli.finishing import finish
from subquad.cli.threads import with_threads
from subquad.training.config import TrainConfig
from subquad.training.processes import check_parallel, leave
from subquad.training.tasks import TASKS, check


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
        sys.stderr.write(f"stopped after step {result.steps} of {config.run.steps}; resume with:\n  {result.command}\n")
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
    return parser


def read_config(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration from `--recipe`, `--config` and options; exit with status 2 if they are wrong."""
    return _read(make_parser(), arguments)


def _read(parser: Parser, arguments: Sequence[str]) -> TrainConfig:
    parsed = parser.parse_args(files_first(data_is_a_path(arguments)))
    with parser.checking():
        return parser.made(TrainConfig, parsed)
