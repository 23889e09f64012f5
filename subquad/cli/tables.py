"""Tables, units, output files and lines of progress. Without rich, tables are printed in Markdown."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.extras import is_installed

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.text import Text

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
    from subquad.cli.rich_table import print_rich_table

    print_rich_table(title, headers, lines, spare=spare, elsewhere=elsewhere, text=text, justify=justify)


def print_text(text: str, *, style: str = "", wraps: bool = True) -> None:
    """Print a paragraph, wrapped at the width of the console if it `wraps`; `style` is rich's."""
    if not is_installed("rich"):
        sys.stdout.write(f"{text}\n")
        return
    from subquad.cli.rich_table import Text, console

    console().print(Text(text, style=style), soft_wrap=not wraps)


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
