"""Train a model, measure it on held-out data and keep the result in the run's folder, as `subquad train` does."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from subquad.extras import needed

with needed("subquad.train_and_report"):
    from rich.console import Console
    from tokenizers import Tokenizer

from subquad import training
from subquad.bars import progress
from subquad.config import Record
from subquad.data import Corpus, TokenShard
from subquad.data.files import write_json
from subquad.data.images import ImageSet
from subquad.data.probes import HELD_OUT, probe_rows
from subquad.data.special_tokens import end_tokens
from subquad.data.tokenizers import encode_text
from subquad.disk import write_atomically
from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation, evaluate, evaluate_images
from subquad.evaluation.classes import evaluate_classifier, fit_bag_of_tokens
from subquad.evaluation.probes import overall, right_answers
from subquad.generation import Generation, SamplingConfig, generate_images
from subquad.generation.images import DrawnImages, picture_of, square, write_png
from subquad.program import command
from subquad.training.baselines import NGRAM_READ
from subquad.training.config import TrainConfig
from subquad.training.processes import first_process, leave
from subquad.training.progress import read_metrics, tell
from subquad.training.report import Report, measure, write_report
from subquad.training.task import count_items, spread
from subquad.training.tasks_classify import labelled
from subquad.training.tasks_text import reported_from

__all__ = ["RunReport", "train_and_report"]

logger = logging.getLogger(__name__)
SAMPLES = 3
"""Samples at the end of a run, of which the first is greedy. A token of each costs less than a third of a step."""
PICTURE = "samples.png"
PROMPT_CHARACTERS = 40
"""Most characters of a prompt that is taken from the held-out text."""


@dataclass(frozen=True)
class ProbeEvaluation(Record):
    """Accuracy of a recall task on held-out sequences."""

    accuracy: float
    """Share of right answers."""
    error: float
    """Standard error of the accuracy over sequences."""
    chance: float
    """Accuracy of random answers."""
    sequences: int
    asked: int
    """Answers that were asked for."""
    length: int
    """Tokens of a sequence."""


@dataclass(frozen=True)
class RunReport:
    """A training run and what was measured of it at its end."""

    run: training.RunResult
    evaluation: Evaluation | ClassEvaluation | ImageEvaluation | ProbeEvaluation | None = None
    """Measures on held-out data, as in evaluation.json; None for an interrupted run, pretraining, windows that several
    processes share, and other processes than the first."""
    report: Report | dict[str, Any] | None = None
    """Facts of the run, as in report.json; None where `evaluation` is, and for token shards."""
    prompt: str | None = None
    """What the samples continue."""
    samples: str | None = None
    """Continuations of the prompt, as in samples.txt (task=language)."""
    images: DrawnImages | None = None
    """Images that the model drew, as in samples.png (task=image)."""
    files: tuple[Path, ...] = ()
    """The files of the report in the run's folder."""


def train_and_report(config: TrainConfig, *, console: Console | None = None) -> RunReport:
    """Train as `train` does, then measure the model and write the result into the run's folder.

    The folder gets evaluation.json and report.json, and also samples.txt (task=language) or samples.png (task=image).
    An interrupted run is not measured. Of several processes the first measures alone, after all have disconnected from
    each other. Progress goes to `console`, or to the log without one. Raises what `train` raises.
    """
    result = training.train(config, console=console)
    leave()
    if result.interrupted or not first_process():
        return RunReport(result)
    return report_run(result, console=console)


def report_run(result: training.RunResult, *, console: Console | None = None) -> RunReport:
    """Measure the model of a finished run and write the result into its folder.

    So that this takes less time than the training, on any machine, it reads at most as many tokens, sequences or images
    as the steps did, which takes a third of their time. These counts follow from the steps alone: equal runs have equal
    figures.
    """
    return REPORTS[result.config.task](result, console)


def _bar(what: str, console: Console | None) -> AbstractContextManager[Callable[[int, int], None] | None]:
    return nullcontext() if console is None else progress(what, console)


