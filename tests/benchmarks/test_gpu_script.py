"""benchmarks/gpu.py, which `make gpu` runs: what it imports, and what becomes of steps that fail or take too long."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_steps

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
DRY_RUN_SECONDS = 170
LACKING = (
    *("transformers", "safetensors", "accelerate", "datasets", "jsonargparse", "rich", "peft"),
    *("matplotlib", "tensorboard", "hypothesis", "pytest_timeout", "xdist"),
)


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(folder):
    return argparse.Namespace(device="cpu", dry_run=True, folder=folder, limit=60.0)


def test_nothing_is_imported_that_the_gpu_machine_may_lack(tmp_path):
    """The steps that measure run where other packages than those that benchmarks/gpu.py names are missing."""
    code = f"""
        import sys
        for name in {LACKING!r}:
            sys.modules[name] = None
        import importlib.util
        spec = importlib.util.spec_from_file_location("gpu", {str(SCRIPT)!r})
        gpu = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(gpu)
        import argparse, pathlib
        from benchmarks import timing
        timing.COPIED, timing.MULTIPLIED = {{"cpu": 2**16}}, {{"cpu": 32}}
        arguments = argparse.Namespace(device="cpu", dry_run=True, folder=pathlib.Path({str(tmp_path)!r}), limit=60.0)
        from benchmarks import gpu_steps
        for step in ("model", "decode", "fla"):
            assert gpu_steps.RUNS[step](arguments) == 0, step
    """
    run(["-c", textwrap.dedent(code)])
    for step, name in (("model", "sdpa"), ("decode", "elita"), ("fla", "latte")):
        record = json.loads((tmp_path / f"gpu_{step}.json").read_text())
        assert name in {row["name"] for row in record["rows"]}
        assert {row["status"] for row in record["rows"]} == {"ok"}


def run(command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=DRY_RUN_SECONDS, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_dry_run_runs_everything(tmp_path):
    out = tmp_path / "out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OUT": str(out), "PYTEST_ADDOPTS": "--no-such-option"}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--dry-run", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRY_RUN_SECONDS, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in ("tests", "ops", "model", "decode", "fla"):
        record = json.loads((tmp_path / f"gpu_{step}.json").read_text())
        assert record["step"]["status"] == "ok"
        assert json.loads((out / f"gpu_{step}.json").read_text()) == record
    assert json.loads((tmp_path / "gpu_tests.json").read_text())["tests"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "PyTorch finds no GPU; this script can be tried in tiny sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cpu"], "on a CPU this is a dry run: add --dry-run"),
        (["--only", "ops,opps"], "unknown step opps; valid: tests, ops, model, decode, fla"),
    ],
)
def test_wrong_arguments_are_named(gpu, flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    with pytest.raises(SystemExit) as exit_info:
        gpu.main()
    assert exit_info.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_steps_fit_into_nine_minutes(gpu, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    seconds = gpu._arguments().seconds
    limits = gpu.time_limits([step for step in gpu.STEPS if step.name != "warm"], seconds)
    assert {step.name for step in limits} == set(gpu.NAMES)
    assert {step.name for step in gpu.STEPS} == set(gpu_steps.RUNS)
    assert sum(limits.values()) < 540
    assert seconds < 540


def test_steps_are_shortened_alike_only_where_time_is_short(gpu):
    one, other = gpu.Step("one", 40), gpu.Step("other", 120)
    assert gpu.time_limits([one, other], 160.0) == {one: 40.0, other: 120.0}
    assert gpu.time_limits([one, other], 80.0) == {one: 20.0, other: 60.0}


# --- a step in its own process


@pytest.fixture
def stand_in(gpu, monkeypatch):
    """`stand_in(code)`: every step is a process that runs this code."""

    def replace(code):
        def start(*_):
            return subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

        monkeypatch.setattr(gpu, "_start", start)

    return replace


def test_a_step_that_fails_leaves_its_reason(gpu, stand_in, tmp_path):
    (tmp_path / "gpu_ops.json").write_text('{"rows": ["of an earlier run"]}')
    stand_in("print('the reason'); raise SystemExit(3)")
    record = gpu.run_step(gpu.STEPS[1], arguments(tmp_path), None, 30.0)
    assert record["status"] == "failed with status 3"
    assert json.loads((tmp_path / "gpu_ops.json").read_text()) == {"step": record}
    assert "the reason" in record["output"]


def test_a_step_that_takes_too_long_is_stopped_and_keeps_what_it_wrote(gpu, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST", 0.0)
    stand_in(f"""
        import pathlib, time
        pathlib.Path({str(tmp_path / "gpu_ops.json")!r}).write_text('{{"rows": [1]}}')
        print("begun", flush=True)
        time.sleep(600)
    """)
    record = gpu.run_step(gpu.STEPS[1], arguments(tmp_path), None, 1.5)
    assert record["status"] == "stopped after 2 s"
    assert "begun" in record["output"]
    assert json.loads((tmp_path / "gpu_ops.json").read_text())["rows"] == [1]


def test_a_step_without_time_is_skipped_and_says_so(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    record = gpu.run_step(gpu.STEPS[1], arguments(tmp_path), None, 1.0)
    assert record["status"] == "skipped: no time was left for it"
    assert json.loads((tmp_path / "out" / "gpu_ops.json").read_text())["step"] == record


def test_what_a_step_started_ends_with_it_even_where_the_step_has_ended(gpu, stand_in, tmp_path, monkeypatch):
    """The child holds the step's output open, so that the end of the step alone is not heard of."""
    monkeypatch.setattr(gpu, "LEAST", 0.0)
    stand_in("""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
    """)
    record = gpu.run_step(gpu.STEPS[1], arguments(tmp_path), None, 1.5)
    assert record["status"] == "stopped after 2 s"
    assert has_ended(int(record["output"]))


