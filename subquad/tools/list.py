"""`subquad list`: the mechanisms, the options of one, the recipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from subquad.config import suggest
from subquad.recipes import recipe_path, recipes
from subquad.tools.arguments import Parser


def run(arguments: Sequence[str]) -> int:
    """Parse, print, return the exit status."""
    parser = Parser("list [NAME]", "The attention mechanisms, the options of one of them, or the recipes.")
    parser.add_argument("name", nargs="?", type=str | None, default=None, help="A mechanism, to list its options.")
    parser.add_argument("--recipes", action="store_true", help="List the recipes only.")
    parser.add_argument(
        "--laws", action="store_true", help="Which laws of the contract each mechanism keeps, and why not."
    )
    parser.add_argument("--markdown", action="store_true", help="Print the table of mechanisms in Markdown.")
    chosen = parser.parse_args(arguments)
    if chosen.recipes:
        _print_recipes()
        return 0
    from subquad.tools import mechanisms

    if chosen.laws:
        _print_laws()
    elif chosen.markdown:
        sys.stdout.write(mechanisms.markdown() + "\n")
    elif chosen.name is not None:
        _print_options(chosen.name)
    else:
        _print_table(mechanisms.HEADERS, mechanisms.rows())
        _console().print(Text(mechanisms.NOTE))
        _print_recipes()
    return 0


def _print_laws() -> None:
    from subquad.attention import LAWS
    from subquad.tools import mechanisms

    table, reasons = mechanisms.law_rows()
    _print_table(("law", "what it asks for"), ((str(law), text) for law, text in LAWS.items()))
    _print_table(mechanisms.LAW_HEADERS, table)
    _console().print(Text("\n".join(reasons)))


def _print_options(name: str) -> None:
    from subquad.attention import mechanism, names
    from subquad.models.stacks import STACKS
    from subquad.tools.mechanisms import options

    if name not in {*names(), *STACKS}:
        raise ValueError(f"unknown attention {name!r}; {suggest(name, {*names(), *STACKS})}")
    cls = STACKS[name] if name in STACKS else mechanism(name)
    own = STACKS[name].options_class() if name in STACKS else mechanism(name).Config
    _console().print(Text(f"{name}: {cls.summary}\n{cls.paper}", style="bold"))
    _print_table(("option", "type", "default", ""), options(own))
    _console().print(
        Text("A model gives dim, num_heads, bias, dropout and, where they are, num_kv_heads, rope and rope_base.")
    )
    _console().print(Text(f"subquad train --model.attention {name} --model.options.{name}.OPTION VALUE"))


def _print_recipes() -> None:
    _print_table(("recipe", ""), ((name, _first_comment(recipe_path(name))) for name in recipes()))
    _console().print(Text("subquad train --recipe NAME"))


def _first_comment(recipe: Path) -> str:
    """What a recipe says about itself in its first line."""
    line = recipe.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def _print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def _console() -> Console:
    """As wide as the terminal; without one (a pipe, a file) wide enough for a row a line."""
    return Console() if sys.stdout.isatty() else Console(width=400)
