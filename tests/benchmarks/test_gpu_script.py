"""benchmarks/gpu.py, which `make gpu` runs: its imports, and steps that fail or take too long."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_steps
from tests.ops.triton import checks as kernels

DRY_RUN_SECONDS = 600
LACKING = (
    *("transformers", "safetensors", "accelerate", "datasets", "jsonargparse", "rich", "peft"),
    *("matplotlib", "tensorboard", "hypothesis", "pytest_timeout", "xdist"),
)
STEPS = (("model", "sdpa"), ("decode", "elita"), ("fla", "latte"), ("scans", "kda"))


def run(*command, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    options = {"capture_output": True, "text": True, "timeout": DRY_RUN_SECONDS, "cwd": gpu.ROOT, "env": environment}
    done = subprocess.run([sys.executable, *command], **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_nothing_is_imported_that_the_gpu_machine_may_lack(tmp_path):
    """The measuring steps run with only the packages that benchmarks/gpu.py names."""
    code = f"""
        import argparse, pathlib, sys
        for name in {LACKING!r}:
            sys.modules[name] = None
        from benchmarks import decode, gpu, gpu_steps, timing
        timing.COPIED, timing.MULTIPLIED, decode.WARM = {{"cpu": 2**16}}, {{"cpu": 32}}, 0.0
        arguments = argparse.Namespace(device="cpu", dry_run=True, folder=pathlib.Path({str(tmp_path)!r}), limit=60.0)
        for step, _ in {STEPS!r}:
            assert gpu_steps.RUNS[step](arguments) == 0, step
    """
    run("-c", textwrap.dedent(code), OUT=str(tmp_path / "out"))
    for step, name in STEPS:
        written = (tmp_path / f"gpu_{step}.json").read_text()
        assert (tmp_path / "out" / f"gpu_{step}.json").read_text() == written, "a call may be cut before a step ends"
        rows = json.loads(written)["rows"]
        assert name in {row["name"] for row in rows}
        assert {row["status"] for row in rows} == {"ok"}
    labels = {(row["label"], row["channels"]) for row in rows if row["name"] == "kda"}
    assert labels == {("delta scan, a decay per channel", 16), ("delta scan, a decay per channel, 8 channels", 8)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_runs_everything(tmp_path):
    out = tmp_path / "out"
    command = [gpu.__file__, "--device", "cpu", "--dry-run", "--folder", str(tmp_path)]
    run(*command, OUT=str(out), PYTEST_ADDOPTS="--no-such-option")
    for step in gpu.NAMES:
        record = json.loads((tmp_path / f"gpu_{step}.json").read_text())
        assert record["step"]["status"] == "ok"
        assert json.loads((out / f"gpu_{step}.json").read_text()) == record
    assert {row["status"] for row in json.loads((tmp_path / "gpu_checks.json").read_text())["rows"]} == {"ok"}
    assert all(file["PASSED"] for file in json.loads((tmp_path / "gpu_tests.json").read_text())["files"].values())
    assert len(list(out.iterdir())) == len(gpu.NAMES) <= 8, "as many files come back from a lent machine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "PyTorch finds no GPU; for a dry run in tiny sizes on a CPU" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "message"), [
    (["--device", "cpu"], "--device cpu needs --dry-run"),
    (["--only", "ops", "--limits", "flex=9"], "--limits has 'flex', which is no step of this call; valid: ops"),
    (["--only", "ops,opps"], "unknown step opps; valid: checks, ops, tests, flex, model, decode, fla, scans"),
])  # fmt: skip
def test_wrong_arguments_are_named(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_steps_of_a_call_fit_into_nine_minutes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    seconds = gpu._arguments().seconds
    for names in (gpu.FIRST, ("flex", "model"), ("model", "decode"), ("fla",), ("scans",)):
        limits = gpu.time_limits([step for step in gpu.STEPS if step.name in names], seconds, {})
        assert max(seconds, sum(limits.values())) < 540
        assert [float(step.seconds) for step in limits] == list(limits.values()), "no limit is shortened"
    assert gpu._arguments().only == gpu.FIRST
    assert list(gpu_steps.RUNS) == list(gpu.NAMES)


def test_limits_shrink_by_one_factor_only_if_time_is_short():
    one, other = gpu.Step("one", 40), gpu.Step("other", 120)
    assert gpu.time_limits([one, other], 160.0, {}) == {one: 40.0, other: 120.0}
    assert gpu.time_limits([one, other], 80.0, {}) == {one: 20.0, other: 60.0}
    assert gpu.time_limits([one, other], 80.0, {"one": 50.0}) == {one: 50.0, other: 30.0}
    assert gpu.time_limits([one, other], 80.0, {"one": 50.0, "other": 60.0}) == {one: 50.0, other: 60.0}
    assert gpu.time_limits([one, other], 80.0, {"one": 90.0}) == {one: 90.0, other: 0.0}


def test_steps_run_in_the_order_of_the_call_with_the_limits_it_gives(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(gpu, "_missing", lambda device: None)
    monkeypatch.setattr(gpu, "install_wheels", lambda: None)
    record = {"status": "ok", "seconds": 0.0}
    monkeypatch.setattr(gpu, "run_step", lambda step, *_: ran.append((step.name, round(_[-1]))) or record)
    flags = ["--only", "scans,checks,tests", "--seconds", "600", "--limits", "scans=100,checks=250.4,tests=900"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags, "--folder", str(tmp_path)])
    assert gpu.main() == 0
    assert ran == [("scans", 100), ("checks", 250), ("tests", 600)]


@pytest.mark.parametrize(("text", "message"), [
    ("opps=60", r"--limits has 'opps', which is no step of this call; valid: ops, tests"),
    ("flex=60", r"--limits has 'flex', which is no step of this call"),
    ("ops=60,", r"--limits has '', which is no step of this call"),
    ("ops=a", r"--limits needs a number of seconds above 0 for ops, as in ops=60; got 'a'"),
    ("ops", r"for ops, as in ops=60; got ''"), ("tests=3,ops=-1", r"for ops, .* got '-1'"),
    ("ops=inf", r"got 'inf'"), ("ops=nan", r"got 'nan'"),
])  # fmt: skip
def test_wrong_limits_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        gpu.given_limits(text, ("ops", "tests"))


def test_processes_are_shared_by_the_number_of_tests():
    counts = {"scan": 380, "attend": 190, "delta": 80, "mean": 25, "compiles": 1}
    assert gpu_steps.shares(counts, 12) == {"scan": 5, "attend": 3, "delta": 2, "mean": 1, "compiles": 1}
    assert gpu_steps.shares(counts, 3) == dict.fromkeys(counts, 1)
    assert gpu_steps.shares({}, 12) == {}


def start(code, **options):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, text=True, start_new_session=True, **options)


@pytest.fixture
def step_of(monkeypatch, tmp_path):
    """`step_of(code, limit)`: the record of a step that is a process with this code."""

    def run_step(code, limit):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        monkeypatch.setattr(gpu, "_start", lambda *_: start(code, **pipes))
        arguments = argparse.Namespace(device="cpu", dry_run=True, folder=tmp_path, limit=60.0)
        return gpu.run_step(gpu.STEPS[1], arguments, None, limit)

    return run_step


def test_a_step_that_fails_leaves_its_reason(step_of, tmp_path):
    (tmp_path / "gpu_ops.json").write_text('{"rows": ["of an earlier run"]}')
    record = step_of("print('the reason'); raise SystemExit(3)", 30.0)
    assert record["status"] == "failed with status 3"
    assert json.loads((tmp_path / "gpu_ops.json").read_text()) == {"step": record}
    assert "the reason" in record["output"]


@pytest.mark.parametrize("step_sleeps", [600, 0])
def test_a_late_step_is_stopped_with_its_children_and_keeps_its_file(step_of, step_sleeps, tmp_path, monkeypatch):
    """A child that outlives its step keeps the step's output open."""
    monkeypatch.setattr(gpu, "LEAST", 0.0)
    record = step_of(f"""
        import pathlib, subprocess, sys, time
        pathlib.Path({str(tmp_path / "gpu_ops.json")!r}).write_text('{{"rows": [1]}}')
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        time.sleep({step_sleeps})
    """, 1.5)  # fmt: skip
    assert record["status"] == "stopped after 2 s"
    assert json.loads((tmp_path / "gpu_ops.json").read_text())["rows"] == [1]
    stat = Path(f"/proc/{int(record['output'])}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child still runs")


