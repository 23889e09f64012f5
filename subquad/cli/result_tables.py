"""Tables of what a model was measured at."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from subquad.cli.tables import context_range
from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation


def facts(*rows: tuple[str, str]) -> Table:
    """Return a table of names and values without a header."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def text_table(evaluation: Evaluation) -> Table:
    """Return the table of a text's loss, perplexity, bits per byte and speed."""
    overlap = "" if evaluation.stride == evaluation.length else f", stride {evaluation.stride:,}"
    table = facts(
        ("tokens predicted", f"{evaluation.tokens:,} in windows of {evaluation.length:,}{overlap}"),
        ("loss", f"{evaluation.loss:.4f} nats per token"),
        ("perplexity", f"{evaluation.perplexity:,.2f} per token"),
    )
    if evaluation.word_perplexity is not None:
        form = ",.2f" if evaluation.word_perplexity < 1e6 else ".3g"
        table.add_row("", f"{evaluation.word_perplexity:{form}} per whitespace word")
    if evaluation.bits_per_byte is not None:
        table.add_row("bits per byte", f"{evaluation.bits_per_byte:.4f}")
    table.add_row("speed", f"{evaluation.tokens / evaluation.seconds:,.0f} tokens/s")
    return table


def position_table(evaluation: Evaluation) -> Table:
    """Return the table of loss by tokens of context."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("tokens of context", "tokens", "loss, nats"):
        table.add_column(header, justify="right")
    for part in evaluation.by_position:
        table.add_row(context_range(part.start, part.stop), f"{part.tokens:,}", f"{part.loss:.4f}")
    return table


def class_table(evaluation: ClassEvaluation) -> Table:
    """Return the table of accuracy, baselines, loss and speed."""
    table = facts(
        ("examples", f"{evaluation.examples:,}"),
        ("accuracy", f"{evaluation.accuracy:.2%}"),
        ("", f"{evaluation.constant:.2%} by always predicting the most frequent label"),
    )
    if evaluation.bag_of_tokens is not None:
        table.add_row("", f"{evaluation.bag_of_tokens:.2%} by logistic regression on a bag of tokens")
    for name, accuracy in evaluation.by_class.items():
        table.add_row("", f"{accuracy:.2%} of {name!r}")
    table.add_row("loss", f"{evaluation.loss:.4f} nats per example")
    table.add_row("speed", f"{evaluation.examples / evaluation.seconds:,.0f} examples/s")
    return table


def image_table(evaluation: ImageEvaluation) -> Table:
    """Return the table of bits per dimension, baselines and speed."""
    error = "" if evaluation.error is None else f" ± {evaluation.error:.4f}"
    table = facts(
        ("images", f"{evaluation.images:,} of {evaluation.dimensions:,} bytes, all of them predicted"),
        ("bits per dimension", f"{evaluation.bits_per_dim:.4f}{error}"),
        ("", f"{evaluation.constant:.4f} by the frequencies of the levels alone"),
    )
    if evaluation.occluded_bits_per_dim is not None:
        table.add_row("", f"{evaluation.occluded_bits_per_dim:.4f} of the {evaluation.occluded:,} occluded bytes")
    table.add_row("speed", f"{evaluation.images / evaluation.seconds:,.1f} images/s")
    return table
