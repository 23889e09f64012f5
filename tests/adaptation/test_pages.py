"""docs/convert.md and docs/extend.md: their tables are those of the results, and their commands are accepted."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from subquad.adaptation import ConvertConfig
from subquad.cli import convert, extend, generate
from subquad.cli.arguments import data_is_a_path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("convert", "extend")}
COMMANDS = re.findall(r"^subquad (?:convert|extend|generate) .*", "\n".join(PAGES.values()), re.MULTILINE)


@pytest.fixture
def makers(monkeypatch):
    """The programs that write the pages' tables."""
    monkeypatch.syspath_prepend(str(DOCS))
    return {name: importlib.import_module(f"make_{name}") for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_are_those_of_the_results(makers, name):
    make = makers[name]
    blocks = make.blocks() if name == "convert" else make.BLOCKS
    assert make.pages.rewritten(PAGES[name], blocks) == PAGES[name], f"write them again: python docs/make_{name}.py"
    assert set(re.findall(r"<!-- ([a-z-]+) -->", PAGES[name])) == set(blocks)
    for picture in re.findall(r"images/(\w+\.png)", PAGES[name]):
        assert (make.pages.IMAGES / picture).is_file()


@pytest.mark.parametrize("command", [line for line in COMMANDS if "..." not in line])
def test_the_commands_are_accepted(command):
    _, name, *words = shlex.split(command)
    if name == "convert":
        convert.make_parser().parse_args(data_is_a_path(words))
    elif name == "extend":
        extend.make_parser().parse_args(data_is_a_path(["--model", *words]))
    elif name == "generate":
        generate.make_parser().parse_args(words)


def test_the_reports_are_those_of_the_commands(makers):
    make = makers["convert"]
    reports = json.loads(make.RESULT.read_text(encoding="utf-8"))
    for name, added in make.COMMANDS.items():
        parser = convert.make_parser()
        words = shlex.split(f"{make.COMMON} {added} --out runs/stories-{name}")[2:]
        values = parser.instantiate(parser.parse_args(data_is_a_path(words)))
        config = ConvertConfig(**{field: values[field] for field in ConvertConfig.__dataclass_fields__})
        assert (reports[name]["settings"], reports[name]["model"]) == (config.to_dict(), "runs/stories260K")
