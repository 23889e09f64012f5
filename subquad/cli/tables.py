"""Tables, units, output files and lines of progress."""

from __future__ import annotations

import csv
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from subquad.evaluation import ClassEvaluation, Evaluation, ImageEvaluation

WIDTH = 160
"""Columns of output that is not to a terminal; a table whose rows need more has more."""
TEXT = 30
"""Fewest columns of text that is wrapped, as long as other columns can be left out."""
_THOUSANDS = ("", " k", " M", " G", " T", " P", " E")
_KIBIS = (" B", " KiB", " MiB", " GiB", " TiB", " PiB")


def count(number: int) -> str:
    """Format a number with three digits and a unit, such as `1.23 M`; numbers below 1000 exactly."""
    return _scaled(number, 1000, _THOUSANDS)


def size(number: int) -> str:
    """Format bytes with three digits and a unit, such as `1.50 MiB`."""
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
    """Return whether output has a limited width: a terminal's, or the variable COLUMNS."""
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()


def console(width: int = WIDTH) -> Console:
    """Return a console as wide as the terminal or COLUMNS, else `width`, so that rows aren't wrapped."""
    return Console() if has_width() else Console(width=width)


def print_table(
    title: str,
    headers: Sequence[str],
    lines: Sequence[Sequence[str | Text]],
    *,
    markdown: bool = False,
    spare: Sequence[str] = (),
    elsewhere: str = "",
    text: str | None = None,
    justify: JustifyMethod = "right",
) -> None:
    """Print a table, first column left-aligned, others by `justify`; a line with an empty first cell joins a group.

    Only the column `text` is wrapped. Where a terminal is too narrow for that, headers are wrapped, then the columns
    `spare` are left out in turn, and a line says which, and that a wider terminal shows them; `elsewhere` ends it.
    """
    if markdown:
        rules = [":---", *("---:" for _ in headers[1:])]
        written = "\n".join(f"| {' | '.join(map(str, line))} |" for line in (headers, rules, *lines))
        sys.stdout.write(f"*{title}*\n\n{written}\n\n")
        return
    endless, out, left_out = Console(width=1000), console(), 0
    widths = [max((_width(str(line[i])) for line in lines), default=0) for i in range(len(headers))]

    def made(*, wrapped: bool, whole: bool = True) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold")
        table.title = Text(title) if title else None
        kept = [i for i, header in enumerate(headers) if header not in spare[:left_out]]
        for i in kept:
            header, wraps = headers[i], headers[i] == text
            if wrapped:
                header = textwrap.fill(header, max(widths[i], *map(len, header.split()), 1), break_long_words=False)
            needed = max(widths[i], _width(header))
            needed = min(needed, TEXT) if wraps else needed
            table.add_column(
                header,
                justify="left" if wraps or not i else justify,
                no_wrap=whole and not wraps,
                min_width=needed if whole else None,
                overflow="fold",
            )
        grouped = not all(line[0] for line in lines)
        for number, line in enumerate(lines):
            if grouped and number and line[0]:
                table.add_section()
            table.add_row(*(cell if isinstance(cell := line[i], Text) else Text(cell) for i in kept))
        return table

    def fits(table: Table) -> bool:
        return Measurement.get(endless, endless.options, table).minimum <= out.width

    table = made(wrapped=False)
    if not has_width():
        out = console(max(out.width, Measurement.get(endless, endless.options, table).minimum))
    elif not fits(table):
        while not fits(table := made(wrapped=True)) and left_out < len(spare):
            left_out += 1
        table = table if fits(table) else made(wrapped=True, whole=False)
    out.print(table)
    if left_out:
        out.print(Text(f"Left out: {'; '.join(spare[:left_out])}. See them in a wider terminal{elsewhere}."))


def _width(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))


def write_csv(path: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write one line per record, with the keys of the first as header; None becomes an empty field."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


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


def context_range(start: int, stop: int) -> str:
    """Return `257 to 512` for 257 and 513, or a single number."""
    return f"{start:,}" if start + 1 == stop else f"{start:,} to {stop - 1:,}"


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


def show_line(text: str, *, last: bool = False) -> None:
    """Replace the current line on standard error, a terminal; `last` ends the line."""
    sys.stderr.write(f"\r{text}" + ("\n" if last else ""))
    sys.stderr.flush()
