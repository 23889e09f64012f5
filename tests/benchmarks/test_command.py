"""`python -m benchmarks`: its output, its files and its errors."""

import json
import re

import pytest
import torch

from benchmarks import operators as _cases
from benchmarks.command import BENCHMARKS, main
from benchmarks.operators import Engine
from tests.training.helpers import raising

TINY_OPS = "--tokens 16,32 --heads 2 --channels 8 --segment 8 --repeats 2 --peers none"
TINY = "--mechanisms llp --dim 16 --heads 2 --layers 1 --vocab 17 --repeats 2 --options.llp.segment 8 --no-plots"


def test_operators_are_timed_printed_and_written(capsys, tmp_path):
    arguments = f"ops --mechanisms llp,latte --latents 4,6 {TINY_OPS} --passes forward --out {tmp_path / 'new'}"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr()
    for part in ("Forward: ", "sdpa, causal", "llp, segment 8", "latte, 6 latents per head", "a copy"):
        assert part in printed.out
    assert "32 tokens" in printed.err
    record = json.loads((tmp_path / "new" / "cpu_ops.json").read_text())
    assert record["command"] == f"python -m benchmarks {arguments}"
    assert record["settings"]["tokens"] == [16, 32]
    names = {file.name.removeprefix("cpu_ops") for file in (tmp_path / "new").iterdir()}
    assert names == {".json", "_time.png", "_memory.png", "_latents.png"}


def test_nothing_is_written_without_a_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(f"ops --mechanisms linear {TINY_OPS} --passes forward --markdown".split()) == 0
    out = capsys.readouterr().out
    assert "| linear | 16 |" in out
    assert "Forward + backward" not in out
    assert list(tmp_path.iterdir()) == []


def test_models_and_decoding_are_timed(capsys, tmp_path):
    assert main(f"model --tokens 16 --peers none {TINY} --out {tmp_path}".split()) == 0
    assert main(f"decode --contexts 8,16 --peers none {TINY} --out {tmp_path}".split()) == 0
    sizes = "--mechanisms llp --dim 16 --heads 2 --repeats 1 --no-plots"
    assert main(f"layers --tokens 16 {sizes} --out {tmp_path}".split()) == 0
    printed = capsys.readouterr().out
    assert "A training step and prefill: batch 2, 1 layers, width 16" in printed
    assert "One decoded token: " in printed
    assert "Forward + backward: batch 1, layers of width 16" in printed
    assert "llp, segment 8" in printed
    assert {file.name for file in tmp_path.iterdir()} == {f"cpu_{what}.json" for what in ("model", "decode", "layers")}


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), 1), (torch.OutOfMemoryError("no room"), 0)])
def test_the_exit_status_tells_a_failure_from_a_lack_of_memory(capsys, monkeypatch, error, status):
    monkeypatch.setitem(_cases.ENGINES, "linear", Engine(raising(error), lambda _: "linear", lambda _: 1))
    assert main(f"ops --mechanisms linear {TINY_OPS}".split()) == status
    assert f"linear: {'failed: ValueError' if status else 'out of memory'}: no" in capsys.readouterr().out


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(("arguments", "message"), [
    ("ops --mechanisms llp,lpp", "unknown operator 'lpp'; did you mean 'llp'?"),
    ("ops --mechanisms luna", "`python -m benchmarks model` times whole layers of any mechanism"),
    ("ops --peers nobody", "unknown peer 'nobody' on cpu; valid: auto, flex, "),
    ("ops --tokens 1k", "tokens must be integers separated by commas, such as 1024,4096, got '1k'"),
    ("ops --tokens 0", "tokens must be at least 1, got 0"),
    ("ops --backends tirton", "unknown backend 'tirton'; did you mean 'triton'?"),
    ("ops --device tpu", "unknown device 'tpu'; valid: cpu, cuda"),
    ("ops --dtype float8", "dtype must be float32, bfloat16, float16 or null, got 'float8'"),
    ("decode --mechanisms perceiver_ar", "unknown attention 'perceiver_ar'"),
    ("decode --graph", "graph needs a GPU, got device 'cpu'"),
    ("layers --mechanisms linformer", "no causal form of attention 'linformer'"),
    ("layers --dim 17", "dim must be a multiple of heads, got 17 and 8"),
    ("decode --peers perceiver-ar-pytorch", "unknown peer 'perceiver-ar-pytorch' on cpu; valid: auto, none, transf"),
    pytest.param("ops --device cuda", "device 'cuda' is not available: PyTorch finds no GPU", marks=NO_GPU),
])  # fmt: skip
def test_mistakes_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert message in re.sub(r"\s+", " ", error)


@pytest.mark.parametrize(("arguments", "message"), [([], "no benchmark named"), (["opps"], "did you mean 'ops'?")])
def test_a_benchmark_must_be_named(capsys, arguments, message):
    assert main([*arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_overview_lists_everything_and_help_shows_the_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {what} " in shown for what in BENCHMARKS)
    with pytest.raises(SystemExit, match="0"):
        main(["ops", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: python -m benchmarks ops ")
    assert "Sequence lengths T in tokens (default: 1024,4096,16384)." in shown
