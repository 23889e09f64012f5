"""docs/convert.md and docs/extend.md: their tables are those of the results, and their commands are accepted."""

import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from benchmarks import adaptations
from subquad.adaptation import extension_report
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention": "full"}, "attention must be llp or shifted, got 'full' in "),
        ({"resumed": True}, "was resumed, so its times are only those since then; run it in a new folder"),
    ],
)
def test_reports_that_the_page_cannot_show_are_refused(tmp_path, monkeypatch, change, said):
    monkeypatch.setattr(adaptations, "RESULTS", tmp_path)
    (tmp_path / extension_report.REPORT).write_text(json.dumps({"model": "m", "attention": "llp"} | change))
    with pytest.raises(ValueError, match=said):
        adaptations.main(["--extend", str(tmp_path)])


def test_kept_reports_are_the_committed_ones(tmp_path, monkeypatch):
    """Each kind is kept from a folder as a run leaves it, and drawn."""
    results = adaptations.RESULTS
    monkeypatch.setattr(adaptations, "IMAGES", tmp_path)
    monkeypatch.setattr(adaptations, "RESULTS", tmp_path)
    shutil.copy(results / "extend_shifted.json", tmp_path)
    for name, report in json.loads((results / "convert.json").read_text()).items():
        (tmp_path / "runs" / f"stories-{name}").mkdir(parents=True)
        (tmp_path / "runs" / f"stories-{name}" / "report.json").write_text(json.dumps(report))
    (tmp_path / extension_report.REPORT).write_bytes((results / "extend_llp.json").read_bytes())
    adaptations.main(["--convert", str(tmp_path / "runs"), "--extend", str(tmp_path), "--trials", str(tmp_path)])
    for name in ("convert", "extend_llp"):
        assert json.loads((tmp_path / f"{name}.json").read_text()) == json.loads((results / f"{name}.json").read_text())
    (trial,) = json.loads((tmp_path / "extend_trials.json").read_text())
    assert trial.keys() == json.loads((results / "extend_trials.json").read_text())[0].keys()
    assert {file.name for file in tmp_path.glob("*.png")} == {"convert.png", "extend_llp.png", "extend_shifted.png"}
