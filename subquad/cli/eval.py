"""`subquad eval`: measure a trained model on a text, sequences or images, or on tasks of lm-evaluation-harness."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from torch import Tensor

from subquad import adaptation, training
from subquad.bars import READING, progress, waiting
from subquad.cli.arguments import RUN_HELP, Parser, check_output, data_is_a_path
from subquad.cli.decoding_options import add_precision
from subquad.cli.result_tables import class_table, image_table, position_table, text_table
from subquad.cli.threads import keep_to_idle_cores
from subquad.data import TokenSet, TokenShard, prepare
from subquad.data.corpus import prepare_shard
from subquad.data.files import write_json
from subquad.data.tokenizers import tokenizer_hash, warn_of_carriage_returns
from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation, evaluate, evaluate_images
from subquad.evaluation.config import EvalConfig
from subquad.models.image import ImageModel
from subquad.parsing import read_json_mapping
from subquad.program import install
from subquad.train_and_report import evaluate_classes

DEFAULT_LENGTH = 1024
"""Tokens per window if the folder has no training configuration."""
TASK_OPTIONS: dict[str, tuple[Any, str]] = {
    "tasks": (str, "Tasks, groups and tags, such as lambada_openai,piqa."),
    "task_path": (str, "Folder with YAML files of your own tasks, which can run Python code: use only trusted files."),
    "num_fewshot": (int, "Examples in each prompt, except for tasks that set 0. null: each task's own number."),
    "limit": (int, "Measure only this many examples of each task. null: all."),
    "prefix_token": (int, "Number of the token put before each text. null: document separator, BOS or the like."),
}
"""The type and the help of each option of tasks."""
Precision = Mapping[str, str | None]
"""`dtype` and `quantize`, the arguments of `set_precision`."""
TEXT_OPTIONS = ("stride", "windows", "data.path", "data.skip_bad_files", "data.cache")


def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "eval RUN",
        "Measure a trained model. A language model: loss, perplexity per token and per word, and bits per byte of a "
        "text, and the loss by tokens of context; every token except the first is predicted exactly once. A "
        "classifier: accuracy on test sequences. An image model: bits per dimension of held-out images. With --tasks: "
        "tasks of lm-evaluation-harness.",
    )
    parser.add_argument("run", type=str, help=f"{RUN_HELP} With --tasks also a transformers model as it is.")
    parser.add_config(EvalConfig)
    add_precision(parser)
    _add_tasks(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, measure and print; return the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(data_is_a_path(arguments))
    with parser.checking():
        names = _task_names(parsed)
        values = parser.instantiate(parsed).as_dict()
        folder = values.pop("run")
        precision = {name: values.pop(name) for name in ("dtype", "quantize")}
        options = EvalConfig(**{name: value for name, value in values.items() if name not in TASK_OPTIONS})
        check_output("json", options.json)
    keep_to_idle_cores(options.device)
    if names is not None:
        return _ask(parser, folder, names, parsed, options, precision)
    evaluation: Evaluation | ClassEvaluation | ImageEvaluation
    if training.runs.is_classifier(folder):
        with parser.checking(), waiting(READING):
            classifier = _load_classifier(folder, options, precision)
        assert classifier.config is not None  # checked in _load_classifier
        evaluation = evaluate_classes(
            classifier.model, classifier.config, options.windows, options.batch_size, console=Console(stderr=True)
        )
        tables = [class_table(evaluation)]
    elif training.runs.is_image_model(folder):
        with parser.checking(), waiting(READING):
            model, images_NT = _load_images(folder, options, precision)
        with progress("image") as shown:
            evaluation = evaluate_images(model, images_NT, batch_size=options.batch_size, progress=shown)
        tables = [image_table(evaluation)]
    else:
        with parser.checking():
            with waiting(READING):
                loaded = training.runs.load_run(folder, options.device, **precision)
            if options.data.path is None and loaded.config is None:
                raise ValueError(f"{loaded.folder} has no config.yaml that names its text; give a text by --data.path")
        evaluation = _evaluate(loaded, options)
        tables = [text_table(evaluation), position_table(evaluation)]
    if options.json is not None:
        write_json(options.json, evaluation.to_dict())
    console = Console()
    for table in tables:
        console.print(table)
    return 0


def _ask(
    parser: Parser, folder: str, names: list[str], chosen: Namespace, options: EvalConfig, precision: Precision
) -> int:
    """Measure on tasks and print; return the exit status."""
    with parser.checking():
        with waiting(READING):
            loaded = load_for_tasks(folder, options, precision)
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
        f"{evaluation.config['length']:,} tokens; truncated requests: {evaluation.cut:,}\n"
    )
    return 0


def _evaluate(loaded: training.runs.LoadedRun, config: EvalConfig) -> Evaluation:
    data = config.data
    shard = text_of(loaded, data.path, data.cache, "--data.path", skip_bad_files=data.skip_bad_files)
    warn_of_carriage_returns(loaded.tokenizer, shard.tokens, str(config.data.path or "the held-out text"))
    length = config.length
    if length is None:
        length = loaded.config.batch.length if loaded.config else DEFAULT_LENGTH
    documents = config.documents
    if documents is None:  # as in training
        documents = loaded.config is not None and loaded.config.data.pack == "documents"
    with progress("window") as shown:
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
            progress=shown,
        )


def text_of(
    run: training.runs.LoadedRun, path: str | None, cache: str | None, option: str, *, skip_bad_files: bool = False
) -> TokenShard | TokenSet:
    """Return the tokens of the text at `path`, given by `option`; None: of the held-out part of the run's own text."""
    if path is not None:
        return prepare_shard(path, run.tokenizer, skip_bad_files=skip_bad_files, cache=cache)
    if run.config is None:
        raise ValueError(f"{run.folder} has no config.yaml that names its text; give a text by {option}")
    data = run.config.data
    corpus = prepare(data.replace(cache=cache or data.cache))
    if tokenizer_hash(corpus.tokenizer) != tokenizer_hash(run.tokenizer):
        raise ValueError(
            f"the text {data.path!r} has changed since {run.folder} was trained on it: it gives another tokenizer; "
            f"give a text by {option}"
        )
    return corpus.held_out


