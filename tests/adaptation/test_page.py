"""docs/convert.md: its tables are those of the results, and its commands are accepted."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from subquad.cli import convert, generate

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture
def make(monkeypatch):
    """docs/make_convert.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("make_convert")


def test_the_tables_are_those_of_the_results(make):
    assert make.pages.rewritten(PAGE, make.blocks()) == PAGE, "write them again: python docs/make_convert.py"
    assert set(re.findall(r"<!-- ([a-z-]+) -->", PAGE)) == set(make.blocks())


@pytest.mark.parametrize("command", [line for line in LINES if line.startswith("subquad convert ")])
def test_the_commands_are_accepted(command):
    words = shlex.split(command)[2:]
    if "..." not in words:
        convert.make_parser().parse_args(convert.data_is_a_path(words))


@pytest.mark.parametrize("command", [line for line in LINES if line.startswith("subquad generate ")])
def test_the_texts_are_asked_for_rightly(command):
    generate.make_parser().parse_args(shlex.split(command)[2:])


def test_the_reports_are_those_of_the_commands(make):
    """What was collected was made by the commands that the page shows."""
    reports = json.loads(make.RESULT.read_text(encoding="utf-8"))
    for name, added in make.COMMANDS.items():
        parser = convert.make_parser()
        words = shlex.split(f"{make.COMMON} {added} --out runs/stories-{name}")[2:]
        values = parser.instantiate(parser.parse_args(convert.data_is_a_path(words)))
        config = convert.ConvertConfig(**{field: values[field] for field in convert.ConvertConfig.__dataclass_fields__})
        assert reports[name]["settings"] == config.to_dict()
        assert reports[name]["model"] == "runs/stories260K"
