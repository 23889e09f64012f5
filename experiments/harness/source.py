"""Hash the code that computes results, without its words: comments, blank lines and docstrings."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import subquad
from subquad.config import digest

ROOMS = ("ops", "attention", "layers", "models")
"""Folders of the package whose code computes what experiments measure."""


@cache
def library_hash() -> str:
    """Return a hash of the code in `ROOMS`: a result with another one was measured with another library."""
    root = Path(subquad.__file__).parent
    files = sorted(file for room in ROOMS for file in (root / room).rglob("*.py"))
    return digest([[file.relative_to(root).as_posix(), bare(file.read_text(encoding="utf-8"))] for file in files])[:12]


def bare(source: str) -> str:
    """Return source code without comments, blank lines and docstrings."""
    return ast.unparse(without_docstrings(ast.parse(source)))


def without_docstrings(node: ast.AST) -> ast.AST:
    """Remove statements that are only a string, those of attributes too."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner.body = [line for line in inner.body if not _is_text(line)] or [ast.Pass()]
    return node


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
