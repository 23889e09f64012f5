"""No library file or function grows past what can be read in one sitting."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "subquad").rglob("*.py"))
FILE_LINES = 300
FUNCTION_LINES = 60


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A kernel is one piece: it may be as long as it needs to be."""
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in decorators)


def long_functions(source: str) -> list[str]:
    """The functions of more than `FUNCTION_LINES` lines, signature included, docstring not; kernels are left out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node):
            continue
        lines = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node, clean=False) is not None:
            lines -= node.body[0].end_lineno - node.body[0].lineno + 1
        if lines > FUNCTION_LINES:
            found.append(f"{node.name} (line {node.lineno}): {lines} lines")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_library_file_is_short_and_so_are_its_functions(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= FILE_LINES
    assert long_functions(source) == []


def test_the_count_sees_a_long_function():
    body = "".join(f"    x{i} = {i}\n" for i in range(FUNCTION_LINES))
    assert long_functions(f"def short():\n    pass\n\ndef long():\n{body}") == ["long (line 4): 61 lines"]
    assert long_functions(f"@triton.jit\ndef kernel():\n{body}") == []
    assert long_functions(f'def described():\n    """{chr(10) * 99}"""\n    return 1\n') == []


def test_the_independence_contract_is_for_every_mechanism():
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = [c for c in contracts if c["name"].startswith("mechanisms")]
    assert contract["modules"] == ["subquad.attention.*"]
    shared = {f.stem for f in (ROOT / "subquad/attention").glob("*.py") if f.name.startswith("_")} - {"__init__"}
    allowed = {f"subquad.attention.* -> subquad.attention.{name}" for name in shared | {"base"}}
    assert set(contract["ignore_imports"]) == allowed
