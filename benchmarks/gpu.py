"""Measure on a GPU without network, the most valuable first (`make gpu`); a call takes less than nine minutes.

    python benchmarks/gpu.py                      # are the kernels right? then T = 16,384, the tests
    python benchmarks/gpu.py --only model,decode
    python benchmarks/gpu.py --only fla           # beside flash-linear-attention
    python benchmarks/gpu.py --only scans         # gated and delta scans, beside it too
    python benchmarks/gpu.py --only ops,tests --limits ops=60,tests=300
    python benchmarks/gpu.py [--device cuda|cpu] [--dry-run] [--seconds 520] [--folder FOLDER]

Needs torch, triton, numpy, pyyaml, tokenizers, pytest and this checkout. Wheels of peers in `.whl/` are unpacked into
`.whl/site`; nothing else is installed. Each step runs in its own process with a time limit and writes `gpu_STEP.json`
to benchmarks/results, and to $OUT if set, again after each case: a call that is cut short keeps what it had. If a step
fails or no time is left for it, its file says so and the next step runs, in the order of `--only`. With
`--device cpu --dry-run` all steps run in tiny sizes on a CPU, the kernels in Triton's interpreter. That tests this
script alone; its files go to runs/gpu-dry-run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BEGUN = time.monotonic()


class Step(NamedTuple):
    """A key of `gpu_steps.RUNS` and its time limit in seconds."""

    name: str
    seconds: int


STEPS = (
    Step("checks", 215),
    Step("ops", 110),
    Step("tests", 195),
    Step("flex", 90),
    Step("model", 250),
    Step("decode", 250),
    Step("fla", 510),
    Step("scans", 510),
)
NAMES = tuple(step.name for step in STEPS)
FIRST = NAMES[:3]
"""Steps of a call that names none. The others are for calls of their own."""
WHEELS = ROOT / ".whl"
SECONDS = 520.0
"""Limit for all steps: nine minutes less start-up and shutdown."""
LEAST = 5.0
"""Seconds that must be left for a step to start."""
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment that silences torch's profiler, which measures memory."""
TAIL = 4000
"""Characters kept of the end of a step's output."""


def main() -> int:
    """Run all steps, or the one of `--step` in this process. Return 1 if a step failed, 2 if none can run here."""
    arguments = _arguments()
    if problem := _missing(arguments.device):
        sys.stderr.write(f"error: {problem}\n")
        return 2
    if arguments.step is not None:
        sys.path.insert(0, str(ROOT))  # a script's own folder is on the path instead
        from benchmarks.gpu_steps import RUNS  # imports torch

        arguments.limit -= time.monotonic() - BEGUN
        return RUNS[arguments.step](arguments)
    deadline = time.monotonic() + arguments.seconds
    arguments.folder.mkdir(parents=True, exist_ok=True)
    site = install_wheels()
    limits = time_limits([STEPS[NAMES.index(name)] for name in arguments.only], arguments.seconds, arguments.limits)
    failed = []
    for step, limit in limits.items():
        record = run_step(step, arguments, site, min(limit, deadline - time.monotonic()))
        sys.stdout.write(f"{step.name}: {record['status']}, {record['seconds']:.0f} s\n")
        sys.stdout.flush()
        if record["status"] != "ok":
            failed.append(step.name)
    if failed:
        sys.stdout.write(f"not ok: {', '.join(failed)}; see gpu_*.json in {arguments.folder}\n")
    return 1 if failed else 0


def time_limits(steps: list[Step], seconds: float, given: dict[str, float]) -> dict[Step, float]:
    """Return each step's limit: the given one, else its own, by one factor shorter if what is left is too short."""
    own = [step.seconds for step in steps if step.name not in given]
    left = max(0.0, seconds - sum(given.values()))
    share = min(1.0, left / max(1, sum(own)))
    return {step: given.get(step.name, share * step.seconds) for step in steps}