def has_ended(pid):
    """Whether a process is gone, or is about to be."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_step_that_left_nothing_is_stopped_in_silence(gpu, stand_in):
    stand_in("print('done')")
    process = gpu._start()
    assert process.wait() == 0
    assert gpu._stop(process) == "done\n"


@pytest.mark.parametrize("only", ["tests", "ops"])
def test_an_interrupt_ends_the_warming_too(gpu, only, tmp_path, monkeypatch):
    """While the tests run the warming does too; before another step it has been ended."""
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    started, running = [], []

    def start(step, *_):
        started.append(step)
        return sleeping

    def interrupted(*_):
        running.append(sleeping.poll() is None)
        raise KeyboardInterrupt("by hand")

    monkeypatch.setattr(gpu, "_start", start)
    monkeypatch.setattr(gpu, "run_step", interrupted)
    monkeypatch.setattr(gpu, "_missing", lambda _: None)
    monkeypatch.setattr(gpu, "install_wheels", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", only, "--folder", str(tmp_path)])
    try:
        with pytest.raises(KeyboardInterrupt, match="by hand"):
            gpu.main()
        assert sleeping.poll() == -signal.SIGKILL
    finally:
        sleeping.kill()
        sleeping.wait()
    assert started == ["warm"]
    assert running == [only == "tests"]


def test_tests_that_take_too_long_are_interrupted(gpu, monkeypatch):
    monkeypatch.setattr(gpu_steps, "LAST_SECONDS", 20.0)
    quick, slow = (subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({s})"]) for s in (0, 600))
    statuses = gpu_steps._ended([quick, slow], 1.0)
    assert statuses[0] == 0
    assert statuses[1] != 0


def test_a_dry_run_takes_the_first_tests_of_each_file(gpu):
    names = ["a.py::one", "a.py::two", "b.py::one", "a.py::three"]
    assert gpu_steps._first_of_each_file(names) == ["a.py::one", "a.py::two", "b.py::one"]


def test_counts_of_tests_are_read_from_their_report(gpu, tmp_path):
    (tmp_path / "r.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
        '<testcase classname="a" name="b"><failure/></testcase><testcase classname="a" name="c"/>'
        "</testsuite></testsuites>"
    )
    files = [tmp_path / "r.xml", tmp_path / "none.xml", tmp_path / "r.xml"]
    assert gpu_steps._counts(files) == {"tests": 6, "skipped": 2, "failed": ["a.b", "a.b"]}


def test_wheels_are_unpacked_aside(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    info = "a_tiny_peer-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "a_tiny_peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_tiny_peer.py", "value = 3\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-tiny-peer\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"a_tiny_peer.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    assert gpu.install_wheels() == tmp_path / "site"
    assert (tmp_path / "site" / "a_tiny_peer.py").read_text() == "value = 3\n"


def test_without_wheels_nothing_is_installed(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / ".whl")
    assert gpu.install_wheels() is None


def test_the_makefile_runs_it():
    done = subprocess.run(
        ["make", "--dry-run", "gpu", "DEVICE=cpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "benchmarks/gpu.py --device cpu --dry-run" in done.stdout
