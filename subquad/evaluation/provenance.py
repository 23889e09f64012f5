"""Provenance of a measurement: date, machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from subquad.memory import total_bytes
from subquad.version import __version__

WRITTEN = ("README.md", "result.json", "plot.png")


def machine(device: torch.device | str) -> dict[str, Any]:
    """Return the CPU and, for a CUDA `device`, the GPU; cores, threads, bytes of memory."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_bytes("cpu"),
    }
    if torch.device(device).type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "gpu_memory_bytes": total_bytes(device)}
    return found


def versions(distributions: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the versions of Python, subquad, torch, CUDA, and of numpy, triton and `distributions` if installed."""
    found = {"python": platform.python_version(), "subquad": __version__, "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("numpy", "triton", *distributions):
        installed = version_of(name)
        if installed is not None:
            found[name] = installed
    return found


def version_of(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """Return this checkout's commit (plus "with changes" if files differ), else SUBQUAD_COMMIT, else `unknown`.

    Results that experiments write into their own folders don't count as changes.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return os.environ.get("SUBQUAD_COMMIT", "unknown")
    written = (f":(top,exclude)experiments/*/{name}" for name in WRITTEN)
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *written)
    return f"{head} with changes" if changed else head


def provenance(device: torch.device | str, distributions: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the date, `machine(device)`, `versions(distributions)` and the commit."""
    return {
        "date": date.today().isoformat(),
        "machine": machine(device),
        "versions": versions(distributions),
        "commit": commit(),
    }


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
