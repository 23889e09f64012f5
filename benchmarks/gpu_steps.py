"""Steps of benchmarks/gpu.py. Each runs in its own process and writes `gpu_STEP.json`, again after each case."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.config import DecodeConfig, ModelConfig, OpsConfig
from benchmarks.decode import measure_decode
from benchmarks.model import measure_model
from benchmarks.ops import measure_ops
from benchmarks.report import Report
from subquad.evaluation.provenance import provenance
from tests.ops.triton import checks as kernels

ROOT = Path(__file__).resolve().parents[1]
LAST_SECONDS = 8.0
"""Seconds of a step's limit that are left when its processes are killed."""
OUTCOME = re.compile(r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
TAIL = 3000
"""Characters kept of the output of tests that failed."""


def checks(arguments: argparse.Namespace) -> int:
    """Check each family of kernels in a process of its own, all at once; then, on a GPU, tensors of 2^31 entries."""
    deadline, origin = time.monotonic() + arguments.limit - LAST_SECONDS, provenance(arguments.device)
    statuses: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    turns = [list(kernels.FAMILIES)]
    turns += [[kernels.LONG]] if arguments.device == "cuda" else []  # alone: it takes much of the GPU's memory
    for stale in arguments.folder.glob("gpu_checks_*.jsonl"):
        stale.unlink()
    for names in turns:
        given = arguments.device, arguments.dry_run, str(arguments.folder)
        running = {name: get_context("spawn").Process(target=kernels.run, args=(name, *given)) for name in names}
        for process in running.values():
            process.start()
        while set(running) - set(statuses):
            time.sleep(0.5)
            for name, process in running.items():
                if name not in statuses and time.monotonic() > deadline and process.is_alive():
                    process.kill()
                    statuses[name] = "stopped: no time was left"
                elif name not in statuses and not process.is_alive():
                    statuses[name] = "ok" if process.exitcode == 0 else f"ended with status {process.exitcode}"
            rows = [row for turn in turns for name in turn for row in _lines(kernels.file_of(given[2], name))]
            _write(arguments, "checks", {"rows": rows, "families": statuses, "provenance": origin})
    for name in statuses:
        kernels.file_of(arguments.folder, name).unlink(missing_ok=True)
    wrong = [row for row in rows if row["status"] != "ok"]
    for row in wrong:
        sys.stdout.write(f"{row['family']}, {row['dtype']}, {row['size']}, {row['what']}: {row['message']}\n")
    sys.stdout.write(f"{len(rows) - len(wrong)} checks are right, {len(wrong)} wrong; {statuses}\n")
    return 1 if wrong or set(statuses.values()) != {"ok"} else 0


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of the whole lines of a file, which may be missing."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def tests(arguments: argparse.Namespace) -> int:
    """Run the kernels' tests, each process with tests of one file alone, so that a fault stops no other file's.

    Those that name bfloat16 run first: of the rest, some may find no time.
    """
    where = ROOT / "tests" / "ops" / "triton"
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider"]
    # The project's options name plugins that may be missing here, and turn this machine's warnings into errors.
    command += ["-o", "addopts=", "-W", "default", "--confcutdir", str(where), "-m", "not slow"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    deadline, files = time.monotonic() + arguments.limit - LAST_SECONDS, _collected(command, where, environment)
    if arguments.dry_run:
        files = {file: names[:2] for file, names in files.items()}
    counts = {file: len(names) for file, names in files.items()}
    processes = shares(counts, 1 if arguments.dry_run else 3 * (os.cpu_count() or 2) // 4)
    running: dict[Path, subprocess.Popen[bytes]] = {}
    for file, names in files.items():
        names.sort(key=lambda name: "bfloat16" not in name)
        for n in range(processes[file]):
            log = arguments.folder / f"gpu_tests_{Path(file).stem}_{n}.log"
            with log.open("wb") as opened:
                own = [*command, "-v", "--tb=short", *names[n :: processes[file]]]
                running[log] = subprocess.Popen(own, cwd=ROOT, env=environment, stdout=opened, stderr=opened)
    values: dict[str, Any] = {"provenance": provenance(arguments.device), "collected": sum(map(len, files.values()))}
    alive = True
    while alive:
        time.sleep(0.5)
        alive = any(process.poll() is None for process in running.values())
        if time.monotonic() > deadline:
            for process in running.values():
                process.kill()
        values["files"] = {log.stem: _outcomes(log, process.poll()) for log, process in running.items()}
        _write(arguments, "tests", values)
    for log in running:
        log.unlink()
    return 0 if running and not any(process.returncode for process in running.values()) else 1


def shares(counts: dict[str, int], processes: int) -> dict[str, int]:
    """Return how many processes run each file's tests, by their number; each file has one."""
    share = dict.fromkeys(counts, 1)
    for _ in range(processes - len(counts) if counts else 0):
        share[max(counts, key=lambda file: counts[file] / share[file])] += 1
    return share


def _collected(command: list[str], where: Path, environment: dict[str, str]) -> dict[str, list[str]]:
    """Return the names of all tests by file; if collection fails, print its output and return none."""
    collect = [*command, "-q", "--collect-only", str(where)]
    done = subprocess.run(collect, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stdout.write(done.stdout + done.stderr)
        return {}
    found: dict[str, list[str]] = {}
    for name in (line.strip() for line in done.stdout.splitlines() if "::" in line):
        found.setdefault(name.partition("::")[0], []).append(name)
    return found


def _outcomes(log: Path, status: int | None) -> dict[str, Any]:
    """Return what the output of `pytest -v` says so far: the number of tests by outcome and the names of failed ones.

    `status` is the process's exit status, None while it runs.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    found = [match.groups() for line in text.splitlines() if (match := OUTCOME.match(line))]
    counts = {outcome: sum(one == outcome for _, one in found) for _, outcome in found}
    failed = [name for name, outcome in found if outcome in ("FAILED", "ERROR")]
    return {"exit_status": status, **counts, "failed": failed, "output": text[-TAIL:] if failed or status else ""}


OPERATORS: dict[str, Any] = {"dtype": "bfloat16", "heads": 16, "channels": 128, "batch_tokens": 32768}
DECODERS: dict[str, Any] = {"layers": 12, "dim": 768, "heads": 12, "vocab": 32768}
TINY_OPERATORS: dict[str, Any] = {"channels": 16, "latents": [8], "segment": [32], "peers": "none", "repeats": 1}
TINY_DECODERS: dict[str, Any] = {"layers": 1, "dim": 32, "heads": 2, "vocab": 64}
LENGTHS = (16384, 2048)


def ops(arguments: argparse.Namespace) -> int:
    """Time one operator after the other beside flash SDPA: at T = 16,384, then at 2,048."""
    return _operators(arguments, "ops", ("llp", "latte", "linear", "elita", "window"), "none")


def flex(arguments: argparse.Namespace) -> int:
    """Time LLP and the window beside FlexAttention with their masks, which inductor compiles first."""
    return _operators(arguments, "flex", ("llp", "window"), ["flex"])


def fla(arguments: argparse.Namespace) -> int:
    """Time the scans beside flash-linear-attention's, which try about 450 configurations before they run."""
    return _operators(arguments, "fla", ("linear", "latte", "elita"), ["fla"] if has("fla") else "auto")


def _operators(arguments: argparse.Namespace, step: str, names: tuple[str, ...], peers: str | list[str]) -> int:
    if arguments.dry_run:
        configs = [OpsConfig(mechanisms=[name], tokens=[64, 32], heads=1, **TINY_OPERATORS) for name in names]
    else:
        sizes = {**OPERATORS, "device": arguments.device, "seconds": 2.0, "peers": peers}
        configs = [OpsConfig(mechanisms=[name], tokens=[tokens], **sizes) for tokens in LENGTHS for name in names]
    return _measure(arguments, step, measure_ops, *configs)


def scans(arguments: argparse.Namespace) -> int:
    """Time gated and delta scans of 4 x 8 heads of 64 and 128 channels beside flash-linear-attention and mamba-ssm."""
    names = ["retnet", "gla", "mamba2", "delta_net", "gated_delta_net", "kda"]
    if arguments.dry_run:
        sizes = [(channels, 32, names) for channels in (16, 8)]
        more: dict[str, Any] = {**TINY_OPERATORS, "heads": 1}
    else:
        sizes = [(K, T, [name]) for T in (16384, 4096, 65536) for K in (64, 128) for name in names]
        peers = [name for name, module in (("fla", "fla"), ("mamba-ssm", "mamba_ssm")) if has(module)]
        more = {"device": arguments.device, "dtype": "bfloat16", "batch": 4, "seconds": 1.0, "peers": peers or "none"}
    configs = [OpsConfig(mechanisms=chosen, tokens=[T], **{**more, "channels": K}) for K, T, chosen in sizes]
    return _measure(arguments, "scans", measure_ops, *configs)


def model(arguments: argparse.Namespace) -> int:
    """Time decoders of 12 layers, width 768, one mechanism after the other: 4 x 16,384 tokens, then 16 x 2,048."""
    if arguments.dry_run:
        tiny = ModelConfig(mechanisms=["llp", "latte"], tokens=[64], batch=1, repeats=1, peers="none", **TINY_DECODERS)
        return _measure(arguments, "model", measure_model, tiny)
    sizes = {**DECODERS, "device": arguments.device, "seconds": 4.0, "peers": "none"}
    turns = [(tokens, name) for tokens in LENGTHS for name in ("llp", "latte", "linear", "elita")]
    configs = [ModelConfig(mechanisms=[n], tokens=[T], batch=65536 // T if T > 4096 else 16, **sizes) for T, n in turns]
    return _measure(arguments, "model", measure_model, *configs)


def decode(arguments: argparse.Namespace) -> int:
    """Time one token after 1,000 and after 100,000, also replayed from a CUDA graph, one mechanism after the other."""
    if arguments.dry_run:
        sizes = {**TINY_DECODERS, "mechanisms": ["llp", "latte", "elita"], "contexts": [40, 150], "peers": "none"}
        return _measure(arguments, "decode", measure_decode, DecodeConfig(repeats=2, piece=64, **sizes))
    sizes = {**DECODERS, "device": arguments.device, "dtype": "bfloat16", "seconds": 2.0, "piece": 4096, "graph": True}
    sizes |= {"contexts": [1000, 100000], "peers": ["transformers"] if has("transformers") else "none"}
    configs = [DecodeConfig(mechanisms=[name], **sizes) for name in ("latte", "llp", "linear", "elita", "window")]
    return _measure(arguments, "decode", measure_decode, *configs)


RUNS: dict[str, Callable[[argparse.Namespace], int]] = {
    run.__name__: run for run in (checks, ops, tests, flex, model, decode, fla, scans)
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
            other = row.get("channels") != reports[0].rows[0].get("channels")
            label = f"{row['label']}, {row['channels']} channels" if other else row["label"]
            lines.setdefault((label, row["tokens"], row["pass"]), {**row, "label": label})
        values["rows"] = list(lines.values())
        values["settings"] = dict(reports[0].settings)
        for name in {"mechanisms", "tokens", "contexts"} & set(values["settings"]):
            values["settings"][name] = list(dict.fromkeys(item for one in reports for item in one.settings[name]))
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
    """Write a step's results so far to its folder, and to $OUT if set, for a call that is cut before the step ends."""
    for folder in dict.fromkeys([arguments.folder, Path(os.environ.get("OUT") or arguments.folder)]):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"gpu_{step}.json"
        aside = file.with_suffix(".json.tmp")  # the step may be killed while it writes
        aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        aside.replace(file)


def has(module: str) -> bool:
    return find_spec(module) is not None
