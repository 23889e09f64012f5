"""benchmarks/compare_stdlib.py, without the work that it measures."""

import json
import sys

import pytest


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