def _trained(result: training.RunResult) -> int:
    """Return the number of windows or sequences in the steps of the run."""
    return max(1, result.tokens // result.config.batch.length)


def _facts(result: training.RunResult, **more: int) -> dict[str, Any]:
    """Return the facts of training that end a report, with `more` before the speed."""
    return {
        "python": platform.python_version(),
        "parameters": result.parameters,
        "steps": result.steps,
        **more,
        "train_tokens_per_second": result.tokens_per_second,
    }


def _write(result: training.RunResult, evaluation: Record, report: dict[str, Any]) -> tuple[Path, ...]:
    """Write evaluation.json and report.json; return their paths."""
    files = result.folder / "evaluation.json", result.folder / "report.json"
    for file, values in zip(files, (evaluation.to_dict(), report), strict=True):
        write_json(file, values)
    return files


def _language(result: training.RunResult, console: Console | None) -> RunReport:
    """Write evaluation.json, samples.txt and report.json."""
    corpus = result.corpus
    assert isinstance(corpus, Corpus)
    prompt = _prompt(result)
    if result.config.parallel.context > 1:  # its windows may be too long for one process
        samples, file = write_samples(result, corpus.tokenizer, prompt), result.folder / "samples.txt"
        return RunReport(result, prompt=prompt, samples=samples, files=(file,))
    decoder, held_out = result.decoder, corpus.held_out
    begin = reported_from(result.config, len(held_out))
    tokens, counts = held_out.tokens, {"text_bytes": held_out.text_bytes, "words": held_out.words}
    if begin:
        tokens = tokens[begin:]
        text = corpus.tokenizer.decode(np.asarray(tokens[:]).tolist())
        counts = {"text_bytes": len(text.encode()), "words": len(text.split())}
    tell(console, "evaluating on the held-out text ...")
    packed = result.config.data.pack == "documents"
    with _bar("window", console) as shown:
        evaluation = evaluate(
            decoder,
            tokens,
            length=result.config.batch.length,
            windows=_trained(result),
            documents=held_out.documents if packed else None,
            **counts,
            decode=corpus.tokenizer.decode,
            progress=shown,
        )
    if evaluation.text_bytes != counts["text_bytes"]:
        more = command("eval", result.folder)
        logger.info("evaluated on as many tokens as the run trained on; on all held-out text: %s", more)
    if begin:
        logger.info("evaluated on the second half of the held-out text: the first chose the weights (run.weights=best)")
    files = [result.folder / "evaluation.json", result.folder / "samples.txt"]
    write_json(files[0], evaluation.to_dict())
    samples, report = write_samples(result, corpus.tokenizer, prompt), None
    if isinstance(held_out, TokenShard) and isinstance(corpus.train, TokenShard):
        assert evaluation.bits_per_byte is not None  # a TokenShard has the number of bytes
        speeds = [record["tokens_per_s"] for record in read_metrics(result.folder) if "tokens_per_s" in record]
        report = measure(
            decoder,
            corpus.train_text(min(NGRAM_READ, round(result.tokens * corpus.train.text_bytes / len(corpus.train)))),
            corpus.held_out_text()[-counts["text_bytes"] :][: evaluation.text_bytes],
            np.asarray(tokens[:]).tolist(),
            bits_per_byte=evaluation.bits_per_byte,
            files_hash=corpus.fingerprint[:16],
            steps=result.steps,
            tokens=result.tokens,
            train_tokens_per_second=result.tokens_per_second
            or (speeds or [0.0])[-1],  # the run had ended before this command
            skipped=result.skipped,
        )
        write_report(report, result.folder)
        files.append(result.folder / "report.json")
    return RunReport(result, evaluation, report, prompt=prompt, samples=samples, files=tuple(files))


def _prompt(result: training.RunResult) -> str:
    """Return the prompt of the samples: the run's, or the first words of the part of the held-out text it reports."""
    if result.config.run.prompt is not None:
        return result.config.run.prompt
    corpus = result.corpus
    assert isinstance(corpus, Corpus)
    tokens = corpus.held_out.tokens
    begin = reported_from(result.config, len(tokens))
    text: str = corpus.tokenizer.decode(np.asarray(tokens[begin : begin + PROMPT_CHARACTERS][:]).tolist())
    # The first and the last word may be cut; an option's value can't begin with a dash.
    words = " ".join(text.split()[1:]).lstrip("- ")[:PROMPT_CHARACTERS]
    return words.rpartition(" ")[0] or words or text or "\n"


def write_samples(result: training.RunResult, tokenizer: Tokenizer, text: str) -> str:
    """Write samples.txt and return its text: continuations of `text`, each under a line with its sampling.

    As with `subquad generate`, a sample ends at an end token of the model.
    """
    options, prompt = result.config.run, encode_text(tokenizer, text)
    count, model = min(options.sample_tokens, max(1, result.steps // 2)), result.config.model
    if count < options.sample_tokens:
        logger.info("samples are cut to %d tokens: the run has only %d steps", count, result.steps)
    if model.position == "learned" and len(prompt) + count - 1 > model.max_positions:
        prompt = prompt[-model.max_positions :]
        count = model.max_positions - len(prompt) + 1
        logger.warning("samples are cut to %d tokens: the model has %d positions", count, model.max_positions)
    latents = result.decoder.most_new_tokens(len(prompt))
    if latents is not None and latents < count:
        logger.warning("samples are cut to %d tokens: decode=frozen has no latents for more", latents)
        count = latents
    texts, ends = [], end_tokens(tokenizer, training.runs.model_home(result.folder))
    for number in range(SAMPLES):
        temperature = options.sample_temperature if number else 0.0
        sampling = SamplingConfig(max_tokens=count, temperature=temperature, seed=number)
        generation = Generation(result.decoder, prompt, sampling, stop_tokens=ends)
        tokens = [token for token in generation if token not in ends]
        how = f"temperature {temperature}, seed {number}" if number else "greedy"
        texts.append(f"--- {how}\n{tokenizer.decode(prompt + tokens)}\n")
    samples = "\n".join(texts)
    write_atomically(result.folder / "samples.txt", samples.encode())
    return samples


def _classify(result: training.RunResult, console: Console | None) -> RunReport:
    """Write evaluation.json and report.json."""
    tell(console, "evaluating on the test sequences ...")
    size = result.config.batch.size
    evaluation = evaluate_classes(result.model, result.config, _trained(result), size, console=console)
    report = {
        "accuracy": evaluation.accuracy,
        "constant": evaluation.constant,
        "bag_of_tokens": evaluation.bag_of_tokens,
        "examples": evaluation.examples,
        **_facts(result),
    }
    return RunReport(result, evaluation, report, files=_write(result, evaluation, report))


def evaluate_classes(
    model: Any, config: TrainConfig, examples: int | None, batch_size: int, *, console: Console | None = None
) -> ClassEvaluation:
    """Measure a classifier and a bag-of-tokens baseline on `examples` test sequences, evenly spread (None: all)."""
    corpus: Any = labelled(config)  # Any, since torch's Dataset type has no length
    train, test = len(corpus.train), len(corpus.test)
    items = spread(corpus.test, test if examples is None else examples)
    baseline = None
    if train > 1:
        baseline = fit_bag_of_tokens(corpus.train, train, vocab_size=corpus.vocab_size, classes=len(corpus.classes))
    with _bar("batch", console) as shown:
        return evaluate_classifier(
            model.model,
            items,
            count_items(items),
            corpus.classes,
            batch_size=batch_size,
            baseline=baseline,
            progress=shown,
        )


def _images(result: training.RunResult, console: Console | None) -> RunReport:
    """Write evaluation.json, samples.png and report.json."""
    options, model, images = result.config.image, result.model.model, result.corpus
    assert isinstance(images, ImageSet)
    trained = max(1, result.tokens // model.config.tokens)
    tell(console, "measuring on held-out images ...")
    pixels_NT = training.runs.chosen(images, min(options.test_images, trained)).flat
    with _bar("image", console) as shown:
        evaluation = evaluate_images(model, pixels_NT, batch_size=result.config.batch.size, progress=shown)
    report = {
        "bits_per_dim": evaluation.bits_per_dim,
        "error": evaluation.error,
        "test_images": evaluation.images,
        **_facts(result, train_images=trained),
    }
    drawn, pictures = None, []
    if options.samples:
        tell(console, f"drawing {options.samples} images ...")
        drawn = generate_images(model, options.samples, seed=result.config.run.seed)
        pixels = drawn.pixels_NT.view(-1, *model.config.shape).numpy()
        pictures = [result.folder / PICTURE]
        write_png(pictures[0], picture_of(square(list(pixels))))
        report["generated_images_per_second"] = options.samples / drawn.seconds
    files = (*_write(result, evaluation, report), *pictures)
    return RunReport(result, evaluation, report, images=drawn, files=files)


def _probe(result: training.RunResult, console: Console | None) -> RunReport:
    """Write evaluation.json and report.json."""
    config, probe = result.config, result.config.probe
    tell(console, "evaluating on the held-out sequences ...")
    count = min(probe.held_out, _trained(result))
    rows = probe_rows(probe, config.batch.length, count, seed=(probe.seed, HELD_OUT))
    score = overall(rows, right_answers(result.decoder, rows, batch_size=config.batch.size))
    chance = 1 / 10 if probe.name == "passkey" else probe.chance  # per token, as the accuracy is
    evaluation = ProbeEvaluation(score.value, score.error, chance, score.sequences, score.asked, score.length)
    accuracy = {"accuracy": score.value, "error": score.error, "chance": chance}
    report = {**accuracy, "sequences": score.sequences, **_facts(result)}
    return RunReport(result, evaluation, report, files=_write(result, evaluation, report))


REPORTS: dict[str, Callable[[training.RunResult, Console | None], RunReport]] = {
    "language": _language,
    "classify": _classify,
    "pretrain": lambda result, _: RunReport(result),
    "image": _images,
    "probe": _probe,
}
