"""docs/costs.md: its tables are what the command prints, and its commands are ones that the parsers take."""

import re
import shlex
from pathlib import Path

import pytest

from experiments.llp_table6 import command as llp_table6
from subquad.cli import cost
from subquad.cli.show import PICTURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/costs.md").read_text(encoding="utf-8")
TABLES = re.findall(
    r"<!-- \w+: written by `(subquad cost|python -m experiments\.llp_table6) (.*?)` -->\n\n(.*?)\n\n<!-- /",
    PAGE,
    re.DOTALL,
)
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def test_the_page_has_both_tables():
    assert [program for program, _, _ in TABLES] == ["subquad cost", "python -m experiments.llp_table6"]


@pytest.mark.parametrize(("program", "options", "table"), TABLES, ids=[program for program, _, _ in TABLES])
def test_a_table_is_what_its_command_prints(capsys, program, options, table):
    run = cost.run if program == "subquad cost" else llp_table6.run
    assert run(options.split()) == 0
    assert capsys.readouterr().out.strip() == table, f"write the table in docs/costs.md again: {program} {options}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_its_parser_takes(command):
    name, *arguments = shlex.split(command)[1:]
    parser = cost.make_parser() if name == "cost" else PICTURES[arguments.pop(0)][0]()
    parser.parse_args(arguments)


def test_the_pages_pictures_are_there():
    pictures = re.findall(r"\]\((images/[^)]+)\)", PAGE)
    assert len(pictures) == 3
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)
