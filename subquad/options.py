"""The options of a configuration as help shows them: the docstring under a field is its meaning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any

from subquad.config import type_hints

WIDTH = 100
"""Columns of a docstring's options."""


def options(config: type[Any]) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and meaning of each field of the dataclass `config`, inherited ones first.

    A meaning is empty where the source cannot be read.
    """
    hints, meanings, found = type_hints(config), dict[str, str](), []
    for cls in reversed(config.__mro__):
        meanings |= _meanings(cls)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        found.append((field.name, kind, _default(field), meanings.get(field.name, "")))
    return found


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    return "required"


@cache
def _meanings(cls: type) -> dict[str, str]:
    """Return the text under each field in the body of `cls`, on one line; none without the source."""
    try:
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # frozen or built in
        return {}
    found = {}
    for field, text in pairwise(made.body if isinstance(made, ast.ClassDef) else []):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[name] = " ".join(meaning.split())
    return found


class DocWithOptions:
    """The docstring of a class that is followed by the options of its `Config`; made when it is read, not at import."""

    def __init__(self, text: str | None) -> None:
        self.text = inspect.cleandoc(text or "")

    def __get__(self, instance: object, owner: type[Any]) -> str:
        lines = [self.text, "", "Options:"]
        for name, kind, default, meaning in options(owner.Config):
            lines.append(f"    {name}: {kind}, {default if default == 'required' else f'default {default}'}")
            lines += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
        return "\n".join(lines).strip()
