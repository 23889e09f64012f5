"""`subquad eval`: measure a trained model on a text, sequences or images, or on tasks of lm-evaluation-harness."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from torch import Tensor

from subquad import adaptation, training
from subquad.cli.arguments import Parser, check_output, data_is_a_path
from subquad.cli.tables import class_table, image_table, position_table, progress, text_table, write_json
from subquad.data import TokenSet, TokenShard, prepare
from subquad.data.corpus import prepare_shard
from subquad.data.tokenizers import tokenizer_hash, warn_of_carriage_returns
from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation, evaluate, evaluate_images
from subquad.evaluation.classes import evaluate_classifier, fit_bag_of_tokens
from subquad.evaluation.config import EvalConfig, TextConfig
from subquad.models.image import ImageModel
from subquad.parsing import read_json_mapping
from subquad.training.config import TrainConfig
from subquad.training.tasks_classify import labelled

DEFAULT_LENGTH = 1024
"""Tokens in a window where the folder has no training configuration."""
TASK_OPTIONS = ("tasks", "task_path", "num_fewshot", "limit", "prefix_token")
TEXT_OPTIONS = ("stride", "windows", "data.path", "data.skip_bad_files", "data.cache")


def make_parser() -> Parser:
    """Return the command's options."""
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
    _add_tasks(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, measure, print, return the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(data_is_a_path(arguments))
    with parser.checking():
        names = _task_names(parsed)
        values = parser.instantiate(parsed).as_dict()
        folder = values.pop("run")
        options = EvalConfig(**{name: value for name, value in values.items() if name not in TASK_OPTIONS})
        check_output("json", options.json)
    if names is not None:
        return _ask(parser, folder, names, parsed, options)
    evaluation: Evaluation | ClassEvaluation | ImageEvaluation
    if training.runs.is_classifier(folder):
        with parser.checking():
            classifier = _load_classifier(folder, options)
        assert classifier.config is not None  # checked in _load_classifier
        evaluation = evaluate_classes(classifier.model, classifier.config, options.windows, options.batch_size)
        tables = [class_table(evaluation)]
    elif training.runs.is_image_model(folder):
        with parser.checking():
            model, images_NT = _load_images(folder, options)
        evaluation = evaluate_images(model, images_NT, batch_size=options.batch_size, progress=progress("image"))
        tables = [image_table(evaluation)]
    else:
        with parser.checking():
            loaded = training.runs.load_run(folder, options.device)
            if options.data.path is None and loaded.config is None:
                raise ValueError(f"{loaded.folder} has no config.yaml that names its text; give one by --data.path")
        evaluation = _evaluate(loaded, options)
        tables = [text_table(evaluation), position_table(evaluation)]
    if options.json is not None:
        write_json(options.json, evaluation.to_dict())
    console = Console()
    for table in tables:
        console.print(table)
    return 0


def _ask(parser: Parser, folder: str, names: list[str], chosen: Namespace, options: EvalConfig) -> int:
    """Measure on tasks, print, return the exit status."""
    with parser.checking():
        loaded = load_for_tasks(folder, options)
        from subquad.evaluation.harness import prepare_tasks

        prepared = prepare_tasks(
            loaded.model,
            loaded.tokenizer,
            names,
            task_path=chosen.task_path,
            length=loaded.length,
            num_fewshot=chosen.num_fewshot,
            limit=chosen.limit,
            batch_size=options.batch_size,
            prefix_token=chosen.prefix_token,
        )
    evaluation = prepared.measure()
    if options.json is not None:
        write_json(options.json, evaluation.to_dict())
    examples = sum(count["effective"] for count in evaluation.samples.values())
    sys.stdout.write(
        f"{evaluation.table}\n"
        f"{examples:,} examples, {evaluation.requests:,} requests in {evaluation.seconds:.1f} s, in a window of "
        f"{evaluation.config['length']:,} tokens; cut to fit: {evaluation.cut:,}\n"
    )
    return 0


def _evaluate(loaded: training.runs.LoadedRun, config: EvalConfig) -> Evaluation:
    shard = _text(loaded, config.data)
    warn_of_carriage_returns(loaded.tokenizer, shard.tokens, str(config.data.path or "the held-out text"))
    length = config.length
    if length is None:
        length = loaded.config.batch.length if loaded.config else DEFAULT_LENGTH
    documents = config.documents
    if documents is None:  # as in training
        documents = loaded.config is not None and loaded.config.data.pack == "documents"
    return evaluate(
        loaded.decoder,
        shard.tokens,
        length=length,
        stride=config.stride,
        windows=config.windows,
        batch_size=config.batch_size,
        documents=shard.documents if documents else None,
        text_bytes=shard.text_bytes,
        words=shard.words,
        decode=loaded.tokenizer.decode,
        progress=progress("window"),
    )


def _text(loaded: training.runs.LoadedRun, config: TextConfig) -> TokenShard | TokenSet:
    """Return the text that `config` names in the model's tokens, or the held-out part of the run's own."""
    if config.path is not None:
        return prepare_shard(config.path, loaded.tokenizer, skip_bad_files=config.skip_bad_files, cache=config.cache)
    return held_out_text(loaded, config.cache, "--data.path")


def held_out_text(run: training.runs.LoadedRun, cache: str | None, option: str) -> TokenShard | TokenSet:
    """Return the held-out part of the text that a run was trained on; an error names the `option` for another text."""
    if run.config is None:
        raise ValueError(f"{run.folder} has no config.yaml that names its text; give one by {option}")
    data = run.config.data
    corpus = prepare(data.replace(cache=cache or data.cache))
    if tokenizer_hash(corpus.tokenizer) != tokenizer_hash(run.tokenizer):
        raise ValueError(
            f"the text {data.path!r} is not what {run.folder} was trained on: it gives another tokenizer; "
            f"give a text by {option}"
        )
    return corpus.held_out


def _load_classifier(folder: str, options: EvalConfig) -> training.runs.LoadedClassifier:
    """Return the classifier in `folder`; `ValueError` for options of a text, and for a folder without its task."""
    texts = {"length": options.length, "stride": options.stride, "data.path": options.data.path}
    for name, value in texts.items():
        if value is not None:
            raise ValueError(f"{folder} holds a classifier: {name}={value!r} is for texts; leave it out")
    loaded = training.runs.load_classifier(folder, options.device)
    if loaded.config is None:
        raise ValueError(f"{folder} has no config.yaml that names the sequences to measure it on")
    return loaded


def evaluate_classes(model: Any, config: TrainConfig, examples: int | None, batch_size: int) -> ClassEvaluation:
    """Measure on the first `examples` test sequences of the classifier's task (None: all), beside a baseline."""
    corpus: Any = labelled(config)  # its parts have lengths, of which the type of a data set says nothing
    train, test = len(corpus.train), len(corpus.test)
    baseline = None
    if train > 1:
        baseline = fit_bag_of_tokens(corpus.train, train, vocab_size=corpus.vocab_size, classes=len(corpus.classes))
    return evaluate_classifier(
        model.model,
        corpus.test,
        test if examples is None else min(examples, test),
        corpus.classes,
        batch_size=batch_size,
        baseline=baseline,
        progress=progress("batch"),
    )


def _load_images(folder: str, options: EvalConfig) -> tuple[ImageModel, Tensor]:
    """Return the model in `folder` and the bytes of images; `ValueError` for options that only a text has."""
    data = options.data
    texts = {"length": options.length, "stride": options.stride, "data.cache": data.cache}
    for name, value in {**texts, "data.skip_bad_files": data.skip_bad_files or None}.items():
        if value is not None:
            raise ValueError(f"{folder} holds a model of images: {name}={value!r} is for texts; leave it out")
    runs = training.runs
    loaded = runs.load_image_run(folder, options.device)
    images = runs.images_for(loaded, data.path).held_out
    return loaded.model, runs.flat(runs.chosen(images, options.windows))


class Loaded(NamedTuple):
    """A model with its tokenizer, and the window that it is read in; None: what the model says of itself."""

    model: Any
    tokenizer: Any
    length: int | None


def _add_tasks(parser: ArgumentParser) -> None:
    """Add what `--tasks` takes."""
    group = parser.add_argument_group("tasks of lm-evaluation-harness (the extra `eval`) instead of a text")
    group.add_argument("--tasks", type=str | None, default=None, help="Tasks, groups and tags, as a,b,c.")
    group.add_argument(
        "--task_path",
        type=str | None,
        default=None,
        help="A folder with the YAML files of tasks of your own. They may run Python files: take none from strangers.",
    )
    group.add_argument(
        "--num_fewshot", type=int | None, default=None, help="Examples in a prompt, where the task does not set 0."
    )
    group.add_argument("--limit", type=int | None, default=None, help="Only the first so many examples of each task.")
    group.add_argument(
        "--prefix_token",
        type=int | None,
        default=None,
        help="The token that a text begins after (null: the separator of documents, or else the line break).",
    )


def _task_names(chosen: Namespace) -> list[str] | None:
    """Return the tasks, None where a text is measured; `ValueError` for arguments that do not go together."""
    if chosen.tasks is None:
        for name in TASK_OPTIONS:
            if chosen[name] is not None:
                raise ValueError(f"--{name} is for tasks: name them by --tasks")
        return None
    for name in TEXT_OPTIONS:
        if chosen[name]:
            raise ValueError(f"--{name} is for a text and does not go with --tasks")
    names = [name.strip() for name in chosen.tasks.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--tasks must name at least one task, as a,b,c, got {chosen.tasks!r}")
    return names


def load_for_tasks(folder: str, config: EvalConfig) -> Loaded:
    """Return the model in a folder, a run's or any that AutoModelForCausalLM reads, with its tokenizer."""
    if training.runs.is_classifier(folder):
        raise ValueError(f"{folder} holds a classifier: --tasks is for language models; leave it out")
    file = Path(folder) / "config.json"
    from subquad.hf import SubquadConfig

    if not file.is_file() or read_json_mapping(file).get("model_type") == SubquadConfig.model_type:
        run = training.runs.load_run(folder, config.device)
        length = run.config.batch.length if run.config else DEFAULT_LENGTH
        return Loaded(run.decoder, run.tokenizer, config.length or length)
    model, tokenizer = adaptation.adapters.open_foreign(folder, config.device)
    return Loaded(model, tokenizer, config.length)
