"""What a figure was measured on: machine, versions, commit, and how fast the machine copies and multiplies."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from subquad import __version__
from subquad.bench._memory import total_bytes
from subquad.bench._timing import Run, Timing, clock_of, interleave

COPIED = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Bytes: far beyond any cache."""
MULTIPLIED = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices."""


def machine(device: torch.device | str) -> dict[str, Any]:
    """The processor or GPU, cores, memory and threads."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_bytes("cpu"),
    }
    if torch.device(device).type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "gpu_memory_bytes": total_bytes(device)}
    return found


def described(found: dict[str, Any]) -> str:
    """What `machine` found, in a few words."""
    return found.get("gpu") or f"{found.get('cpu', 'a CPU')}, PyTorch threads: {found.get('threads', '?')}"


def versions(distributions: tuple[str, ...] = ()) -> dict[str, str]:
    """Of Python, subquad, torch, Triton and those of the distributions that are there."""
    found = {"python": platform.python_version(), "subquad": __version__, "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("numpy", "triton", *distributions):
        installed = version_of(name)
        if installed is not None:
            found[name] = installed
    return found


def version_of(distribution: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of this checkout, marked where files differ from it; else SUBQUAD_COMMIT, else `unknown`."""

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
    return f"{head} with changes" if git("status", "--porcelain", "--untracked-files=no") else head


def provenance(device: torch.device | str, distributions: tuple[str, ...] = ()) -> dict[str, Any]:
    """All of that, and the day."""
    return {
        "date": date.today().isoformat(),
        "machine": machine(device),
        "versions": versions(distributions),
        "commit": commit(),
    }


def ceilings(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second that a copy reads and writes, and FLOP a second of a matrix product, of the same run."""
    kind = torch.device(device).type
    source = torch.ones(COPIED[kind] // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    n = MULTIPLIED[kind]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    runs = {
        "copy": Run(lambda _: target.copy_(source)),
        "matmul": Run(lambda _: torch.mm(a, b, out=product)),
    }
    found = interleave(runs, clock=clock_of(device), repeats=5)
    times = {name: timing.median for name, timing in found.items() if isinstance(timing, Timing)}
    moved, done = 2 * source.nbytes, 2 * n**3
    return {
        **({"copy_bytes_per_s": moved / times["copy"]} if "copy" in times else {}),
        **({"matmul_flops_per_s": done / times["matmul"]} if "matmul" in times else {}),
    }


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
