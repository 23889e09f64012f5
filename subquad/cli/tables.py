"""Tables and what they share (units, files, the width of the terminal), and lines of progress."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation

_THOUSANDS = ("", " k", " M", " G", " T", " P", " E")
_KIBIS = (" B", " KiB", " MiB", " GiB", " TiB", " PiB")


def count(number: int) -> str:
    """Three digits and a unit of thousands: `1.23 M`; a number below a thousand as it is."""
    return _scaled(number, 1000, _THOUSANDS)


def size(number: int) -> str:
    """Bytes with three digits and a unit: `1.50 MiB`."""
    return _scaled(number, 1024, _KIBIS)


def _scaled(number: int, step: int, units: Sequence[str]) -> str:
    if number < step:
        return f"{number}{units[0]}"
    value, power = float(number), 0
    while value >= 999.5 and power + 1 < len(units):
        value, power = value / step, power + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}{units[power]}"


def has_width() -> bool:
    """Whether there is a width to keep to: a terminal's, or that in COLUMNS."""
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()


def console(width: int = 200) -> Console:
    """As wide as the terminal or COLUMNS; without them (a pipe, a file) of `width`, enough for a row a line."""
    return Console() if has_width() else Console(width=width)


def print_table(title: str, headers: Sequence[str], lines: Sequence[Sequence[str]], *, markdown: bool) -> None:
    """Print lines of cells: names left, numbers right; where the first cell has a name a new group begins."""
    if markdown:
        rules = [":---", *("---:" for _ in headers[1:])]
        text = "\n".join(f"| {' | '.join(line)} |" for line in (headers, rules, *lines))
        sys.stdout.write(f"*{title}*\n\n{text}\n\n")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    grouped = not all(line[0] for line in lines)
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", no_wrap=not i)
    for number, line in enumerate(lines):
        if grouped and number and line[0]:
            table.add_section()
        table.add_row(*(Text(cell) for cell in line))
    console().print(table)


def write_json(path: str | Path, record: Mapping[str, Any]) -> None:
    """One object, indented."""
    Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_csv(path: str, records: Sequence[Mapping[str, Any]]) -> None:
    """A line a record under the keys of the first; None is empty."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def facts(*rows: tuple[str, str]) -> Table:
    """Return a table of names and what they are, without a line of headers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def text_table(evaluation: Evaluation) -> Table:
    """Return the numbers of the whole text."""
    overlap = "" if evaluation.stride == evaluation.length else f", stride {evaluation.stride:,}"
    table = facts(
        ("tokens predicted", f"{evaluation.tokens:,} in windows of {evaluation.length:,}{overlap}"),
        ("loss", f"{evaluation.loss:.4f} nats a token"),
        ("perplexity", f"{evaluation.perplexity:,.2f} a token"),
    )
    if evaluation.word_perplexity is not None:
        form = ",.2f" if evaluation.word_perplexity < 1e6 else ".3g"
        table.add_row("", f"{evaluation.word_perplexity:{form}} a whitespace word")
    if evaluation.bits_per_byte is not None:
        table.add_row("bits per byte", f"{evaluation.bits_per_byte:.4f}")
    table.add_row("speed", f"{evaluation.tokens / evaluation.seconds:,.0f} tokens/s")
    return table


def position_table(evaluation: Evaluation) -> Table:
    """Return the loss by tokens of context."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("tokens of context", "tokens", "loss, nats"):
        table.add_column(header, justify="right")
    for part in evaluation.by_position:
        last = part.stop - 1
        context = f"{part.start:,}" if part.start == last else f"{part.start:,} to {last:,}"
        table.add_row(context, f"{part.tokens:,}", f"{part.loss:.4f}")
    return table


def class_table(evaluation: ClassEvaluation) -> Table:
    """Return the numbers of all examples."""
    table = facts(
        ("examples", f"{evaluation.examples:,}"),
        ("accuracy", f"{evaluation.accuracy:.2%}"),
        ("", f"{evaluation.constant:.2%} by always giving the most frequent label"),
    )
    if evaluation.bag_of_tokens is not None:
        table.add_row("", f"{evaluation.bag_of_tokens:.2%} by logistic regression on a bag of its tokens")
    for name, accuracy in evaluation.by_class.items():
        table.add_row("", f"{accuracy:.2%} of {name!r}")
    table.add_row("loss", f"{evaluation.loss:.4f} nats an example")
    table.add_row("speed", f"{evaluation.examples / evaluation.seconds:,.0f} examples/s")
    return table


def image_table(evaluation: ImageEvaluation) -> Table:
    """Return the numbers of all images."""
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


def show_line(text: str, *, last: bool = False) -> None:
    """Write over the line that standard error, a terminal, shows; after the `last` one the next begins a line."""
    sys.stderr.write(f"\r{text}" + ("\n" if last else ""))
    sys.stderr.flush()


def counter(unit: str = "") -> Callable[[str, int, int], None] | None:
    """Return a function that shows `WHAT: DONE of ALL` and the unit; None where standard error is no terminal."""

    def show(what: str, done: int, total: int) -> None:
        show_line(f"{what}: {done:,} of {total:,}{unit}", last=done == total)

    return show if sys.stderr.isatty() else None


def progress(what: str) -> Callable[[int, int], None] | None:
    """Return a function that shows `what DONE of ALL` in one line; None where standard error is no terminal."""

    def show(done: int, total: int) -> None:
        show_line(f"{what} {done:,} of {total:,}", last=done == total)

    return show if sys.stderr.isatty() else None
