"""docs/convert.md and docs/extend.md: their tables are those of the results, and their commands are accepted."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from subquad.cli.arguments import data_is_a_path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("convert", "extend")}
COMMANDS = re.findall(r"^subquad (?:convert|extend|generate) .*", "\n".join(PAGES.values()), re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_are_those_of_the_results(monkeypatch, name):
    monkeypatch.syspath_prepend(str(DOCS))
    make = importlib.import_module(f"make_{name}")
    blocks = make.blocks() if name == "convert" else make.BLOCKS
    assert make.pages.rewritten(PAGES[name], blocks) == PAGES[name], f"write them again: python docs/make_{name}.py"
    assert set(re.findall(r"<!-- ([a-z-]+) -->", PAGES[name])) == set(blocks)
    for picture in re.findall(r"images/(\w+\.png)", PAGES[name]):
        assert (make.pages.IMAGES / picture).is_file()


@pytest.mark.parametrize("command", [line for line in COMMANDS if "..." not in line])
def test_the_commands_are_accepted(command):
    _, name, *words = shlex.split(command)
    words = data_is_a_path(["--model", *words] if name == "extend" else words)
    importlib.import_module(f"subquad.cli.{name}").make_parser().parse_args(words)
