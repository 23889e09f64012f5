"""What the commands that print numbers share: units, files, the width of the terminal."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def write_json(path: str, record: Mapping[str, Any]) -> None:
    """One object, indented."""
    Path(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_csv(path: str, records: Sequence[Mapping[str, Any]]) -> None:
    """A line a record under the keys of the first; None is empty."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)
