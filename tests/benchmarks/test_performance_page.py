"""docs/performance.md: its tables are those of the results, and its pictures are there."""

import dataclasses
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

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


@pytest.fixture
def make(monkeypatch):
    """docs/make_performance.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("make_performance")


def test_the_tables_are_those_of_the_results_and_the_pictures_are_there(make):
    assert make.pages.rewritten(PAGE, make.BLOCKS) == PAGE, "write them again: python docs/make_performance.py"
    assert set(re.findall(r"<!-- ([a-z-]+) -->", PAGE)) == set(make.BLOCKS)
    assert all((ROOT / "docs" / picture).is_file() for picture in re.findall(r"\]\((images/[^)]+)\)", PAGE))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_its_parser_takes(command):
    *program, what = (words := shlex.split(command))[:4]
    assert program == ["python", "-m", "benchmarks"]
    make_parser(what).parse_args(words[4:])


def test_aims_are_judged_by_the_median_of_three_runs(make, made_up, tmp_path, monkeypatch):
    """latte at 1,024 tokens: forward 2.3, 2.4 and 9 for an aim of 2.4; forward + backward 2.9, 3 and 1 for one of 3."""
    monkeypatch.setattr(make.pages, "RESULTS", tmp_path)
    monkeypatch.setattr(make.pages, "rewrite", lambda *_: None)
    files = []
    for n, speeds in enumerate([(2.3, 2.9), (2.4, 3.0), (9.0, 1.0)]):
        rows = [
            {**row, "name": "latte", "tokens": 1024, "latents": 64, "pass": which, "times_faster": faster}
            for row, which, faster in zip(made_up.rows, ("forward", "forward_backward"), speeds, strict=False)
        ]
        files.append(dataclasses.replace(made_up, rows=rows).save(tmp_path / str(n)))
    monkeypatch.setattr(sys, "argv", ["make_performance.py", "--runs", *map(str, files)])
    make.main()
    shown = make.runs("ops")
    assert "| latte, forward | 2.3, 2.4, 9 (2.4: met) | - | - |" in shown
    assert "| latte, forward + backward | 2.9, 3, 1 (3: **missed**) | - | - |" in shown
    assert "| latte, in + out / peak memory | 1 (0.909: met) | - | - |" in shown
    assert "By the median of 3 runs 2 of 3 aims, in brackets, are met. `python -m benchmarks ops`: 2026-01-02" in shown
    assert shown.endswith("commit abc, a processor, PyTorch threads: 2.")
    other = dataclasses.replace(made_up, what="layers").save(tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_performance.py", "--runs", str(files[0]), str(other)])
    with pytest.raises(SystemExit, match="2"):
        make.main()


MORE = ("ops", "layers", "model", "decode")


def test_every_aim_finds_its_row(make):
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
    found = {what: {cell.key: (cell.found(report), cell.least) for cell in make.cells(what)} for what in MORE}
    for what in MORE:
        assert None not in {value for value, _ in found[what].values()}
    assert found["ops"]["gated scan by head, forward | T = 16,384"] == (0.5, 30)
    assert found["ops"]["gated scan by channel, forward + backward | T = 16,384"] == (0.5, 12)
    assert found["ops"]["delta scan by channel, forward + backward | T = 16,384"] == (0.5, 10)
    assert found["ops"]["delta scan by head, forward, / transformers | T = 16,384"] == (1.5, 1.2)
    assert found["ops"]["gated scan as Mamba-2, forward + backward, / transformers | T = 16,384"] == (1.5, 2)
    assert found["ops"]["delta scan by head, transformers, peak memory | T = 1,024"] == (2**20, None)
    assert sum(least == 1 for _, least in found["layers"].values()) == 44
    assert found["layers"]["performer, forward | T = 4,096"] == (0.5, 1.0)
    assert found["model"]["latte, training | T = 8,192"] == (3.0, 5.0)
    assert found["decode"]["elita | after 64"] == (2.0, 1.8)
    assert found["decode"]["kda | after 64"] == found["decode"]["kda | compiled, after 64"] == (2.0, None)
    assert found["decode"]["kda | after 32,768 / after 64"] == (0.5, 1 / 1.1)
    assert found["decode"]["imported Qwen3.5, / transformers' own | after 32,768"] == (2.0, 1.5)
    assert found["decode"]["linear | after 32,768 / after 64"] == (0.5, 1 / 1.1)
    assert found["decode"]["window | / by hand, after 64"] == (0.75, 1 / 1.25)


def test_unmeasured_blocks_name_their_command(make, tmp_path, monkeypatch):
    monkeypatch.setattr(make.pages, "RESULTS", tmp_path)
    command = "OMP_NUM_THREADS=1 python -m benchmarks decode --compile --out benchmarks/results"
    assert make.BLOCKS["cpu-decode"]() == make.BLOCKS["cpu-decode-runs"]() == f"Not measured yet: `{command}`."
    assert "Nothing has been measured on a GPU yet" in make.gpu_aims()
    (tmp_path / "gpu_ops.json").write_text(json.dumps({"step": {"status": "stopped after 3 s"}}))
    assert make.loaded("gpu_ops") is None


@pytest.fixture
def gpu_table(make, made_up, tmp_path, monkeypatch):
    """`gpu_table({(name, tokens): seconds}, what="ops", segment=...)`: the aims that are judged by such a run."""
    monkeypatch.setattr(make.pages, "RESULTS", tmp_path)

    def table(times, what="ops", segment=None, **more):
        base = {**made_up.rows[0], "pass": "forward_backward", **more}
        rows = []
        for (name, tokens), seconds in times.items():
            sizes = {"name": name, "tokens": tokens, "segment": None if name == "sdpa" else segment}
            rows.append({**base, **sizes, "median_s": seconds})
        made = dataclasses.replace(made_up, rows=rows, settings={**made_up.settings, "device": "cuda"})
        (tmp_path / f"gpu_{what}.json").write_text(json.dumps(made.to_dict()))
        return make.gpu_aims()

    return table


@pytest.mark.parametrize(("run", "lines"), [
    ({"times": {("sdpa", 16384): 14.75, ("llp", 16384): 1.0, ("latte", 16384): 1.0, ("latte", 2048): 9.0}}, [
        "llp over flash SDPA: 15 | T = 16,384 | 14.750 | **missed**",
        "latte over flash SDPA: 10 | T = 16,384 | 14.750 | met",
        "llp over FlexAttention with its mask: 1.2 | T = 16,384 | - | not measured",
    ]),
    ({"what": "flex", "times": {("flex, llp", 16384): 3.0, ("llp", 16384): 2.5}}, [
        "llp over FlexAttention with its mask: 1.2 | T = 16,384 | 1.200 | met",
    ]),
    ({"what": "fla", "times": {
        ("fla, chunk_linear_attn", 16384): 1.25, ("linear", 16384): 1.0, ("latte", 16384): 1.0, ("elita", 16384): 1.0,
        ("fla, chunk_simple_gla", 16384): 1.0, ("fla, chunk_gla", 16384): 1.0,
    }}, [
        "linear over `chunk_linear_attn`: 1.2 | T = 16,384 | 1.250 | met",
        "elita over `chunk_simple_gla`: 1.2 | T = 16,384 | 1.000 | **missed**",
        "latte over the `chunk_gla` route: 2 | T = 16,384 | 1.000 | **missed**",
    ]),
    ({"bytes_per_s": 1.5e9, "times": {("elita", 16384): 1.0, ("linear", 2048): 1.0}}, [
        "elita's bytes a second over a copy's: 0.6 | T = 16,384 | 0.500 | **missed**",
        "linear's bytes a second over a copy's: 0.6 | T = 16,384 | - | not measured",
    ]),
    ({"what": "scans", "times": {("fla, kda", 16384): 1.0, ("kda", 16384): 1.25, ("mamba2", 16384): 1.0,
                                 ("fla, gla", 16384): 1.0, ("gla", 16384): 1.31}}, [
        "delta scan by channel within 1.3 times of `chunk_kda`: 0.77 | T = 16,384 | 0.800 | met",
        "gated scan by channel within 1.3 times of `chunk_gla`: 0.77 | T = 16,384 | 0.763 | **missed**",
        "gated scan as Mamba-2 within 1.3 times of `mamba_chunk_scan_combined`: 0.77 | T = 16,384 | - | not measured",
    ]),
    ({"what": "model", "pass": "step", "times": {("sdpa", 16384): 4.0, ("llp", 16384): 2.0, ("elita", 16384): 2.1}}, [
        "training a decoder of llp over flash SDPA: 2 | 4 x 16,384 | 2.000 | met",
        "training a decoder of elita over flash SDPA: 2 | 4 x 16,384 | 1.905 | **missed**",
    ]),
    ({"what": "checks", "times": {("latte", 16384): 1.0}}, [
        "kernels' checks that are right: all | every dtype | 1.000 | met",
    ]),
])  # fmt: skip
def test_a_gpu_aim_is_met_in_full_or_missed(gpu_table, run, lines):
    table = gpu_table(**run)
    for line in lines:
        assert f"| {line} |  |" in table


def test_a_missed_gpu_aim_has_its_reason(make, gpu_table, monkeypatch):
    far = ("llp over flash SDPA: 15", "T = 16,384")
    reasons = {far: "it waits for memory", ("latte over flash SDPA: 10", "T = 16,384"): "of an earlier run"}
    committed = make.REASONS
    monkeypatch.setattr(make, "REASONS", reasons)
    table = gpu_table({("sdpa", 16384): 12.0, ("latte", 16384): 1.0, ("llp", 16384): 1.0})
    assert f"| {far[0]} | {far[1]} | 12.000 | **missed** | it waits for memory |" in table
    assert "of an earlier run" not in table, "the aim is met"
    aims = [(aim.text, aim.at) for aim in make._gpu_aims()]
    assert len(set(aims)) == len(aims), "a reason would be of two rows"
    assert {*reasons, *committed} <= set(aims)
