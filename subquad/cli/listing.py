"""`subquad list`: the mechanisms, the options of one, the recipes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from subquad.attention import build, mechanism, names
from subquad.attention.laws import Law
from subquad.cli.parser import PlainParser, in_yaml
from subquad.cli.tables import print_table, print_text
from subquad.config import suggest
from subquad.models.stacks import STACKS
from subquad.options import options
from subquad.program import command
from subquad.recipes import recipe_path, recipes

CELL = 16
"""Columns of a type, cost or state, which are wrapped beyond."""
HEADERS = ("name", "what a token sees", "form", "cost in T", "state", "paper")
SPARE = ("paper", "form", "cost in T", "state")
LAW_HEADERS = ("name", "form", "laws that hold")
STATE_OF = {"dim": 256, "num_heads": 4}
STATE_AFTER = 16_384
NOTE = (
    f"state: of one layer (dim {STATE_OF['dim']}, {STATE_OF['num_heads']} heads, default options, float32) after "
    f"{STATE_AFTER:,} tokens"
)


def run(arguments: Sequence[str]) -> int:
    """Parse, print, return the exit status."""
    parser = PlainParser("list [NAME]", "The attention mechanisms, the options of one of them, or the recipes.")
    parser.add_argument("name", nargs="?", help="A mechanism, to list its options.")
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
        laws = [(law.value, law.asks) for law in Law]
        print_table("", ("law", "what it asks for"), laws, text="what it asks for")
        print_table("", LAW_HEADERS, table, text="laws that hold", justify="left")
        print_text("\n".join(reasons))
    elif chosen.markdown:
        sys.stdout.write(markdown() + "\n")
    elif chosen.name is not None:
        known = {*names(), *STACKS}
        with parser.checking():
            if chosen.name not in known:
                raise ValueError(f"unknown attention {chosen.name!r}; {suggest(chosen.name, known)}")
        _print_options(chosen.name)
    else:
        rows = [(*row[:3], *(textwrap.fill(cell, CELL) for cell in row[3:5]), row[5]) for row in _rows()]
        print_table(
            "", HEADERS, rows, spare=SPARE, elsewhere=" or by --markdown", text="what a token sees", justify="left"
        )
        print_text(NOTE)
        _print_recipes()
    return 0


def _print_options(name: str) -> None:
    cls = STACKS[name] if name in STACKS else mechanism(name)
    own = STACKS[name].options if name in STACKS else mechanism(name).Config
    print_text(f"{name}: {cls.summary}\n{cls.paper}", style="bold")
    rows = [
        (option, textwrap.fill(in_yaml(kind), CELL), in_yaml(default), in_yaml(meaning))
        for option, kind, default, meaning in options(own)
    ]
    print_table("", ("option", "type", "default", ""), rows, spare=("type",), text="", justify="left")
    print_text(
        "A model gives dim, num_heads, bias, dropout and, where they are, num_kv_heads, head_dim, qk_norm, "
        "norm_eps, qkv_bias, out_bias, rope, rope_base, rope_fraction and rope_scaling."
    )
    line = command("train", "--model.attention", name, f"--model.options.{name}.OPTION", "VALUE")
    print_text(line, wraps=False)


def _print_recipes() -> None:
    rows = [(name, _first_comment(recipe_path(name))) for name in recipes()]
    print_table("", ("recipe", ""), rows, text="")
    print_text(command("train", "--recipe", "NAME"), wraps=False)


def _first_comment(recipe: Path) -> str:
    """Return what a recipe says about itself in its first line."""
    line = recipe.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


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
    """Return a row for each form under `LAW_HEADERS`, and the reasons why laws do not apply."""
    table: list[tuple[str, ...]] = []
    reasons: dict[tuple[str, str], set[Law]] = {}
    for name in names():
        cls = mechanism(name)
        cases: list[tuple[str, dict[str, Any]]] = [(which, {"causal": which == "causal"}) for which in cls.forms]
        if cls.exempt_options:
            cases.append((", ".join(f"{key}={value}" for key, value in cls.exempt_options.items()), cls.exempt_options))
        for which, chosen in cases:
            with torch.device("meta"):
                exempt = build(name, **STATE_OF, **chosen).exemptions()
            table.append((name, which, _kept(exempt)))
            for law, reason in exempt.items():
                reasons.setdefault((which if which == "bidirectional" else f"{name}, {which}", reason), set()).add(law)
    for stack in STACKS.values():
        for which in stack.forms:
            table.append((stack.name, which, _kept(dict(stack.exemptions))))
            for law, reason in stack.exemptions:
                every = all((law, reason) in other.exemptions for other in STACKS.values())
                whose = "stacks" if every else which if which == "bidirectional" else stack.name
                reasons.setdefault((whose, reason), set()).add(law)
    lines = []
    for (whose, reason), laws in sorted(reasons.items()):
        lines.append(f"{whose}, {_in_order(laws)}: {reason}")
    return table, lines


def _kept(exempt: Collection[Law]) -> str:
    """Return `all`, or all but those in `exempt`."""
    return f"all but {_in_order(exempt)}" if exempt else "all"


def _in_order(laws: Collection[Law]) -> str:
    """Return the names of the laws in the order of their list."""
    return ", ".join(law for law in Law if law in laws)


def markdown() -> str:
    """Return the table of mechanisms in Markdown."""
    lines = [HEADERS, tuple("---" for _ in HEADERS)]
    lines += [(f"`{name}`", *rest) for name, *rest in _rows()]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
    return f"{table}\n\n*{NOTE}.*"
