"""docs/performance.md: its tables are those of the results, and its pictures are there."""

import dataclasses
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from subquad.bench.command import PARSERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture
def make():
    """docs/make_performance.py as a module."""
    spec = importlib.util.spec_from_file_location("make_performance", ROOT / "docs" / "make_performance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_results(make):
    assert make.rewritten(PAGE) == PAGE, "write them again: python docs/make_performance.py"
    assert set(re.findall(r"<!-- ([a-z-]+) -->", PAGE)) == set(make.BLOCKS)


def test_the_pictures_are_there():
    for picture in re.findall(r"\]\((images/[^)]+)\)", PAGE):
        assert (ROOT / "docs" / picture).is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_its_parser_takes(command):
    program, bench, what, *rest = shlex.split(command)
    assert (program, bench) == ("subquad", "bench")
    PARSERS[what]().parse_args(rest)


def test_aims_are_judged_and_ten_percent_below_counts_as_met(make, made_up, tmp_path, monkeypatch):
    """latte: 1,024 tokens 1.8x for an aim of 2 and 1.7x for one of 2; 4,096 tokens not measured."""
    monkeypatch.setattr(make, "RESULTS", tmp_path)
    rows = [
        {**row, "name": "latte", "tokens": 1024, "latents": 64, "pass": which, "times_faster": faster}
        for row, which, faster in zip(made_up.rows, ("forward", "forward_backward"), (1.8, 1.7), strict=False)
    ]
    dataclasses.replace(made_up, rows=rows).save(tmp_path, plots=False)
    table = make.cpu_aims()
    assert "| latte | 1.8 / **1.7** (aim 2 / 2) | - / - (aim 7 / 7) |" in table


def test_what_was_not_measured_says_how_to(make, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "RESULTS", tmp_path)
    assert make.BLOCKS["cpu-decode"]() == "Not measured yet: `subquad bench decode --out benchmarks/results`."
    assert "No figure comes from a GPU yet" in make.gpu_aims()
    (tmp_path / "gpu_ops.json").write_text(json.dumps({"step": {"status": "stopped after 3 s"}}))
    assert make.loaded("gpu_ops") is None


def test_the_gpu_aims_compare_lines_of_one_run(make, made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "RESULTS", tmp_path)
    base = {**made_up.rows[0], "pass": "forward_backward"}
    times = {
        ("sdpa", 16384): 12.0,
        ("llp", 16384): 2.0,
        ("flex, llp", 16384): 3.0,
        ("sdpa", 2048): 1.0,
        ("llp", 2048): 2.0,
    }
    rows = [
        {**base, "name": name, "tokens": tokens, "median_s": seconds, "segment": None if name == "sdpa" else 256}
        for (name, tokens), seconds in times.items()
    ]
    settings = {**made_up.settings, "device": "cuda"}
    dataclasses.replace(made_up, rows=rows, settings=settings).save(tmp_path, plots=False)
    table = make.gpu_aims()
    assert "| llp, segment 256, over flash SDPA: 6 | T = 16,384 | 6.00 | met |" in table
    assert "| llp, segment 256, over flash SDPA: 1 | T = 2,048 | 0.50 | **missed** |" in table
    assert "| llp, segment 256, over FlexAttention with its mask: 1.2 | T = 16,384 | 1.50 | met |" in table
    assert "| llp, segment 512, over flash SDPA: 6 | T = 16,384 | - | not measured |" in table
