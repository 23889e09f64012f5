"""Tables of the registered mechanisms and of their options."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

import torch

from subquad.attention import LAWS, build, mechanism, names
from subquad.config import Config
from subquad.models.stacks import STACKS

HEADERS = ("name", "what a token sees", "form", "cost in T", "state", "paper")
LAW_HEADERS = ("name", "form", *(str(law) for law in LAWS))
STATE_OF = {"dim": 256, "num_heads": 4}
STATE_AFTER = 16_384
NOTE = (
    f"state: of one layer (dim {STATE_OF['dim']}, {STATE_OF['num_heads']} heads, default options, float32) after "
    f"{STATE_AFTER:,} tokens"
)


class Option(NamedTuple):
    """An option of a mechanism, as text."""

    name: str
    type: str
    default: str
    help: str


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each mechanism and each stack under `HEADERS`."""
    for name in names():
        cls = mechanism(name)
        state = "none"
        if "causal" in cls.forms:
            with torch.device("meta"):
                layer = build(name, **STATE_OF)
            state = size(layer.state_bytes(STATE_AFTER)) + (", grows" if cls.state_grows else "")
        yield name, cls.summary, form(cls.forms), cls.cost_order, state, cls.paper
    for stack in STACKS.values():
        yield stack.name, stack.summary, form(stack.forms), stack.cost_order, stack.state, stack.paper


def form(forms: tuple[str, ...]) -> str:
    """`causal`, `bidirectional` or `both`."""
    return "both" if len(forms) == 2 else forms[0]


def size(number: int) -> str:
    """Bytes to three digits."""
    amount, units = float(number), ["B", "KiB", "MiB", "GiB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.3g} {units[0]}"


def law_rows() -> tuple[list[tuple[str, ...]], list[str]]:
    """A row for each form of each mechanism under `LAW_HEADERS`, `-` for a law that does not apply, and the reasons."""
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


def markdown() -> str:
    """The table of `rows` in Markdown."""
    lines = [HEADERS, tuple("---" for _ in HEADERS)]
    lines += [(f"`{name}`", *rest) for name, *rest in rows()]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
    return f"{table}\n\n*{NOTE}.*"


def options(config: type[Config]) -> list[Option]:
    """The options in a configuration; a mechanism's `dim` and `num_heads`, which the model sets, come first."""
    hints = get_type_hints(config)
    helps = field_help(config)
    return [
        Option(field.name, _type_name(hints[field.name]), _default(field), helps.get(field.name, ""))
        for field in dataclasses.fields(config)
    ]


def field_help(cls: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass and of its bases."""
    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = _string(below)
                if text:
                    helps[statement.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return helps


def _string(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    return "required"
