"""Steps of benchmarks/gpu.py. Each runs in its own process and writes `gpu_STEP.json`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.config import DecodeConfig, ModelConfig, OpsConfig
from benchmarks.decode import measure_decode
from benchmarks.model import measure_model
from benchmarks.ops import measure_ops
from benchmarks.report import Report
from subquad.evaluation.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
SHARDS = 8
"""Most processes that run the tests."""
LAST_SECONDS = 10.0
"""Seconds for interrupted tests to write their reports."""


def tests(arguments: argparse.Namespace) -> int:
    """Run the kernels' tests, in parallel because each compiles its kernel first; in a dry run a few of them."""
    where = ROOT / "tests" / "ops" / "triton"
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    # The project's options name plugins that may be missing here, and turn this machine's warnings into errors.
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
    origin = {"provenance": provenance(arguments.device)}
    _write(arguments, "tests", {"collected": len(names), "exit_statuses": statuses, **_counts(reports), **origin})
    for report in reports:
        report.unlink(missing_ok=True)
    return 0 if names and not any(statuses) else 1


def _collected(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the names of all tests; if collection fails, print its output and return none."""
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
    """Return the exit statuses; after `seconds`, interrupt the processes, which then write their reports."""
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
    """Return the numbers of all and of skipped tests, and the names of failed ones."""
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


OPERATORS: dict[str, Any] = {
    "dtype": "bfloat16",
    "heads": 16,
    "channels": 128,
    "mechanisms": ["latte", "llp", "linear", "elita"],
    "batch_tokens": 32768,
    "tokens": [2048, 16384],
}
DECODERS: dict[str, Any] = {"dtype": "bfloat16", "layers": 12, "dim": 768, "heads": 12, "vocab": 32768}
TINY_OPERATORS: dict[str, Any] = {"channels": 16, "latents": [8], "segment": [32], "peers": "none", "repeats": 1}
TINY_DECODERS: dict[str, Any] = {"layers": 1, "dim": 32, "heads": 2, "vocab": 64}


def ops(arguments: argparse.Namespace) -> int:
    """Time operators at the sizes of the aims, beside torch's own kernels."""
    if arguments.dry_run:
        backends = ["torch", "triton"] if has("triton") else ["torch"]
        tiny = OpsConfig(tokens=[48, 96], heads=2, backends=backends, **TINY_OPERATORS)
        return _measure(arguments, "ops", measure_ops, tiny)
    sizes = {**OPERATORS, "device": arguments.device}
    sizes["peers"] = ["sdpa-cudnn", "flex"] if arguments.device == "cuda" else "none"
    aims = OpsConfig(seconds=5.0, segment=[256, 512], **sizes)
    window = OpsConfig(seconds=2.0, **{**sizes, "mechanisms": ["window"]})
    return _measure(arguments, "ops", measure_ops, aims, window)


def fla(arguments: argparse.Namespace) -> int:
    """Time the scans beside flash-linear-attention's, which autotune before they run."""
    if arguments.dry_run or arguments.device == "cpu":
        tiny = OpsConfig(tokens=[32], heads=1, mechanisms=["latte"], **TINY_OPERATORS)
        return _measure(arguments, "fla", measure_ops, tiny)
    sizes = {**OPERATORS, "device": arguments.device, "mechanisms": ["latte", "linear", "elita"]}
    beside = OpsConfig(peers=["fla"] if has("fla") else "auto", seconds=4.0, **sizes)
    return _measure(arguments, "fla", measure_ops, beside)


def warm(arguments: argparse.Namespace) -> int:
    """Compile flash-linear-attention's kernels into Triton's cache while the tests run; discard the times."""
    sizes = {**OPERATORS, "device": arguments.device, "tokens": [2048], "batch_tokens": 4096}
    measure_ops(OpsConfig(peers=["fla"], repeats=1, **sizes))
    return 0


def model(arguments: argparse.Namespace) -> int:
    """Time decoders of 12 layers, width 768, on 16 x 2,048 and 4 x 16,384 tokens."""
    if arguments.dry_run:
        tiny = ModelConfig(mechanisms=["llp", "latte"], tokens=[64], repeats=1, peers="none", **TINY_DECODERS)
        return _measure(arguments, "model", measure_model, tiny)
    sizes = {**DECODERS, "device": arguments.device, "mechanisms": ["llp", "latte", "linear", "elita"]}
    sizes |= {"seconds": 6.0, "peers": "none"}
    short, long = ModelConfig(tokens=[2048], batch=16, **sizes), ModelConfig(tokens=[16384], batch=4, **sizes)
    return _measure(arguments, "model", measure_model, short, long)


def decode(arguments: argparse.Namespace) -> int:
    """Time one token after 1,000 and after 100,000."""
    if arguments.dry_run:
        sizes = {**TINY_DECODERS, "mechanisms": ["llp", "latte", "elita"], "contexts": [40, 150]}
        return _measure(arguments, "decode", measure_decode, DecodeConfig(repeats=2, piece=64, **sizes))
    sizes = {**DECODERS, "device": arguments.device, "mechanisms": ["llp", "latte", "linear", "elita", "window"]}
    config = DecodeConfig(contexts=[1000, 100000], seconds=8.0, piece=4096, **sizes)
    return _measure(arguments, "decode", measure_decode, config)


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    run.__name__: run for run in (tests, ops, model, decode, fla, warm)
}


def _measure(arguments: argparse.Namespace, step: str, measure: Callable[..., Report], *configs: Any) -> int:
    """Measure the configurations as one report, written after each length. Return 1 if a case of ours failed."""
    deadline = time.monotonic() + 0.8 * arguments.limit
    command = f"python benchmarks/gpu.py --device {arguments.device}{' --dry-run' if arguments.dry_run else ''}"
    earlier: list[Report] = []

    def joined(report: Report) -> dict[str, Any]:
        values = report.to_dict()
        reports = [*earlier, report]
        lines: dict[Any, Any] = {}
        for row in (row for one in reports for row in one.rows):  # every part has the base; the first part's counts
            lines.setdefault((row["label"], row["tokens"], row["pass"]), row)
        values["rows"] = list(lines.values())
        values["settings"] = dict(reports[0].settings)
        for name in {"tokens", "contexts"} & set(values["settings"]):
            values["settings"][name] = sorted({number for one in reports for number in one.settings[name]})
        return values

    for config in configs:
        report = measure(
            config, shown=True, deadline=deadline, command=command, found=lambda r: _write(arguments, step, joined(r))
        )
        _write(arguments, step, joined(report))
        sys.stdout.write(report.table() + "\n")
        earlier.append(report)
    return 1 if any(report.failures for report in earlier) else 0


def _write(arguments: argparse.Namespace, step: str, values: dict[str, Any]) -> None:
    file = arguments.folder / f"gpu_{step}.json"
    aside = file.with_suffix(".json.tmp")  # the step may be killed while it writes
    aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    aside.replace(file)


def has(module: str) -> bool:
    return find_spec(module) is not None
