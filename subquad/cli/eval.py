"""`subquad eval`: measure a trained model on a text, or on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from subquad.cli import _eval_tasks
from subquad.cli.arguments import Parser, check_output, data_is_a_path
from subquad.evaluation.config import EvalConfig, TextConfig

if TYPE_CHECKING:
    from subquad.data import TokenSet, TokenShard
    from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation
    from subquad.evaluation.harness import TaskEvaluation
    from subquad.training.runs import LoadedRun

DEFAULT_LENGTH = 1024
"""Tokens in a window where the folder has no training configuration."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "eval RUN",
        "Measure a trained model on a text: loss, perplexity per token and per word, bits per byte, also by position "
        "in the context. Every token but the first is predicted exactly once. Of a classifier: the accuracy on the "
        "held-out sequences of its task. Of a model of images: bits per dimension of held-out ones, of as "
        "many as --windows says. With --tasks: what lm-evaluation-harness measures.",
    )
    parser.add_argument(
        "run", type=str, help="The folder of a run, or another that transformers' from_pretrained reads."
    )
    parser.add_config(EvalConfig)
    _eval_tasks.add_arguments(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, measure, print, return the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(data_is_a_path(arguments))
    with parser.checking():
        names = _eval_tasks.check(parsed)
        values = parser.instantiate(parsed).as_dict()
        folder = values.pop("run")
        options = EvalConfig(**{name: value for name, value in values.items() if name not in _eval_tasks.NAMES})
        check_output("json", options.json)
    if names is not None:
        return _ask(parser, folder, names, parsed, options)
    from subquad.training.runs import is_classifier, is_image_model

    evaluation: Evaluation | ClassEvaluation | ImageEvaluation
    tables: list[Table]
    if is_classifier(folder):
        from subquad.cli import classify

        with parser.checking():
            classifier = classify.load(folder, options)
        evaluation = classify.evaluate_run(classifier, options)
        tables = [classify.evaluation_table(evaluation)]
    elif is_image_model(folder):
        from subquad.cli import _image_eval

        with parser.checking():
            images = _image_eval.load(folder, options)
        evaluation = _image_eval.evaluate_run(*images, options.batch_size)
        tables = [_image_eval.evaluation_table(evaluation)]
    else:
        with parser.checking():
            loaded = _load(folder, options)
        evaluation = _evaluate(loaded, options)
        tables = [evaluation_table(evaluation), position_table(evaluation)]
    _write(evaluation, options.json)
    console = Console()
    for table in tables:
        console.print(table)
    return 0


def _write(evaluation: Evaluation | ClassEvaluation | ImageEvaluation | TaskEvaluation, file: str | None) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(evaluation.to_dict(), indent=2) + "\n", encoding="utf-8")


def _ask(parser: Parser, folder: str, names: list[str], chosen: Namespace, options: EvalConfig) -> int:
    """Measure on tasks, print, return the exit status."""
    with parser.checking():
        loaded = _eval_tasks.load(folder, options, DEFAULT_LENGTH)
        prepared = _eval_tasks.prepare(loaded, names, chosen, options.batch_size)
    evaluation = prepared.measure()
    _write(evaluation, options.json)
    sys.stdout.write(_eval_tasks.report(evaluation))
    return 0


def _load(folder: str, config: EvalConfig) -> LoadedRun:
    """The run; `ValueError` where neither its folder nor `config` names a text."""
    from subquad.training.runs import load_run

    loaded = load_run(folder, config.device)
    if config.data.path is None and loaded.config is None:
        raise ValueError(f"{loaded.folder} has no config.yaml that names its text; give one by --data.path")
    return loaded


def _evaluate(loaded: LoadedRun, config: EvalConfig) -> Evaluation:
    from subquad.evaluation import evaluate

    shard = _text(loaded, config.data)
    length = config.length
    if length is None:
        length = loaded.config.batch.length if loaded.config else DEFAULT_LENGTH
    return evaluate(
        loaded.decoder,
        shard.tokens,
        length=length,
        stride=config.stride,
        windows=config.windows,
        batch_size=config.batch_size,
        documents=shard.documents if _packed(loaded, config) else None,
        text_bytes=shard.text_bytes,
        words=shard.words,
        decode=loaded.tokenizer.decode,
        progress=show_progress if sys.stderr.isatty() else None,
    )


def _packed(loaded: LoadedRun, config: EvalConfig) -> bool:
    """Whether each document is read from its start: as in training, unless the options say something else."""
    if config.documents is None:
        return loaded.config is not None and loaded.config.data.pack == "documents"
    return config.documents


def _text(loaded: LoadedRun, config: TextConfig) -> TokenShard | TokenSet:
    """The text that `config` names in the model's tokens, or the held-out part of the run's own."""
    from subquad.data import prepare
    from subquad.data.corpus import prepare_shard
    from subquad.data.tokenizers import tokenizer_hash

    if config.path is not None:
        return prepare_shard(config.path, loaded.tokenizer, skip_bad_files=config.skip_bad_files, cache=config.cache)
    assert loaded.config is not None  # checked in _load
    data = loaded.config.data
    corpus = prepare(data.replace(cache=config.cache or data.cache))
    if tokenizer_hash(corpus.tokenizer) != tokenizer_hash(loaded.tokenizer):
        raise ValueError(
            f"the text {data.path!r} is not what {loaded.folder} was trained on: it gives another tokenizer; "
            "give a text by --data.path"
        )
    return corpus.held_out


def evaluation_table(evaluation: Evaluation) -> Table:
    """The numbers of the whole text."""
    overlap = "" if evaluation.stride == evaluation.length else f", stride {evaluation.stride:,}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_row("tokens predicted", f"{evaluation.tokens:,} in windows of {evaluation.length:,}{overlap}")
    table.add_row("loss", f"{evaluation.loss:.4f} nats a token")
    table.add_row("perplexity", f"{evaluation.perplexity:,.2f} a token")
    if evaluation.word_perplexity is not None:
        form = ",.2f" if evaluation.word_perplexity < 1e6 else ".3g"
        table.add_row("", f"{evaluation.word_perplexity:{form}} a whitespace word")
    if evaluation.bits_per_byte is not None:
        table.add_row("bits per byte", f"{evaluation.bits_per_byte:.4f}")
    table.add_row("speed", f"{evaluation.tokens / evaluation.seconds:,.0f} tokens/s")
    return table


def position_table(evaluation: Evaluation) -> Table:
    """The loss by tokens of context."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("tokens of context", "tokens", "loss, nats"):
        table.add_column(header, justify="right")
    for part in evaluation.by_position:
        last = part.stop - 1
        context = f"{part.start:,}" if part.start == last else f"{part.start:,} to {last:,}"
        table.add_row(context, f"{part.tokens:,}", f"{part.loss:.4f}")
    return table


def show_progress(done: int, windows: int) -> None:
    """One line that counts the windows."""
    end = "\n" if done == windows else ""
    sys.stderr.write(f"\rwindow {done:,} of {windows:,}{end}")
    sys.stderr.flush()
