"""`python -m benchmarks precision` and `precision_speed`: errors of fewer bits, and tokens/s."""

import json
import math

import pytest
import torch

from benchmarks import precision
from benchmarks.command import main
from benchmarks.config import PrecisionConfig
from benchmarks.measuring import Report
from subquad.testing import assert_exact, assert_in_budget

TINY = "--contexts 8,16 --steps 2 --dim 16 --layers 1 --train_tokens 16 --train_batch 1 --batch 1"


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "text.txt"
    file.write_text("".join(f"the {n} times {n} is {n * n}\n" for n in range(400)))
    return file


def test_errors_of_states_and_weights_are_measured_and_written(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(precision, "GROWING_PIECE", 4)
    arguments = f"precision --mechanisms linear,full --data {text} {TINY} --out {tmp_path}"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert "State stored in fewer bits: 1 layers, width 16" in printed
    assert "Weights in fewer bits" in printed
    report = Report(**json.loads((tmp_path / "cpu_precision.json").read_text()))
    stored = {(row["part"], row["stored"]) for row in report.rows}
    weights = {("weights", name) for name in ("float16", "bfloat16", "int8", "int8, bfloat16")}
    assert stored == weights | {("state", "bfloat16"), ("state", "int8")}
    assert {row["tokens"] for row in report.rows} == {8, 16}
    assert all(0 < row["max_relative"] < math.inf for row in report.rows)
    headers, (linear, full) = precision.summary(report)[1:]
    assert headers[1:3] == ("state bfloat16, 8", "state bfloat16, 16")
    assert (linear[0], full[0], len(linear)) == ("`linear`", "`full`", len(headers))


def test_tokens_per_second_of_each_precision_are_measured(tmp_path, capsys):
    threads = torch.get_num_threads()
    arguments = f"precision_speed --sizes 1M --mechanisms linear --repeats 2 --out {tmp_path}"
    assert main(arguments.split()) == 0
    assert "times float32" in capsys.readouterr().out
    rows = {row["stored"]: row for row in json.loads((tmp_path / "cpu_precision_speed.json").read_text())["rows"]}
    assert rows["float32"]["times_float32"] == 1
    assert rows["float16"]["weight_bytes"] * 2 == rows["float32"]["weight_bytes"]
    assert rows["int8, bfloat16"]["weight_bytes"] < rows["int8"]["weight_bytes"] < rows["float32"]["weight_bytes"]
    assert torch.get_num_threads() == threads


def test_int8_has_a_scale_for_each_vector_and_changes_nothing_the_second_time():
    x = torch.tensor([[127.0, -50.4, 0.3], [0.0, 0.0, 0.0], [2.54, -0.01, 1.27]])
    once = precision.as_int8(x)
    assert_exact(once[:2], torch.tensor([[127.0, -50.0, 0.0], [0.0, 0.0, 0.0]]))
    steps = (once[2].double() - x[2].double()).abs() / (2.54 / 127)
    assert steps.max() <= 0.5 + 1e-6
    assert_in_budget(precision.as_int8(once), once, once, torch.float32)


def test_errors_are_those_of_two_distributions():
    exact, labels = torch.tensor([[[0.0, math.log(3)]]]), torch.tensor([[1]])
    found = precision.errors_of(torch.tensor([[[5.0, 5.0]]]), exact, labels)  # 1/2 and 1/2, against 1/4 and 3/4
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert [round(found[name], 5) for name in ("kl", "bits_per_byte")] == [round(kl, 5), 1.0]
    assert round(found["bits_per_byte_float32"], 5) == round(math.log2(4 / 3), 5)
    assert round(found["max_relative"], 5) == 1
    same = precision.errors_of(exact + 7, exact, labels)  # a constant in all logits is no error
    assert max(same["kl"], same["max_relative"]) < 1e-6


def test_the_last_quarter_of_a_text_is_compared():
    assert list(precision.window(8)) == [6, 7]
    assert list(precision.window(1)) == [0]


def test_too_short_a_text_is_named(text, capsys):
    arguments = f"precision --mechanisms linear --data {text} {TINY} --contexts 8,100000"
    assert main(arguments.split()) == 1
    assert "must have more than 16 bytes to train on and 100001 held out" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("arguments", "message"), [
    ("precision --dtype float16", "this benchmark measures each dtype beside float32, got dtype 'float16'"),
    ("precision --rate 0", "rate must be above 0, got 0"),
    ("precision --mechanisms linformer", "no causal form of attention 'linformer'"),
    ("precision_speed --sizes 7B", "unknown size '7B'; valid: 100M, 1M, 20M"),
    ("precision_speed --dtype bfloat16", "this benchmark measures each dtype beside float32, got dtype 'bfloat16'"),
])  # fmt: skip
def test_mistakes_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert message in " ".join(capsys.readouterr().err.split())


def test_all_causal_mechanisms_are_measured():
    assert {"full", "latte", "gated_delta_net", "window"} < set(PrecisionConfig().mechanisms)