def run_step(step: Step, arguments: argparse.Namespace, site: Path | None, limit: float) -> dict[str, Any]:
    """Run a step in its own process, add status, seconds and output to its file, and return them."""
    file = arguments.folder / f"gpu_{step.name}.json"
    file.unlink(missing_ok=True)  # an old result must not look like this run's
    start, output = time.monotonic(), ""
    if limit < LEAST:
        status = "skipped: no time was left for it"
    else:
        process = _start(step.name, arguments, site, limit)
        try:
            output, _ = process.communicate(timeout=limit)
            status = "ok" if process.returncode == 0 else f"failed with status {process.returncode}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
        except BaseException:
            _stop(process)
            raise
        if status.startswith("stopped"):
            output = _stop(process)
    sys.stdout.write(output)
    record = {"status": status, "seconds": time.monotonic() - start, "output": output[-TAIL:]}
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**found, "step": record}, indent=2) + "\n", encoding="utf-8")
    if os.environ.get("OUT"):
        Path(os.environ["OUT"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, os.environ["OUT"])
    return record


def install_wheels() -> Path | None:
    """Install the wheels in `.whl/`, without dependencies, and return their folder, or None without wheels."""
    wheels = sorted(WHEELS.glob("*.whl"))
    if not wheels:
        return None
    site = WHEELS / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    where = ["--no-index", "--find-links", str(WHEELS), "--no-deps", "--target", str(site)]
    done = subprocess.run([*pip, *where, *map(str, wheels)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"can't install the wheels in {WHEELS}:\n{done.stderr}\n")
        return None
    return site


def _start(step: str, arguments: argparse.Namespace, site: Path | None, limit: float) -> subprocess.Popen[str]:
    """Start a step as leader of a process group, so that `_stop` ends its children too."""
    environment = dict(os.environ)
    places = [str(ROOT), *([str(site)] if site else []), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    environment |= QUIET
    for own in ("TRITON_INTERPRET", "PYTEST_ADDOPTS"):  # the latter may name plugins that this pytest lacks
        environment.pop(own, None)
    if arguments.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, str(Path(__file__)), "--step", step, "--device", arguments.device]
    command += ["--folder", str(arguments.folder), "--limit", f"{limit:.0f}"]
    command += ["--dry-run"] if arguments.dry_run else []
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )


def _stop(process: subprocess.Popen[str]) -> str:
    """Kill a step and its children, and return its remaining output."""
    with contextlib.suppress(ProcessLookupError):  # children may outlive the leader, so kill the group
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0] or ""


def _missing(device: str) -> str | None:
    """Return the reason why the steps can't run here, or None."""
    lacking = [module for module in ("torch", "numpy", "yaml", "tokenizers", "pytest") if find_spec(module) is None]
    if lacking:
        return f"{sys.executable} lacks {', '.join(lacking)}; choose another Python: make gpu PYTHON=python3.12"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no GPU; for a dry run in tiny sizes on a CPU: make gpu DEVICE=cpu"
    return None


def given_limits(text: str, steps: Sequence[str]) -> dict[str, float]:
    """Read `STEP=SECONDS,...`, limits of some of `steps`."""
    limits = {}
    for item in text.split(",") if text else []:
        name, _, number = item.partition("=")
        if name not in steps:
            raise ValueError(f"--limits has {name!r}, which is no step of this call; valid: {', '.join(steps)}")
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = math.nan
        if not 0 < limits[name] < math.inf:
            raise ValueError(f"--limits needs a number of seconds above 0 for {name}, as in {name}=60; got {number!r}")
    return limits


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu needs --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="use tiny sizes, to test this script")
    only = f"steps of {', '.join(NAMES)}, separated by commas (default: {', '.join(FIRST)}; in a dry run all)"
    parser.add_argument("--only", default=None, help=only)
    seconds = f"limit for all steps (default: {SECONDS:.0f}; in a dry run that of each)"
    limits = "limits of single steps in seconds, as in ops=60,tests=300, which --seconds doesn't shorten"
    parser.add_argument("--limits", default="", metavar="STEP=SECONDS,...", help=limits)
    parser.add_argument("--seconds", type=float, default=None, help=seconds)
    parser.add_argument("--folder", type=Path, default=None, help="output folder (default: benchmarks/results)")
    parser.add_argument("--step", choices=[step.name for step in STEPS], help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=300.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",") if arguments.only else NAMES if arguments.dry_run else FIRST
    if unknown := set(arguments.only) - set(NAMES):
        parser.error(f"unknown step {', '.join(sorted(unknown))}; valid: {', '.join(NAMES)}")
    try:
        arguments.limits = given_limits(arguments.limits, arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "cpu" and not arguments.dry_run:
        parser.error("--device cpu needs --dry-run (`make gpu DEVICE=cpu` adds it)")
    if arguments.seconds is None:
        arguments.seconds = sum(step.seconds for step in STEPS) if arguments.dry_run else SECONDS
    if arguments.folder is None:
        arguments.folder = ROOT / ("runs/gpu-dry-run" if arguments.dry_run else "benchmarks/results")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
