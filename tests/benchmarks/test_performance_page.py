"""docs/performance.md and benchmarks/results: tables are those of the results, and pictures are there."""

import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import runs
from benchmarks.command import make_parser
from benchmarks.config import LayersConfig
from benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
STEMS = ("cpu_ops", "cpu_layers", "cpu_model", "cpu_decode", "cpu_decode_65536", "cpu_precision", "five_mechanisms")
MACHINE = "a processor, PyTorch threads: 2"
EARLIER = {"date": "2026-01-01", "commit": "old", "command": "", "found": {"latte, forward | T = 1,024": 5.0}}


@pytest.fixture
def make(monkeypatch):
    """docs/make_performance.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("make_performance")


def test_the_tables_are_those_of_the_results_and_the_pictures_are_there(make):
    assert make.pages.rewritten(PAGE, make.BLOCKS) == PAGE, "write them again: python docs/make_performance.py"
    assert set(re.findall(r"<!-- ([a-z-]+) -->", PAGE)) == set(make.BLOCKS)
    assert all((ROOT / "docs" / picture).is_file() for picture in re.findall(r"\]\((images/[^)]+)\)", PAGE))


def test_the_table_of_precisions_is_that_of_the_results(make):
    page = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert make.pages.rewritten(page, make.PRECISION) == page, "write it again: python docs/make_performance.py"
    assert re.findall(r"<!-- ([a-z-]+) -->", page) == ["errors"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_its_parser_takes(command):
    *program, what = (words := shlex.split(command))[:4]
    assert program == ["python", "-m", "benchmarks"]
    make_parser(what).parse_args(words[4:])


@pytest.mark.parametrize("stem", STEMS)
def test_the_files_of_tables_are_those_of_the_results(make, stem):
    text = (make.pages.RESULTS / f"{stem}.md").read_text(encoding="utf-8")
    made = make.five_mechanisms() if stem == "five_mechanisms" else make.tables(stem, make.loaded(stem))
    assert text == made, "write them again: python docs/make_performance.py"
    assert all((make.pages.RESULTS / picture).is_file() for picture in re.findall(r"\]\(([^)]+png)\)", text))


def test_repeats_are_kept_by_machine_and_shown_in_their_order(make, made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    monkeypatch.setattr(make.pages, "RESULTS", tmp_path)
    runs.keep(tmp_path / "cpu_ops_runs.json", [{**EARLIER, "machine": "another"}, {**EARLIER, "machine": MACHINE}])
    files = []
    for n, speeds in enumerate([(2.3, 2.9), (2.4, 3.0), (9.0, 1.0)]):
        rows = [
            {**row, "name": "latte", "tokens": 1024, "latents": 64, "pass": which, "times_faster": faster}
            for row, which, faster in zip(made_up.rows, ("forward", "forward_backward"), speeds, strict=False)
        ]
        files.append(dataclasses.replace(made_up, rows=rows).save(tmp_path / str(n)))
    runs.main([*map(str, files)])
    heading, shown, origin, other, *_ = make.repeats("ops")
    assert (heading, other) == (f"## Each of 3 runs: {MACHINE}", "## One run: another")
    assert "| latte, forward | 2.3, 2.4, 9 | - | - |" in shown
    assert "| latte, forward + backward | 2.9, 3, 1 | - | - |" in shown
    assert "| latte, in + out / peak memory | 1 | - | - |" in shown
    assert origin == "`python -m benchmarks ops`: 2026-01-02, commit abc."
    assert make.of_runs("ops", "latte, forward | T = 1,024") == [2.3, 2.4, 9.0, 5.0]
    assert make.by_length("ops", "latte, forward") == ["2.3 to 9.0", "-", "-"]
    other = dataclasses.replace(made_up, what="layers").save(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        runs.main([str(files[0]), str(other)])


def test_a_range_is_that_of_the_least_and_the_largest(make):
    assert make.pages.span([2.0, 0.84, 11.6]) == "0.8 to 12"
    assert make.pages.span([1.04, 0.96]) == "1.0"
    assert make.pages.span([]) == "-"


MORE = ("ops", "layers", "model", "decode")


def test_every_value_of_the_runs_finds_its_row():
    rows = [
        {"name": name, "tokens": tokens, "pass": which, "median_s": 3.0, "peak_bytes": 2**20}
        for name in ("linear-attention-transformer", "transformers, gated_delta_net", "transformers, mamba2")
        for tokens in (1024, 4096, 16384)
        for which in ("forward", "forward_backward")
    ]
    for name in ("full", "qwen3_5", *LayersConfig().mechanisms):
        for tokens in (1024, 4096, 16384):
            more = {"segment": 256 if name in ("llp", "window") else None, "latents": 64 if name == "latte" else None}
            more |= {"median_s": 2.0, "times_faster": 0.5, "peak_bytes": 2**20, "io_bytes": 2**20}
            rows += [{"name": name, "tokens": tokens, "pass": which, **more}
                     for which in ("forward", "forward_backward")]  # fmt: skip
        rows += [{"name": name, "tokens": tokens, "pass": which, "over_transformers": 3.0}
                 for tokens in (2048, 8192) for which in ("step", "prefill")]  # fmt: skip
        for tokens in (64, 4096, 32768):
            for form, named, seconds in (
                ("recorded", name, 4.0),
                ("compiled", name, 1.0),
                ("by hand", f"by hand: {name}", 3.0),
            ):
                more = {"form": form, "median_s": seconds * (2 if tokens == 32768 else 1)}
                rows.append({"name": named, "tokens": tokens, "pass": "token", "over_transformers": 2.0, **more})
    report = Report("layers", {}, [{"status": "ok", **row} for row in rows])
    found = {what: {name: value(report) for name, value in runs.values(what)} for what in MORE}
    for what in MORE:
        assert None not in found[what].values()
    assert found["ops"]["gated scan by head, forward | T = 16,384"] == 0.5
    assert found["ops"]["gated scan by channel, forward + backward | T = 16,384"] == 0.5
    assert found["ops"]["delta scan by channel, forward + backward | T = 16,384"] == 0.5
    assert found["ops"]["delta scan by head, forward, / transformers | T = 16,384"] == 1.5
    assert found["ops"]["gated scan as Mamba-2, forward + backward, / transformers | T = 16,384"] == 1.5
    assert found["ops"]["delta scan by head, transformers, peak memory | T = 1,024"] == 2**20
    assert found["layers"]["performer, forward | T = 4,096"] == 0.5
    assert found["model"]["latte, training | T = 8,192"] == 3.0
    assert found["decode"]["elita | after 64"] == 2.0
    assert found["decode"]["kda | after 64"] == found["decode"]["kda | compiled, after 64"] == 2.0
    assert found["decode"]["kda | after 32,768 / after 64"] == 0.5
    assert found["decode"]["imported Qwen3.5, / transformers' own | after 32,768"] == 2.0
    assert found["decode"]["window | / by hand, after 64"] == 0.75


@pytest.mark.parametrize("what", MORE)
def test_the_committed_runs_have_the_names_of_the_values(what):
    """A value that a new run names otherwise would stand in a row of its own."""
    known = {name for name, _ in runs.values(what)}
    for run in json.loads((runs.RESULTS / f"cpu_{what}_runs.json").read_text(encoding="utf-8")):
        assert set(run["found"]) <= known


def test_a_step_that_measured_nothing_is_no_result(make, tmp_path, monkeypatch):
    monkeypatch.setattr(make.pages, "RESULTS", tmp_path)
    assert make.loaded("gpu_ops") is None
    (tmp_path / "gpu_ops.json").write_text(json.dumps({"step": {"status": "stopped after 3 s"}}))
    assert make.loaded("gpu_ops") is None
