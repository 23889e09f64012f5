"""`subquad list`: the mechanisms, the options of one, the recipes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from subquad.attention import build, mechanism, names
from subquad.attention.base import LAWS
from subquad.cli.arguments import Parser
from subquad.cli.tables import console, has_width
from subquad.config import suggest
from subquad.models.stacks import STACKS
from subquad.options import options
from subquad.recipes import recipe_path, recipes

WIDTH = 160
"""Columns of what is printed to no terminal; a table whose rows need more has more."""
HEADERS = ("name", "what a token sees", "form", "cost in T", "state", "paper")
LAW_HEADERS = ("name", "form", *(str(law) for law in LAWS))
OPTION_HEADERS = ("form by option", "laws in make test", "laws in make test-long", "")
TESTS = Path(__file__).parents[2] / "tests" / "attention"
"""Contract tests of the repository, which an installed package lacks."""
TRIED = (
    "`make test` tests each law with `yes` on the causal and bidirectional forms (laws 6, 12 and 14 on one of them; "
    "law 12 by `aot_eager` on one mechanism of each engine, law 14 in float16). With other options it tests the "
    "laws that they can break; `make test-long` tests the rest"
)
STATE_OF = {"dim": 256, "num_heads": 4}
STATE_AFTER = 16_384
NOTE = (
    f"state: of one layer (dim {STATE_OF['dim']}, {STATE_OF['num_heads']} heads, default options, float32) after "
    f"{STATE_AFTER:,} tokens"
)


def run(arguments: Sequence[str]) -> int:
    """Parse, print, return the exit status."""
    parser = Parser("list [NAME]", "The attention mechanisms, the options of one of them, or the recipes.")
    parser.add_optional("name", "A mechanism, to list its options.")
    parser.add_argument("--recipes", action="store_true", help="List the recipes only.")
    parser.add_argument(
        "--laws", action="store_true", help="Which laws of the contract each mechanism keeps, and why not."
    )
    parser.add_argument("--markdown", action="store_true", help="Print the table of mechanisms in Markdown.")
    chosen = parser.parse_args(arguments)
    if chosen.recipes:
        _print_recipes()
        return 0
    if chosen.laws:
        table, reasons = _law_rows()
        _print_table(("law", "what it asks for"), ((str(law), text) for law, text in LAWS.items()))
        _print_table(LAW_HEADERS, table)
        console(WIDTH).print(Text("\n".join(reasons)))
        by_option = list(_option_rows())
        console(WIDTH).print(Text(f"\n{TRIED}{':' if by_option else ' (tests/attention in the repository).'}"))
        if by_option:
            _print_table(OPTION_HEADERS, by_option)
    elif chosen.markdown:
        sys.stdout.write(markdown() + "\n")
    elif chosen.name is not None:
        known = {*names(), *STACKS}
        with parser.checking():
            if chosen.name not in known:
                raise ValueError(f"unknown attention {chosen.name!r}; {suggest(chosen.name, known)}")
        _print_options(chosen.name)
    else:
        _print_table(HEADERS, _rows())
        console(WIDTH).print(Text(NOTE))
        _print_recipes()
    return 0


def _print_options(name: str) -> None:
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
    """Return what a recipe says about itself in its first line."""
    line = recipe.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def _print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; without a width to keep to only the column of explanations, which has no header, is wrapped."""
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


def _rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each mechanism and each stack under `HEADERS`."""
    for name in names():
        cls = mechanism(name)
        yield name, cls.summary, _form(cls.forms), cls.cost_order, _state(name), cls.paper
    for stack in STACKS.values():
        yield stack.name, stack.summary, _form(stack.forms), stack.cost_order, stack.state, stack.paper


@cache
def _state(name: str) -> str:
    """Return the size of a layer's state, which takes long to count for some; `none` without a causal form."""
    if "causal" not in mechanism(name).forms:
        return "none"
    with torch.device("meta"):
        layer = build(name, **STATE_OF)
    return _size(layer.state_bytes(STATE_AFTER)) + (", grows" if layer.state_grows else "")


def _form(forms: tuple[str, ...]) -> str:
    """Return `causal`, `bidirectional` or `both`."""
    return "both" if len(forms) == 2 else forms[0]


def _size(number: int) -> str:
    """Return bytes to three digits."""
    amount, units = float(number), ["B", "KiB", "MiB", "GiB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.3g} {units[0]}"


def _law_rows() -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a row for each form under `LAW_HEADERS`, `-` for laws that do not apply, and the reasons."""
    table: list[tuple[str, ...]] = []
    reasons: dict[tuple[str, str], list[int]] = {}
    for name in names():
        cls = mechanism(name)
        cases: list[tuple[str, dict[str, Any]]] = [(which, {"causal": which == "causal"}) for which in cls.forms]
        if cls.exempting:
            cases.append((", ".join(f"{key}={value}" for key, value in cls.exempting.items()), cls.exempting))
        for which, chosen in cases:
            with torch.device("meta"):
                exempt = build(name, **STATE_OF, **chosen).exemptions()
            table.append((name, which, *("-" if law in exempt else "yes" for law in LAWS)))
            for law, reason in exempt.items():
                reasons.setdefault((which if which == "bidirectional" else f"{name}, {which}", reason), []).append(law)
    for stack in STACKS.values():
        for which in stack.forms:
            table.append((stack.name, which, *("-" if law in dict(stack.exemptions) else "yes" for law in LAWS)))
            for law, reason in stack.exemptions:
                reasons.setdefault(("stacks" if law == 1 else which, reason), []).append(law)
    lines = []
    for (whose, reason), laws in sorted(reasons.items()):
        numbers = [str(law) for law in sorted(set(laws))]
        lines.append(f"{whose}, law{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {reason}")
    return table, lines


def _option_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row under `OPTION_HEADERS` for each contract test that leaves laws to `make test-long`."""
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            given = {ast.unparse(line.targets[0]): line.value for line in node.body if isinstance(line, ast.Assign)}
            if "laws" in given:
                name, chosen, laws = (ast.literal_eval(given[key]) for key in ("name", "options", "laws"))
                with torch.device("meta"):
                    exempt = build(name, dim=16, num_heads=2, **chosen).exemptions()
                rest = [law for law in LAWS if law not in exempt and law not in laws]
                shown = ", ".join(f"{key}={value}" for key, value in chosen.items())
                yield node.name, " ".join(map(str, laws)), " ".join(map(str, rest)), f"{name}: {shown}"


def markdown() -> str:
    """Return the table of mechanisms in Markdown."""
    lines = [HEADERS, tuple("---" for _ in HEADERS)]
    lines += [(f"`{name}`", *rest) for name, *rest in _rows()]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
    return f"{table}\n\n*{NOTE}.*"
