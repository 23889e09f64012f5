"""What `subquad train` and `subquad eval` do with classifiers."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from subquad.evaluation import ClassEvaluation, EvalConfig
    from subquad.hf import SubquadForSequenceClassification
    from subquad.training import TrainConfig
    from subquad.training.run import RunResult
    from subquad.training.runs import LoadedClassifier


def load(folder: str, options: EvalConfig) -> LoadedClassifier:
    """The classifier in `folder`.

    Raises `ValueError` for options that only a text has, and for a folder that does not say what its task was.
    """
    from subquad.training.runs import load_classifier

    texts = {"length": options.length, "stride": options.stride, "data.path": options.data.path}
    for name, value in texts.items():
        if value is not None:
            raise ValueError(f"{folder} holds a classifier: {name}={value!r} is for texts; leave it out")
    loaded = load_classifier(folder, options.device)
    if loaded.config is None:
        raise ValueError(f"{folder} has no config.yaml that names the sequences to measure it on")
    return loaded


def evaluate_run(loaded: LoadedClassifier, options: EvalConfig) -> ClassEvaluation:
    """Measure on the test sequences of the classifier's task, on the first `options.windows` of them."""
    assert loaded.config is not None  # checked in load
    return _evaluate(loaded.model, loaded.config, options.windows, options.batch_size)


def finish(result: RunResult) -> None:
    """Write evaluation.json and report.json into the run's folder and print them."""
    from subquad.hf import SubquadForSequenceClassification
    from subquad.training.checkpoint import write_atomically

    sys.stderr.write("evaluating on the test sequences ...\n")
    assert isinstance(result.model, SubquadForSequenceClassification)
    evaluation = _evaluate(result.model, result.config, None, result.config.batch.size)
    report = {
        "accuracy": evaluation.accuracy,
        "constant": evaluation.constant,
        "bag_of_tokens": evaluation.bag_of_tokens,
        "examples": evaluation.examples,
        "python": platform.python_version(),
        "parameters": result.parameters,
        "steps": result.steps,
        "train_tokens_per_second": result.tokens_per_second,
    }
    for name, values in (("evaluation", evaluation.to_dict()), ("report", report)):
        write_atomically(result.folder / f"{name}.json", (json.dumps(values, indent=2) + "\n").encode())
    console = Console()
    table = evaluation_table(evaluation)
    table.add_row("parameters, steps", f"{result.parameters:,}, {result.steps:,}")
    table.add_row("training", f"{result.tokens_per_second:,.0f} tokens/s, padding included")
    console.print(table)
    console.print(f"{result.folder} holds the model and the metrics.", markup=False, soft_wrap=True)


def evaluation_table(evaluation: ClassEvaluation) -> Table:
    """The numbers of all examples."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_row("examples", f"{evaluation.examples:,}")
    table.add_row("accuracy", f"{evaluation.accuracy:.2%}")
    table.add_row("", f"{evaluation.constant:.2%} by always giving the most frequent label")
    if evaluation.bag_of_tokens is not None:
        table.add_row("", f"{evaluation.bag_of_tokens:.2%} by logistic regression on a bag of its tokens")
    for name, accuracy in evaluation.by_class.items():
        table.add_row("", f"{accuracy:.2%} of {name!r}")
    table.add_row("loss", f"{evaluation.loss:.4f} nats an example")
    table.add_row("speed", f"{evaluation.examples / evaluation.seconds:,.0f} examples/s")
    return table


def _evaluate(
    model: SubquadForSequenceClassification, config: TrainConfig, examples: int | None, batch_size: int
) -> ClassEvaluation:
    from subquad.evaluation import evaluate_classifier, fit_bag_of_tokens
    from subquad.training.tasks_classify import labelled

    corpus = labelled(config)
    train, test = len(_sized(corpus.train)), len(_sized(corpus.test))
    progress: Any = _show_progress if sys.stderr.isatty() else None
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
        progress=progress,
    )


def _sized(items: Any) -> Sized:
    """A map-style dataset, whose type does not say that it has a length."""
    return items


def _show_progress(done: int, batches: int) -> None:
    """One line that counts the batches."""
    end = "\n" if done == batches else ""
    sys.stderr.write(f"\rbatch {done:,} of {batches:,}{end}")
    sys.stderr.flush()