def _load_classifier(folder: str, options: EvalConfig, precision: Precision) -> training.runs.LoadedClassifier:
    """Return the classifier in `folder`; `ValueError` for options of texts and for a folder without config.yaml."""
    _refuse(folder, "a classifier", options, precision, {"data.path": options.data.path})
    loaded = training.runs.load_classifier(folder, options.device)
    if loaded.config is None:
        raise ValueError(f"{folder} has no config.yaml that names its test sequences")
    return loaded


def _load_images(folder: str, options: EvalConfig, precision: Precision) -> tuple[ImageModel, Tensor]:
    """Return the model in `folder` and images as bytes `[N, T]`; `ValueError` for options of texts."""
    data = options.data
    more = {"data.cache": data.cache, "data.skip_bad_files": data.skip_bad_files or None}
    _refuse(folder, "an image model", options, precision, more)
    runs = training.runs
    loaded = runs.load_image_run(folder, options.device)
    images = runs.images_for(loaded, data.path).held_out
    return loaded.model, runs.chosen(images, options.windows).flat


def _refuse(folder: str, held: str, options: EvalConfig, precision: Precision, more: Mapping[str, Any]) -> None:
    """Raise `ValueError` for options of texts with a model of another kind, which `folder` holds."""
    for name, value in {"length": options.length, "stride": options.stride, **precision, **more}.items():
        if value is not None:
            raise ValueError(f"{folder} holds {held}: {name}={value!r} is for texts; leave it out")


class Loaded(NamedTuple):
    """A model with its tokenizer and window in tokens (None: the model's own limit)."""

    model: Any
    tokenizer: Any
    length: int | None


def _add_tasks(parser: ArgumentParser) -> None:
    """Add the options of tasks."""
    group = parser.add_argument_group("tasks of lm-evaluation-harness instead of a text: " + install("subquad[eval]"))
    for name, (kind, text) in TASK_OPTIONS.items():
        group.add_argument(f"--{name}", type=kind | None, default=None, help=text)


def _task_names(chosen: Namespace) -> list[str] | None:
    """Return the tasks, or None to measure a text; `ValueError` for arguments that can't be combined."""
    if chosen.tasks is None:
        for name in TASK_OPTIONS:
            if chosen[name] is not None:
                raise ValueError(f"--{name} is for tasks: name them with --tasks")
        return None
    for name in TEXT_OPTIONS:
        if chosen[name]:
            raise ValueError(f"--{name} is for a text and can't be combined with --tasks")
    names = [name.strip() for name in chosen.tasks.split(",") if name.strip()]
    if not names:
        raise ValueError(f"--tasks must name at least one task, such as a,b,c, got {chosen.tasks!r}")
    return names


def load_for_tasks(folder: str, config: EvalConfig, precision: Precision) -> Loaded:
    """Load the model and tokenizer of a run or of any folder that AutoModelForCausalLM reads."""
    if training.runs.is_classifier(folder):
        raise ValueError(f"{folder} holds a classifier: --tasks is for language models; leave it out")
    file = Path(folder) / "config.json"
    from subquad.hf import SubquadConfig

    if not file.is_file() or read_json_mapping(file).get("model_type") == SubquadConfig.model_type:
        run = training.runs.load_run(folder, config.device, **precision)
        length = run.config.batch.length if run.config else DEFAULT_LENGTH
        return Loaded(run.decoder, run.tokenizer, config.length or length)
    for name, value in precision.items():
        if value is not None:
            raise ValueError(f"{folder} holds a transformers model: {name}={value!r} is for subquad's; leave it out")
    model, tokenizer = adaptation.adapters.open_foreign(folder, config.device)
    return Loaded(model, tokenizer, config.length)