def test_a_step_without_time_is_skipped_and_says_so(step_of, tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    record = step_of("", 1.0)
    assert record["status"] == "skipped: no time was left for it"
    assert json.loads((tmp_path / "out" / "gpu_ops.json").read_text())["step"] == record


def test_a_step_that_has_ended_is_stopped_in_silence():
    process = start("print('done')", stdout=subprocess.PIPE)
    assert process.wait() == 0
    assert gpu._stop(process) == "done\n"


def test_tests_run_by_file_and_a_file_that_dies_stops_no_other(tmp_path, monkeypatch):
    where = tmp_path / "tests" / "ops" / "triton"
    where.mkdir(parents=True)
    (where / "test_one.py").write_text("def test_a(): pass\n\n\ndef test_b(): assert not 'this'\n")
    (where / "test_two.py").write_text("import os\n\n\ndef test_c(): pass\n\n\ndef test_d(): os.abort()\n")
    monkeypatch.setattr(gpu_steps, "ROOT", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    arguments = argparse.Namespace(device="cpu", dry_run=False, folder=tmp_path, limit=60.0)
    assert gpu_steps.tests(arguments) == 1
    found = json.loads((tmp_path / "gpu_tests.json").read_text())
    one, two = (found["files"][f"gpu_tests_test_{name}_0"] for name in ("one", "two"))
    assert found["collected"] == 4
    assert (one["PASSED"], one["FAILED"], one["exit_status"]) == (1, 1, 1)
    assert one["failed"] == ["tests/ops/triton/test_one.py::test_b"]
    assert "assert not 'this'" in one["output"]
    assert (two["PASSED"], two["exit_status"]) == (1, -signal.SIGABRT)
    assert {"versions", "commit", "machine"} <= set(found["provenance"])
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.slow
def test_late_tests_are_stopped_and_what_they_found_is_kept(tmp_path, monkeypatch):
    where = tmp_path / "tests" / "ops" / "triton"
    where.mkdir(parents=True)
    (where / "test_one.py").write_text("import time\n\n\ndef test_a(): pass\n\n\ndef test_b(): time.sleep(600)\n")
    monkeypatch.setattr(gpu_steps, "ROOT", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(gpu_steps, "LAST_SECONDS", -20.0)
    arguments = argparse.Namespace(device="cpu", dry_run=False, folder=tmp_path, limit=-5.0)
    assert gpu_steps.tests(arguments) == 1
    (one,) = json.loads((tmp_path / "gpu_tests.json").read_text())["files"].values()
    assert (one["PASSED"], one["exit_status"]) == (1, -signal.SIGKILL)


def wrong(call, name):
    """A family whose second result is off, whose bits differ by call, or that has no kernel."""
    calls = []

    def other(backend, *x):
        out = call(backend, *x)
        calls.append(backend)
        if backend != "torch":
            return out
        if name == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return (out[0], out[1] * (1.01 if name == "is off" else 1 + 1e-7 * len(calls)))

    return other


@pytest.mark.parametrize(("name", "message"), [
    ("is off", r"result 1: error .* exceeds"), ("moves", "the second call gave other bits"),
    ("fails", "RuntimeError: CUDA error: an illegal memory"),
])  # fmt: skip
def test_a_wrong_kernel_is_found(name, message, monkeypatch):
    family = kernels.FAMILIES["llp"]
    monkeypatch.setitem(kernels.FAMILIES, "llp", family._replace(call=wrong(family.call, name)))
    both, token = kernels.check("llp", "float32", kernels.TINY[0], "cpu", "torch")
    assert both["status"] == "failed"
    assert re.search(message, both["message"])
    assert (token["status"], token["same_bits"]) == ("ok", True)


@pytest.mark.parametrize("name", kernels.FAMILIES)
def test_every_family_is_checked_in_every_dtype(name):
    """With the chunked form in the place of the kernels, which the interpreter runs in the dry run."""
    for dtype in kernels.DTYPES:
        for record in kernels.check(name, dtype, kernels.TINY[0], "cpu", "torch"):
            assert (record["status"], record["same_bits"]) == ("ok", True), record
            assert record["largest_relative_error"] < 0.02


@pytest.mark.slow
def test_a_family_whose_process_dies_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "FAMILIES", {"no such family": None})
    arguments = argparse.Namespace(device="cpu", dry_run=True, folder=tmp_path, limit=60.0)
    assert gpu_steps.checks(arguments) == 1
    assert json.loads((tmp_path / "gpu_checks.json").read_text())["families"] == {
        "no such family": "ended with status 1"
    }


def test_wheels_are_unpacked_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    assert gpu.install_wheels() is None
    info = "a_tiny_peer-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "a_tiny_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_tiny_peer.py", "value = 3\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-tiny-peer\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"a_tiny_peer.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    assert gpu.install_wheels() == tmp_path / "site"
    assert (tmp_path / "site" / "a_tiny_peer.py").read_text() == "value = 3\n"


def test_the_makefile_runs_it():
    command = ["make", "--dry-run", "gpu", "DEVICE=cpu"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=True)
    assert "benchmarks/gpu.py --device cpu --dry-run" in done.stdout
