"""The scripts in benchmarks/, without the work that they measure."""

import json
import sys

import pytest

from benchmarks import continuous_batching


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """`compare(*arguments)`: compare_stdlib.py without training, writing below `tmp_path`; returns its module."""
    from benchmarks import compare_stdlib as module

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["compare_stdlib.py", *arguments])
        module.main()
        return module

    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "run", lambda name, folder, steps: {"name": name, "steps": steps})
    return call


def test_only_some_mechanisms_leave_the_results_of_all_unchanged(compare, tmp_path, capsys):
    names = compare("--steps", "3").MECHANISMS
    results = tmp_path / "benchmarks" / "results" / "five_mechanisms.json"
    before = results.read_text()
    assert [found["name"] for found in json.loads(before)["rows"]] == list(names)
    compare("--steps", "7", "--only", "llp")
    assert results.read_text() == before
    said = " ".join(capsys.readouterr().out.split())
    whole = "python benchmarks/compare_stdlib.py --steps 7"
    assert f"1 of 5 ran: no results are written; for all of them run {whole}" in said


def test_an_unknown_mechanism_is_answered_with_the_valid_ones(compare, capsys):
    with pytest.raises(SystemExit):
        compare("--only", "llp,lpl")
    assert "unknown lpl; valid: full, window, llp, linear, latte" in " ".join(capsys.readouterr().err.split())


def test_both_ways_of_decoding_are_timed_and_compared(tmp_path, capsys):
    sizes = "--requests 3 --slots 2 --prompt 5 --tokens 4 --dim 16 --layers 1 --rounds 2 --mechanisms latte,full"
    assert continuous_batching.main([*sizes.split(), "--out", str(tmp_path / "out.json")]) == 0
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
def test_invalid_sizes_are_refused(capsys, arguments, match):
    with pytest.raises(SystemExit, match="2"):
        continuous_batching.main(arguments)
    assert match in capsys.readouterr().err


def test_steps_of_a_model_of_transformers_are_timed(tmp_path, capsys):
    from benchmarks import stock_attention  # imports transformers

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
