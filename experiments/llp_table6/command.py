"""`python -m experiments.llp_table6`: the LLP paper's costs and the true counts at any sizes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields

from rich.text import Text

from experiments.llp_table6.paper import HEADERS, Setting, cells, notes, rows, title
from subquad.cli import guarded
from subquad.cli.arguments import Parser
from subquad.cli.rich_table import console
from subquad.cli.tables import print_table, write_csv
from subquad.data.files import write_json

NAME = "python -m experiments.llp_table6"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return guarded(run, sys.argv[1:] if arguments is None else arguments)


def make_parser() -> Parser:
    """Return the parser of the command's options."""
    description = "Print the costs in Tables 6 and 8 of Mahmood and Huang 2024 and the true counts of score entries."
    parser = Parser(description=description, prog=NAME, usage=f"{NAME} [options]")
    for name, text in (
        ("tokens", "The paper's n"),
        ("layers", "Layers"),
        ("heads", "Attention heads"),
        ("segment", "The paper's s"),
        ("projection", "The paper's p"),
    ):
        default = getattr(Setting(), name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default}).")
    parser.add_argument("--json", type=str | None, default=None, help="Also write the exact counts to this JSON file.")
    parser.add_argument("--csv", type=str | None, default=None, help="Also write the exact counts to this CSV file.")
    parser.add_argument("--markdown", action="store_true", help="Print only the table, in Markdown.")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Print the table and notes, and write the files asked for; return the exit status."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking():
        setting = Setting(**{field.name: chosen[field.name] for field in fields(Setting)})
    counted = list(rows(setting))
    print_table(title(setting), HEADERS, [cells(row) for row in counted], markdown=chosen.markdown)
    if not chosen.markdown:
        for row in counted:
            console().print(Text.assemble((f"{row.name}. ", "bold"), *(f"{line}\n" for line in notes(row))))
    records = [row._asdict() for row in counted]
    if chosen.json:
        write_json(chosen.json, {**asdict(setting), "rows": records})
    if chosen.csv:
        write_csv(chosen.csv, records)
    return 0
