"""Tables for a terminal, by rich: columns are wrapped or left out where it is too narrow."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

WIDTH = 160
"""Columns of output that is not to a terminal; a table whose rows need more has more."""
TEXT = 30
"""Fewest columns of text that is wrapped, as long as other columns can be left out."""


def has_width() -> bool:
    """Return whether output has a limited width: a terminal's, or the variable COLUMNS."""
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()


def console(width: int = WIDTH) -> Console:
    """Return a console as wide as the terminal or COLUMNS, else `width`, so that rows aren't wrapped."""
    return Console() if has_width() else Console(width=width)


def print_rich_table(
    title: str,
    headers: Sequence[str],
    lines: Sequence[Sequence[str | Text]],
    *,
    spare: Sequence[str],
    elsewhere: str,
    text: str | None,
    justify: JustifyMethod,
) -> None:
    """Print a table as `subquad.cli.tables.print_table` says."""
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
