"""`subquad train`: train, evaluate on the held-out text, sample, report."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from subquad.cli.arguments import Parser, data_is_a_path, files_first
from subquad.config import read_mapping
from subquad.generation.sampling import SamplingConfig
from subquad.memory import free_threads, keep_freed_memory
from subquad.training.config import TrainConfig
from subquad.training.processes import check_parallel, leave, trains_on_cpu, world_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from subquad.data import Corpus
    from subquad.training.run import RunResult

logger = logging.getLogger(__name__)
SAMPLES = 3
"""Samples at the end of a run: the first is greedy."""
FINISH = {
    "classify": "subquad.cli.classify",
    "image": "subquad.cli._image_training",
    "pretrain": "subquad.cli._pretraining",
    "probe": "subquad.cli._probe_training",
}
"""The module of each other task: its `finish(result)` measures, prints and keeps what it has measured."""


def run(arguments: Sequence[str]) -> int:
    """Parse, train, return the exit status: 130 after an interruption."""
    parser = make_parser()
    config = _read(parser, arguments)
    from subquad.training import train
    from subquad.training.tasks import TASKS, check

    with parser.checking():
        TASKS[config.task].check_source(config)
        check(config)
        check_parallel(config)
    keep_freed_memory()
    result = train(with_threads(config), console=Console(stderr=True))
    leave()
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    if result.interrupted:
        sys.stderr.write(f"stopped after step {result.steps} of {config.run.steps}; go on with:\n  {result.command}\n")
        return 130
    module = FINISH.get(result.config.task)
    finish = _finish if module is None else importlib.import_module(module).finish
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
    """The command's options."""
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
    """The configuration from `--recipe`, `--config` and flags; wrong ones exit with status 2."""
    return _read(make_parser(), arguments)


def _read(parser: Parser, arguments: Sequence[str]) -> TrainConfig:
    parsed = parser.parse_args(files_first(data_is_a_path(arguments)))
    with parser.checking():
        values = parser.instantiate(parsed)
        return TrainConfig(**{field.name: values[field.name] for field in fields(TrainConfig)})


def _finish(result: RunResult) -> None:
    """Write evaluation.json, samples.txt and report.json into the run's folder and print them."""
    from subquad.cli.eval import evaluation_table, show_progress
    from subquad.data import Corpus, TokenShard
    from subquad.evaluation import evaluate
    from subquad.training.report import measure, write_report

    corpus = result.corpus
    assert isinstance(corpus, Corpus)
    if result.config.parallel.context > 1:
        _finish_shared(result, corpus)
        return
    decoder, held_out = result.model.model, corpus.held_out
    sys.stderr.write("evaluating on the held-out text ...\n")
    packed = result.config.data.pack == "documents"
    evaluation = evaluate(
        decoder,
        held_out.tokens,
        length=result.config.batch.length,
        documents=held_out.documents if packed else None,
        text_bytes=held_out.text_bytes,
        words=held_out.words,
        progress=show_progress if sys.stderr.isatty() else None,
    )
    (result.folder / "evaluation.json").write_text(json.dumps(evaluation.to_dict(), indent=2) + "\n", encoding="utf-8")
    samples = _samples(result, corpus.tokenizer)
    (result.folder / "samples.txt").write_text(samples, encoding="utf-8")
    console = Console()
    sys.stdout.write(samples)
    console.print(evaluation_table(evaluation))
    if isinstance(held_out, TokenShard):
        assert evaluation.bits_per_byte is not None  # a shard knows its bytes
        report = measure(
            decoder,
            corpus.held_out_text(),
            held_out.tokens.tolist(),
            bits_per_byte=evaluation.bits_per_byte,
            files_hash=corpus.fingerprint[:16],
            steps=result.steps,
            train_tokens_per_second=result.tokens_per_second or _last_speed(result.folder),
            skipped=result.skipped,
        )
        write_report(report, result.folder)
        console.print(report.table())
    else:
        console.print("A set of token shards keeps no text to compress beside the model: no report.json is written.")
    _say_how_to_go_on(result, console)


def _finish_shared(result: RunResult, corpus: Corpus) -> None:
    """Write samples.txt alone: windows that processes shared may be too long for this one."""
    samples = _samples(result, corpus.tokenizer)
    (result.folder / "samples.txt").write_text(samples, encoding="utf-8")
    sys.stdout.write(samples)
    console, length = Console(), result.config.batch.length
    best = "" if result.best_loss is None else f" The lowest held-out loss of the training was {result.best_loss:.4f}."
    console.print(
        f"A window of {length} tokens was shared by {result.config.parallel.context} processes and may be too long for "
        f"one: no evaluation.json is written.{best} Where there is room, or with fewer tokens at a time, measure with:",
        markup=False,
    )
    console.print(f"  subquad eval {shlex.quote(str(result.folder))} --length {length}", markup=False, soft_wrap=True)
    _say_how_to_go_on(result, console)


def _say_how_to_go_on(result: RunResult, console: Console) -> None:
    console.print(f"{result.folder} holds the model, the metrics and the samples. Go on writing with:", markup=False)
    command = shlex.join(["subquad", "generate", str(result.folder), "--prompt", result.config.run.prompt])
    console.print(f"  {command}", markup=False, soft_wrap=True)


def _last_speed(folder: Path) -> float:
    """Trained tokens a second in the process that trained last, for a run that had ended already."""
    from subquad.training.progress import read_metrics

    speeds = [record["tokens_per_s"] for record in read_metrics(folder) if "tokens_per_s" in record]
    return speeds[-1] if speeds else 0.0


def _samples(result: RunResult, tokenizer: Tokenizer) -> str:
    """Samples of the run's prompt, each under a line that says how it was drawn."""
    from subquad.data.tokenizers import encode_text
    from subquad.generation import Generation

    options = result.config.run
    prompt = encode_text(tokenizer, options.prompt)
    count, model = options.sample_tokens, result.config.model
    if model.position == "learned" and len(prompt) + count - 1 > model.max_positions:
        prompt = prompt[-model.max_positions :]
        count = model.max_positions - len(prompt) + 1
        logger.warning("samples have %d tokens: the table of positions has %d rows", count, model.max_positions)
    most = result.model.model.most_new_tokens(len(prompt))
    if most is not None and most < count:
        logger.warning("samples have %d tokens: decode=frozen has no latents for more", most)
        count = most
    texts = []
    for number in range(SAMPLES):
        temperature = options.sample_temperature if number else 0.0
        sampling = SamplingConfig(max_tokens=count, temperature=temperature, seed=number)
        tokens = list(Generation(result.model.model, prompt, sampling))
        how = f"temperature {temperature}, seed {number}" if number else "greedy"
        texts.append(f"--- {how}\n{tokenizer.decode(prompt + tokens)}\n")
    return "\n".join(texts)
