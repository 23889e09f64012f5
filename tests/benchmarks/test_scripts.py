"""The scripts in benchmarks/, without the work that they measure."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """compare_stdlib.py as a module that trains nothing and writes below `tmp_path`."""
    spec = importlib.util.spec_from_file_location("compare_stdlib", ROOT / "benchmarks" / "compare_stdlib.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "run", row)
    return module


def row(name, folder, steps):
    return {
        "name": name,
        "steps": steps,
        "tokens": 1000 * steps,
        "parameters": 10,
        "bits_per_byte": 2.0,
        "gzip_bits_per_byte": 3.0,
        "xz_bits_per_byte": 2.5,
        "held_out_bytes": 100,
        "files_hash": "abc",
        "train_tokens_per_second": 5.0,
        "decode_tokens_per_second": 6.0,
        "states": [{"bytes": 7, "measured": True}, {"bytes": 8, "measured": False}],
    }


def call(module, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare_stdlib.py", *arguments])
    module.main()


def test_only_some_mechanisms_leave_the_results_of_all_unchanged(compare, tmp_path, monkeypatch, capsys):
    call(compare, monkeypatch, "--steps", "3")
    results = tmp_path / "benchmarks" / "results" / "five_mechanisms.json"
    before = results.read_text()
    assert [found["name"] for found in json.loads(before)["rows"]] == list(compare.MECHANISMS)
    call(compare, monkeypatch, "--steps", "7", "--only", "llp")
    assert results.read_text() == before
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "1 of 5 ran: no results are written; for all of them run python benchmarks/compare_stdlib.py --steps 7" in said
    )


def test_an_unknown_mechanism_is_answered_with_the_valid_ones(compare, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(compare, monkeypatch, "--only", "llp,lpl")
    assert "unknown lpl; valid: full, window, llp, linear, latte" in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def batching():
    path = ROOT / "benchmarks" / "continuous_batching.py"
    spec = importlib.util.spec_from_file_location("continuous_batching", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_ways_of_decoding_are_timed_and_compared(batching, tmp_path, capsys):
    sizes = "--requests 3 --slots 2 --prompt 5 --tokens 4 --dim 16 --layers 1 --rounds 2 --mechanisms latte,full"
    assert batching.main([*sizes.split(), "--out", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["latte", "full"]
    for row in report["rows"]:
        low, middle, high = row["ratio"]
        assert 0 < low <= middle <= high
        assert row["same_tokens_as_alone"] == "3 of 3"
    assert {"commit", "machine", "versions"} <= set(report)
    assert capsys.readouterr().out.count("tokens/s") == 4


@pytest.mark.parametrize(("arguments", "match"), [
    (["--mechanisms", "latt"], "unknown latt; valid: bigbird,"),
    (["--slots", "0"], "--slots must be at least 1, got 0"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(batching, capsys, arguments, match):
    with pytest.raises(SystemExit, match="2"):
        batching.main(arguments)
    assert match in capsys.readouterr().err


@pytest.fixture(scope="module")
def stock_attention():
    path = ROOT / "benchmarks" / "stock_attention.py"
    spec = importlib.util.spec_from_file_location("stock_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_of_a_model_of_transformers_are_timed(stock_attention, tmp_path, capsys):
    sizes = "--tokens 8,16 --rounds 1 --dim 16 --layers 1 --heads 2"
    assert stock_attention.main([*sizes.split(), "--out", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["tokens"] for row in report["rows"]] == [8, 16]
    for row in report["rows"]:
        assert set(row["seconds"]) == {"sdpa", "subquad_llp", "subquad_shifted", "subquad_window"}
    assert capsys.readouterr().out.count("subquad_llp") == 2
    with pytest.raises(SystemExit, match="2"):
        stock_attention.main(["--heads", "3"])
    assert "--heads even" in capsys.readouterr().err
