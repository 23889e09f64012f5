"""`subquad list`: the mechanisms, the options of one, the recipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from subquad.cli.arguments import Parser
from subquad.cli.tables import console, has_width
from subquad.config import suggest
from subquad.recipes import recipe_path, recipes

WIDTH = 160
"""Columns of what is printed to no terminal; a table whose rows need more has more."""


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
    from subquad.cli import mechanisms

    if chosen.laws:
        _print_laws()
    elif chosen.markdown:
        sys.stdout.write(mechanisms.markdown() + "\n")
    elif chosen.name is not None:
        with parser.checking():
            _check(chosen.name)
        _print_options(chosen.name)
    else:
        _print_table(mechanisms.HEADERS, mechanisms.rows())
        console(WIDTH).print(Text(mechanisms.NOTE))
        _print_recipes()
    return 0


def _print_laws() -> None:
    from subquad.attention import LAWS
    from subquad.cli import mechanisms

    table, reasons = mechanisms.law_rows()
    _print_table(("law", "what it asks for"), ((str(law), text) for law, text in LAWS.items()))
    _print_table(mechanisms.LAW_HEADERS, table)
    console(WIDTH).print(Text("\n".join(reasons)))


def _check(name: str) -> None:
    """Raise `ValueError` for what is neither a mechanism nor a stack."""
    from subquad.attention import names
    from subquad.models.stacks import STACKS

    if name not in {*names(), *STACKS}:
        raise ValueError(f"unknown attention {name!r}; {suggest(name, {*names(), *STACKS})}")


def _print_options(name: str) -> None:
    from subquad.attention import mechanism
    from subquad.cli.mechanisms import options
    from subquad.models.stacks import STACKS

    cls = STACKS[name] if name in STACKS else mechanism(name)
    own = STACKS[name].options if name in STACKS else mechanism(name).Config
    console(WIDTH).print(Text(f"{name}: {cls.summary}\n{cls.paper}", style="bold"))
    _print_table(("option", "type", "default", ""), options(own))
    console(WIDTH).print(
        Text(
            "A model gives dim, num_heads, bias, dropout and, where they are, num_kv_heads, head_dim, qk_norm, "
            "norm_eps, qkv_bias, out_bias, rope, rope_base, rope_fraction and rope_scaling."
        )
    )
    console(WIDTH).print(Text(f"subquad train --model.attention {name} --model.options.{name}.OPTION VALUE"))


def _print_recipes() -> None:
    _print_table(("recipe", ""), ((name, _first_comment(recipe_path(name))) for name in recipes()))
    console(WIDTH).print(Text("subquad train --recipe NAME"))


def _first_comment(recipe: Path) -> str:
    """What a recipe says about itself in its first line."""
    line = recipe.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def _print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Without a width to keep to only the column of explanations, which has no header, is wrapped."""
    table, lines = Table(box=SIMPLE_HEAD, pad_edge=False), list(rows)
    for i, header in enumerate(headers):
        longest = max(cell_len(line[i]) for line in (headers, *lines))
        whole = longest if header and not has_width() else None
        table.add_column(header, no_wrap=i == 0, min_width=whole, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    endless = Console(width=1000)
    needed = Measurement.get(endless, endless.options, table).minimum
    console(max(WIDTH, needed)).print(table)
