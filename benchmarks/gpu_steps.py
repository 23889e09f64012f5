"""The steps of benchmarks/gpu.py; each runs in a process of its own and writes `gpu_STEP.json`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHARDS = 8
"""Processes that run the tests, at most."""
LAST_SECONDS = 10.0
"""For the tests that are interrupted to write what they found."""


class Step(NamedTuple):
    """What runs in a process of its own."""

    name: str
    seconds: int
    """The time limit."""
    run: Callable[[argparse.Namespace], int]


def tests(arguments: argparse.Namespace) -> int:
    """The kernels' tests, several processes at a time since each kernel is compiled first; in a dry run a few."""
    where = ROOT / "tests" / "ops" / "triton"
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    # The project's options name plugins that need not be there, and a machine's own warnings are no failures.
    command += ["-o", "addopts=", "-W", "default", "--confcutdir", str(where), "-m", "not slow"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    names = _collected([*command, "--collect-only", str(where)], environment)
    if arguments.dry_run:
        names = _first_of_each_file(names)
    shards = 1 if arguments.dry_run else max(1, min(SHARDS, (os.cpu_count() or 2) // 2))
    reports = [arguments.folder / f"gpu_tests_{n}.xml" for n in range(shards)]
    running = [
        subprocess.Popen([*command, f"--junitxml={report}", *names[n::shards]], cwd=ROOT, env=environment)
        for n, report in enumerate(reports)
        if names[n::shards]
    ]
    statuses = _ended(running, arguments.limit - LAST_SECONDS)
    _write(
        arguments,
        "tests",
        {"collected": len(names), "exit_statuses": statuses, **_counts(reports), **_origin(arguments)},
    )
    for report in reports:
        report.unlink(missing_ok=True)
    return 0 if names and not any(statuses) else 1


def _collected(command: list[str], environment: dict[str, str]) -> list[str]:
    """The names of all tests; none where they cannot be collected, which then is said."""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stdout.write(done.stdout + done.stderr)
        return []
    return [line.strip() for line in done.stdout.splitlines() if "::" in line]


def _first_of_each_file(names: list[str], each: int = 2) -> list[str]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition("::")[0], []).append(name)
    return [name for of_file in found.values() for name in of_file[:each]]


def _ended(running: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Their exit statuses; those that take longer are interrupted, and still write what they found."""
    deadline = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
    for process in running:
        try:
            process.wait(LAST_SECONDS / 2)
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in running]


def _counts(reports: list[Path]) -> dict[str, Any]:
    """How many tests ran and were skipped, and the names of those that failed."""
    from xml.etree import ElementTree

    total, skipped, broken = 0, 0, list[str]()
    for report in reports:
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.is_file() else None
        if suite is None:
            continue
        total, skipped = total + int(suite.get("tests", 0)), skipped + int(suite.get("skipped", 0))
        broken += [
            f"{case.get('classname')}.{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    return {"tests": total, "skipped": skipped, "failed": broken}


def ops(arguments: argparse.Namespace) -> int:
    """Operators at the sizes of the aims, beside torch's own kernels."""
    from benchmarks.config import OpsConfig
    from benchmarks.ops import measure_ops

    if arguments.dry_run:
        tiny: dict[str, Any] = {
            "heads": 2,
            "channels": 16,
            "latents": [8],
            "segment": [32],
            "peers": "none",
            "repeats": 1,
        }
        backends = ["torch", "triton"] if has("triton") else ["torch"]
        return _measure(arguments, "ops", [(measure_ops, OpsConfig(tokens=[48, 96], backends=backends, **tiny))])
    sizes = _operator_sizes(arguments)
    torchs = ["sdpa-cudnn", "flex"] if arguments.device == "cuda" else "none"
    aims = OpsConfig(peers=torchs, seconds=5.0, **{**sizes, "segment": [256, 512]})
    window = OpsConfig(peers=torchs, seconds=2.0, **{**sizes, "mechanisms": ["window"]})
    return _measure(arguments, "ops", [(measure_ops, aims), (measure_ops, window)])


def fla(arguments: argparse.Namespace) -> int:
    """The scans again, beside flash-linear-attention's, which tune themselves for a while before they run."""
    from benchmarks.config import OpsConfig
    from benchmarks.ops import measure_ops

    if arguments.dry_run or arguments.device == "cpu":
        tiny: dict[str, Any] = {
            "heads": 1,
            "channels": 16,
            "latents": [8],
            "segment": [32],
            "peers": "none",
            "repeats": 1,
        }
        return _measure(arguments, "fla", [(measure_ops, OpsConfig(tokens=[32], mechanisms=["latte"], **tiny))])
    sizes = {**_operator_sizes(arguments), "mechanisms": ["latte", "linear", "elita"]}
    peers: Any = ["fla"] if has("fla") else "auto"
    return _measure(arguments, "fla", [(measure_ops, OpsConfig(peers=peers, seconds=4.0, **sizes))])


def warm(arguments: argparse.Namespace) -> int:
    """Compile flash-linear-attention's kernels into Triton's cache, beside the tests; nothing is kept of its times."""
    from benchmarks.config import OpsConfig
    from benchmarks.ops import measure_ops

    sizes = {**_operator_sizes(arguments), "tokens": [2048], "batch_tokens": 4096}
    measure_ops(OpsConfig(peers=["fla"], repeats=1, **sizes))
    return 0


def model(arguments: argparse.Namespace) -> int:
    """Decoders of 12 layers, width 768, on 16 x 2,048 and on 4 x 16,384 tokens."""
    from benchmarks.config import ModelConfig
    from benchmarks.model import measure_model

    if arguments.dry_run:
        tiny: dict[str, Any] = {"layers": 1, "dim": 32, "heads": 2, "vocab": 64, "repeats": 1, "peers": "none"}
        config = ModelConfig(mechanisms=["llp", "latte"], tokens=[64], **tiny)
        return _measure(arguments, "model", [(measure_model, config)])
    sizes: dict[str, Any] = {"layers": 12, "dim": 768, "heads": 12, "vocab": 32768, "seconds": 6.0, "peers": "none"}
    sizes |= {"device": arguments.device, "dtype": "bfloat16", "mechanisms": ["llp", "latte", "linear", "elita"]}
    configs = [ModelConfig(tokens=[2048], batch=16, **sizes), ModelConfig(tokens=[16384], batch=4, **sizes)]
    return _measure(arguments, "model", [(measure_model, config) for config in configs])


def decode(arguments: argparse.Namespace) -> int:
    """One token after 1,000 and after 100,000."""
    from benchmarks.config import DecodeConfig
    from benchmarks.decode import measure_decode

    if arguments.dry_run:
        tiny: dict[str, Any] = {"layers": 1, "dim": 32, "heads": 2, "vocab": 64, "repeats": 2, "piece": 64}
        config = DecodeConfig(mechanisms=["llp", "latte", "elita"], contexts=[40, 150], **tiny)
        return _measure(arguments, "decode", [(measure_decode, config)])
    sizes: dict[str, Any] = {"layers": 12, "dim": 768, "heads": 12, "vocab": 32768, "seconds": 8.0, "piece": 4096}
    mechanisms = ["llp", "latte", "linear", "elita", "window"]
    config = DecodeConfig(
        device=arguments.device, dtype="bfloat16", mechanisms=mechanisms, contexts=[1000, 100000], **sizes
    )
    return _measure(arguments, "decode", [(measure_decode, config)])


STEPS = (
    Step("tests", 160, tests),
    Step("ops", 130, ops),
    Step("model", 80, model),
    Step("decode", 40, decode),
    Step("fla", 130, fla),
    Step("warm", 160, warm),
)
NAMES = tuple(step.name for step in STEPS if step.name != "warm")


def _operator_sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": arguments.device,
        "dtype": "bfloat16",
        "heads": 16,
        "channels": 128,
        "latents": [64],
        "segment": [256],
        "mechanisms": ["latte", "llp", "linear", "elita"],
        "batch_tokens": 32768,
        "tokens": [2048, 16384],
    }


def _measure(arguments: argparse.Namespace, step: str, parts: list[tuple[Callable[..., Any], Any]]) -> int:
    """Measure the parts as one report, written after each length; 1 where something of ours failed."""
    deadline = time.monotonic() + 0.8 * arguments.limit
    command = f"python benchmarks/gpu.py --device {arguments.device}{' --dry-run' if arguments.dry_run else ''}"
    earlier: list[Any] = []

    def joined(report: Any) -> dict[str, Any]:
        values = report.to_dict()
        reports = [*earlier, report]
        lines: dict[Any, Any] = {}
        for row in (row for one in reports for row in one.rows):  # of the base, which every part has, the first part's
            lines.setdefault((row["label"], row["tokens"], row["pass"]), row)
        values["rows"] = list(lines.values())
        values["settings"] = dict(reports[0].settings)
        for name in {"tokens", "contexts"} & set(values["settings"]):
            values["settings"][name] = sorted({number for one in reports for number in one.settings[name]})
        return values

    for measure, config in parts:
        report = measure(
            config, shown=True, deadline=deadline, command=command, found=lambda r: _write(arguments, step, joined(r))
        )
        _write(arguments, step, joined(report))
        sys.stdout.write(report.table() + "\n")
        earlier.append(report)
    return 1 if any(report.failures for report in earlier) else 0


def _write(arguments: argparse.Namespace, step: str, values: dict[str, Any]) -> None:
    file = arguments.folder / f"gpu_{step}.json"
    aside = file.with_suffix(".json.tmp")  # the step may be stopped at any moment
    aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    aside.replace(file)


def _origin(arguments: argparse.Namespace) -> dict[str, Any]:
    from subquad.evaluation.provenance import provenance

    return {"provenance": provenance(arguments.device)}


def has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
