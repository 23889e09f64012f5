"""docs/auditing.md: its Python runs, its commands are accepted, and its table has every check."""

import re
import runpy
import shlex
from pathlib import Path

from subquad.cli.audit import make_parser
from subquad.evaluation.audit.report import CHECKS

PAGE = (Path(__file__).resolve().parents[2] / "docs/auditing.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_s_python_runs_and_its_commands_are_accepted(tmp_path, capsys):
    for number, block in enumerate(PYTHON):
        file = tmp_path / f"{number}.py"
        file.write_text(block, encoding="utf-8")
        assert runpy.run_path(str(file))["report"].passed
    commands = re.findall(r"^subquad audit (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        make_parser().parse_args(shlex.split(command))


def test_the_page_s_table_and_example_have_every_check():
    table = "".join(line.partition(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([^`]+)`", table)) == set(CHECKS)
    example = PAGE.partition("## An example")[2].split("```")[1]
    assert [name for name in CHECKS if f"\n{name} " in example] == list(CHECKS)
    assert "failed: cache, several tokens" in example
