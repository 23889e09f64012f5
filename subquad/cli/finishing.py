"""The end of `subquad train`: measure the trained model, print the result and keep it in the run's folder."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from subquad import training
from subquad.cli.eval import evaluate_classes
from subquad.cli.tables import class_table, facts, image_table, progress, text_table
from subquad.data import Corpus, TokenShard
from subquad.data.files import write_json
from subquad.data.images import ImageSet
from subquad.data.probes import HELD_OUT, probe_rows
from subquad.data.tokenizers import encode_text
from subquad.disk import write_atomically
from subquad.evaluation import evaluate, evaluate_images
from subquad.evaluation.probes import overall, right_answers
from subquad.generation import Generation, SamplingConfig, generate_images
from subquad.generation.images import picture_of, square, write_png
from subquad.program import command
from subquad.training.baselines import NGRAM_READ
from subquad.training.progress import read_metrics
from subquad.training.report import measure, write_report
from subquad.training.tasks_text import reported_from

logger = logging.getLogger(__name__)
SAMPLES = 3
"""Samples at the end of a run, of which the first is greedy. A token of each costs less than a third of a step."""
PICTURE = "samples.png"
PROMPT_CHARACTERS = 40
"""Most characters of a prompt that is taken from the held-out text."""


def finish(result: training.RunResult) -> None:
    """Measure the model of a finished run, print the numbers and keep them in its folder.

    So that this takes less time than the training, on any machine, it reads at most as many tokens, sequences or images
    as the steps did, which takes a third of their time. These counts follow from the steps alone: equal runs have equal
    figures.
    """
    FINISH[result.config.task](result)


def _trained(result: training.RunResult) -> int:
    """Return the number of windows or sequences in the steps of the run."""
    return max(1, result.tokens // result.config.batch.length)


def _language(result: training.RunResult) -> None:
    """Write and print evaluation.json, samples.txt and report.json."""
    corpus = result.corpus
    assert isinstance(corpus, Corpus)
    if result.config.parallel.context > 1:
        _shared_language(result, corpus)
        return
    decoder, held_out = result.decoder, corpus.held_out
    begin = reported_from(result.config, len(held_out))
    tokens, counts = held_out.tokens, {"text_bytes": held_out.text_bytes, "words": held_out.words}
    if begin:
        tokens = tokens[begin:]
        text = corpus.tokenizer.decode(np.asarray(tokens[:]).tolist())
        counts = {"text_bytes": len(text.encode()), "words": len(text.split())}
    sys.stderr.write("evaluating on the held-out text ...\n")
    packed = result.config.data.pack == "documents"
    with progress("window") as shown:
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
    part = evaluation.text_bytes != counts["text_bytes"]
    if part:
        more = command("eval", result.folder)
        logger.info("evaluated on as many tokens as the run trained on; on all held-out text: %s", more)
    if begin:
        logger.info("evaluated on the second half of the held-out text: the first chose the weights (run.weights=best)")
    write_json(result.folder / "evaluation.json", evaluation.to_dict())
    _write_samples(result, corpus.tokenizer)
    console = Console()
    console.print(text_table(evaluation))
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
        console.print(report.table())
    else:
        console.print("No report.json: token shards don't keep the text, which it compares with compressors.")
    _say_how_to_go_on(result, console)


def _shared_language(result: training.RunResult, corpus: Corpus) -> None:
    """Write only samples.txt: windows shared by several processes may be too long for this one."""
    _write_samples(result, corpus.tokenizer)
    console, length = Console(), result.config.batch.length
    best = "" if result.best_loss is None else f" The lowest held-out loss in training was {result.best_loss:.4f}."
    console.print(
        f"No evaluation.json: {result.config.parallel.context} processes shared a window of {length} tokens, which may "
        f"be too long for one.{best} Measure it with enough memory, or with a smaller --length:",
        markup=False,
    )
    console.print(f"  {command('eval', result.folder, '--length', length)}", markup=False, soft_wrap=True)
    _say_how_to_go_on(result, console)


def _say_how_to_go_on(result: training.RunResult, console: Console) -> None:
    console.print(f"{result.folder} holds the model, the metrics and the samples. Continue a text with:", markup=False)
    line = command("generate", result.folder, "--prompt", prompt_of(result))
    console.print(f"  {line}", markup=False, soft_wrap=True)


def prompt_of(result: training.RunResult) -> str:
    """Return the prompt of the samples: the run's, or the first words of the part of the held-out text it reports."""
    if result.config.run.prompt is not None:
        return result.config.run.prompt
    corpus = result.corpus
    assert isinstance(corpus, Corpus)
    tokens = corpus.held_out.tokens
    begin = reported_from(result.config, len(tokens))
    text: str = corpus.tokenizer.decode(np.asarray(tokens[begin : begin + PROMPT_CHARACTERS][:]).tolist())
    # The first word may be a part of one, and so the last; an option's value can't begin with a dash.
    words = " ".join(text.split()[1:]).lstrip("- ")[:PROMPT_CHARACTERS]
    return words.rpartition(" ")[0] or words or text or "\n"


def _write_samples(result: training.RunResult, tokenizer: Tokenizer) -> None:
    """Write and print samples.txt: continuations of the run's prompt, each under a line with its sampling."""
    options = result.config.run
    prompt = encode_text(tokenizer, prompt_of(result))
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
    texts = []
    for number in range(SAMPLES):
        temperature = options.sample_temperature if number else 0.0
        sampling = SamplingConfig(max_tokens=count, temperature=temperature, seed=number)
        tokens = list(Generation(result.decoder, prompt, sampling))
        how = f"temperature {temperature}, seed {number}" if number else "greedy"
        texts.append(f"--- {how}\n{tokenizer.decode(prompt + tokens)}\n")
    samples = "\n".join(texts)
    write_atomically(result.folder / "samples.txt", samples.encode())
    sys.stdout.write(samples)


