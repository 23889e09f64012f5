"""Tables of the registered mechanisms and of their options."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

from subquad.attention import Attention, mechanism, names

HEADERS = ("name", "what a token sees", "causal", "cost in T", "state", "paper")


class Option(NamedTuple):
    """An option of a mechanism, as text."""

    name: str
    type: str
    default: str
    help: str


def rows() -> Iterator[tuple[str, ...]]:
    """A row for each mechanism under `HEADERS`."""
    for name in names():
        cls = mechanism(name)
        causal = "yes" if cls.causal else "no"
        state = "grows" if cls.state_grows else "constant"
        yield name, cls.summary, causal, cls.cost_order, state if cls.causal else "none", cls.paper


def markdown() -> str:
    """The table of `rows` in Markdown."""
    lines = [HEADERS, tuple("---" for _ in HEADERS)]
    lines += [(f"`{name}`", *rest) for name, *rest in rows()]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def options(cls: type[Attention]) -> list[Option]:
    """The options of a mechanism; `dim` and `num_heads`, which the model sets, come first."""
    hints = get_type_hints(cls.Config)
    helps = field_help(cls.Config)
    return [
        Option(field.name, _type_name(hints[field.name]), _default(field), helps.get(field.name, ""))
        for field in dataclasses.fields(cls.Config)
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
