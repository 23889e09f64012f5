"""Tables, units, output files and lines of progress. Without rich, tables are printed in Markdown."""

from __future__ import annotations

import csv
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.extras import is_installed

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text

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
    from rich.console import Console

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
    Without rich the table is printed as by `markdown`.
    """
    if markdown or not is_installed("rich"):
        rules = [":---", *("---:" if justify == "right" else ":---" for _ in headers[1:])]
        rows = [
            [str(cell).replace("\n", " ").replace("|", r"\|") for cell in line] for line in (headers, rules, *lines)
        ]
        written = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        sys.stdout.write((f"*{title}*\n\n" if title else "") + f"{written}\n\n")
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

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


def print_text(text: str, *, style: str = "", wraps: bool = True) -> None:
    """Print a paragraph, wrapped at the width of the console if it `wraps`; `style` is rich's."""
    if not is_installed("rich"):
        sys.stdout.write(f"{text}\n")
        return
    from rich.text import Text

    console().print(Text(text, style=style), soft_wrap=not wraps)


def _width(cell: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, cell.split("\n")))


def write_csv(path: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write one line per record, with the keys of the first as header; None becomes an empty field."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def context_range(start: int, stop: int) -> str:
    """Return `257 to 512` for 257 and 513, or a single number."""
    return f"{start:,}" if start + 1 == stop else f"{start:,} to {stop - 1:,}"


def show_line(text: str, *, last: bool = False) -> None:
    """Replace the current line on standard error, a terminal; `last` ends the line."""
    sys.stderr.write(f"\r{text}" + ("\n" if last else ""))
    sys.stderr.flush()