def _facts(result: training.RunResult, **more: int) -> dict[str, Any]:
    """Return the facts of training that end a report, with `more` before the speed."""
    return {
        "python": platform.python_version(),
        "parameters": result.parameters,
        "steps": result.steps,
        **more,
        "train_tokens_per_second": result.tokens_per_second,
    }


def _write(result: training.RunResult, evaluation: dict[str, Any], report: dict[str, Any]) -> None:
    """Write evaluation.json and report.json."""
    for name, values in (("evaluation", evaluation), ("report", report)):
        write_json(result.folder / f"{name}.json", values)


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


def _classify(result: training.RunResult) -> None:
    """Write and print evaluation.json and report.json."""
    sys.stderr.write("evaluating on the test sequences ...\n")
    evaluation = evaluate_classes(result.model, result.config, _trained(result), result.config.batch.size)
    report = {
        "accuracy": evaluation.accuracy,
        "constant": evaluation.constant,
        "bag_of_tokens": evaluation.bag_of_tokens,
        "examples": evaluation.examples,
        **_facts(result),
    }
    _write(result, evaluation.to_dict(), report)
    table = class_table(evaluation)
    _add_training(table, result, f"{result.tokens_per_second:,.0f} tokens/s, padding included")
    _print(table, f"{result.folder} holds the model and the metrics.")


def _pretrain(result: training.RunResult) -> None:
    """Print the loss on held-out training sequences and the folder of the encoder."""
    options = result.config.pretrain
    table = facts(("learned", "hidden tokens" if options.kind == "denoise" else "the next token"))
    if result.best_loss is not None:
        table.add_row("lowest loss", f"{result.best_loss:.4f} nats per predicted token, at step {result.best_step:,}")
    _add_training(table, result, f"{result.tokens_per_second:,.0f} tokens/s, padding included")
    _print(table, f"{result.folder} holds the encoder and the metrics.")


def _images(result: training.RunResult) -> None:
    """Write evaluation.json, samples.png and report.json; print the numbers."""
    options, model, images = result.config.image, result.model.model, result.corpus
    assert isinstance(images, ImageSet)
    trained = max(1, result.tokens // model.config.tokens)
    sys.stderr.write("measuring on held-out images ...\n")
    pixels_NT = training.runs.chosen(images, min(options.test_images, trained)).flat
    with progress("image") as shown:
        evaluation = evaluate_images(model, pixels_NT, batch_size=result.config.batch.size, progress=shown)
    report = {
        "bits_per_dim": evaluation.bits_per_dim,
        "error": evaluation.error,
        "test_images": evaluation.images,
        **_facts(result, train_images=trained),
    }
    table = image_table(evaluation)
    _add_training(table, result, f"{report['train_images']:,} images, {result.tokens_per_second:,.0f} bytes/s")
    if options.samples:
        sys.stderr.write(f"drawing {options.samples} images ...\n")
        drawn = generate_images(model, options.samples, seed=result.config.run.seed)
        pixels = drawn.pixels_NT.view(-1, *model.config.shape).numpy()
        write_png(result.folder / PICTURE, picture_of(square(list(pixels))))
        report["generated_images_per_second"] = options.samples / drawn.seconds
        table.add_row("generation", f"{options.samples / drawn.seconds:,.2f} images/s, {drawn.batch_size} at once")
    _write(result, evaluation.to_dict(), report)
    kept = f", the metrics and {PICTURE}" if options.samples else " and the metrics"
    commands = command("generate", result.folder, "--images", 100), command("complete", result.folder)
    _print(table, f"{result.folder} holds the model{kept}. Next:", *commands)


def _probe(result: training.RunResult) -> None:
    """Write and print evaluation.json and report.json."""
    config, probe = result.config, result.config.probe
    sys.stderr.write("evaluating on the held-out sequences ...\n")
    count = min(probe.held_out, _trained(result))
    rows = probe_rows(probe, config.batch.length, count, seed=(probe.seed, HELD_OUT))
    score = overall(rows, right_answers(result.decoder, rows, batch_size=config.batch.size))
    chance = 1 / 10 if probe.name == "passkey" else probe.chance  # per token, as the accuracy is
    accuracy = {"accuracy": score.value, "error": score.error, "chance": chance}
    evaluation = {**accuracy, "sequences": score.sequences, "asked": score.asked, "length": score.length}
    report = {**accuracy, "sequences": score.sequences, **_facts(result)}
    _write(result, evaluation, report)
    table = facts(
        ("held-out sequences", f"{score.sequences:,} of {score.length:,} tokens, {score.asked:,} tokens asked"),
        ("accuracy", f"{score.value:.2%} ± {score.error:.2%}"),
        ("", f"{chance:.2%} by chance"),
    )
    _add_training(table, result, f"{result.tokens_per_second:,.0f} tokens/s")
    text = f"{result.folder} holds the model and the metrics. Probe it further with:"
    _print(table, text, command("probe", result.folder))


FINISH: dict[str, Callable[[training.RunResult], None]] = {
    "language": _language,
    "classify": _classify,
    "pretrain": _pretrain,
    "image": _images,
    "probe": _probe,
}
