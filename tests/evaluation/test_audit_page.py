"""docs/auditing.md: its Python runs, its commands are accepted, and its table has every check."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from subquad.cli.audit import make_parser
from subquad.evaluation.audit.report import CHECKS

PAGE = (Path(__file__).resolve().parents[2] / "docs/auditing.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_the_page_s_python_runs(number, tmp_path, capsys):
    file = tmp_path / "block.py"
    file.write_text(PYTHON[number], encoding="utf-8")
    assert runpy.run_path(str(file))["report"].passed


def test_the_page_s_commands_are_accepted():
    commands = re.findall(r"^subquad audit (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        make_parser().parse_args(shlex.split(command))


def test_the_page_s_table_has_every_check():
    table = "".join(line.partition(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([^`]+)`", table)) == set(CHECKS)


def test_the_page_s_example_is_a_report():
    example = PAGE.partition("## An example")[2].split("```")[1]
    assert [name for name in CHECKS if f"\n{name} " in example] == list(CHECKS)
    assert "failed: cache, several tokens" in example
