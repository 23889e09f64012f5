"""`subquad train`: train, evaluate on the held-out text, sample, report."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from rich.console import Console

from subquad import training
from subquad.cli.arguments import Parser, data_is_a_path, files_first
from subquad.cli.finishing import finish
from subquad.config import read_mapping
from subquad.memory import free_threads
from subquad.training.config import TrainConfig
from subquad.training.processes import check_parallel, leave, trains_on_cpu, world_size
from subquad.training.tasks import TASKS, check

logger = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> int:
    """Parse, train, return the exit status: 130 after an interruption."""
    parser = make_parser()
    config = _read(parser, arguments)
    with parser.checking():
        TASKS[config.task].check_source(config)
        check(config)
        check_parallel(config)
    result = training.train(with_threads(config), console=Console(stderr=True))
    leave()
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    if result.interrupted:
        sys.stderr.write(f"stopped after step {result.steps} of {config.run.steps}; go on with:\n  {result.command}\n")
        return 130
    finish(result)
    return 0


def with_threads(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the number of threads that the run keeps to, so that going on repeats its bits.

    The number that the run's folder names; of a new run PyTorch's own, less the cores that other processes keep busy.
    Nothing changes where `run.threads` is given, on a GPU, and in one of several processes.
    """
    run = config.run
    if run.threads is not None or world_size() > 1 or not trains_on_cpu(config):
        return config
    kept = Path(run.folder) / "config.yaml"
    if kept.is_file():
        settings = read_mapping(kept).get("run")
        threads = settings.get("threads") if isinstance(settings, dict) else None
    else:
        threads = free_threads()
        if threads < torch.get_num_threads():
            logger.warning("run.threads is %d: other processes keep the other cores busy", threads)
    return config.replace(run=run.replace(threads=threads))


@cache  # making one takes 0.2 s
def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "train",
        "Train a language model, evaluate it on held-out text, sample it, and report; or, with --task classify, train "
        "a classifier, with --task probe a model that remembers, and report its accuracy, with --task image a model of "
        "images, and report its bits per dimension. An interrupted run goes on when the same command is given again. "
        "torchrun --nproc_per_node N -m subquad train ... trains by N processes.",
    )
    parser.add_files()
    parser.add_config(TrainConfig)
    return parser


def read_config(arguments: Sequence[str]) -> TrainConfig:
    """Return the configuration from `--recipe`, `--config` and flags; wrong ones exit with status 2."""
    return _read(make_parser(), arguments)


def _read(parser: Parser, arguments: Sequence[str]) -> TrainConfig:
    parsed = parser.parse_args(files_first(data_is_a_path(arguments)))
    with parser.checking():
        return parser.made(TrainConfig, parsed)
