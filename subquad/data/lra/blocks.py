"""Data that is made in blocks, by several processes, each block from its own random numbers.

A block is kept as soon as it is whole, so that work that was stopped goes on where it was; which process makes a block
changes nothing. Child processes run this module: they need nothing of the program that starts them.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from subquad.data._arrays import load_arrays
from subquad.data.files import aside
from subquad.data.lra.store import Labelled

logger = logging.getLogger(__name__)


def make_blocks(
    maker: str,
    options: dict[str, Any],
    seed: int,
    folder: Path,
    numbers: Sequence[int],
    *,
    workers: int | None = None,
    done: Callable[[int], None] | None = None,
) -> None:
    """Make the blocks `numbers` that are not in `folder` yet; `done(count)` is called after each.

    `maker` is a module with a function `make_block(options, seed, number) -> Labelled`. `workers` processes share the
    work (None: one for each CPU). Raises `ValueError` where a block does, `RuntimeError` where a process fails.
    """
    missing = [number for number in numbers if read_block(folder, number) is None]
    count, report = len(numbers) - len(missing), done or (lambda _: None)
    report(count)
    workers = min(usable_cpus() if workers is None else workers, len(missing))
    if workers <= 1:
        for number in missing:
            _make(maker, options, seed, folder, number)
            count += 1
            report(count)
        return
    task = {"maker": maker, "options": options, "seed": seed, "folder": str(folder)}
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        try:
            children = [_start(task | {"numbers": missing[i::workers]}, writing) for i in range(workers)]
        finally:
            os.close(writing)
        try:
            for line in lines:  # ends when no child is left
                _raise_failure(line)
                count += 1
                report(count)
        finally:
            for child in children:
                child.terminate()
                child.wait()
    if count < len(numbers):
        raise RuntimeError(f"a process that makes data has ended early: {len(numbers) - count} blocks are missing")


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_block(folder: Path, number: int) -> Labelled | None:
    """Block `number`, or None where there is none or a damaged one."""
    path = folder / f"{number}.npz"
    try:
        arrays = load_arrays(path.read_bytes(), path)
        return _checked(Labelled(*(arrays.get(name, np.empty(0)) for name in Labelled._fields)), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged and is made again: %s", path, error)
        return None


def _checked(block: Labelled, path: Path) -> Labelled:
    """The block; `ValueError` where its arrays do not fit each other."""
    tokens, lengths, labels = block
    if not all(array.ndim == 1 and array.dtype.kind in "iu" for array in block):
        raise ValueError(f"{path}: tokens, lengths and labels must be rows of whole numbers")
    if len(lengths) != len(labels) or (lengths < 1).any() or lengths.sum(dtype=object) != len(tokens):
        raise ValueError(f"{path}: {len(lengths)} lengths, {len(labels)} labels and {len(tokens)} tokens do not fit")
    return block


def _make(maker: str, options: dict[str, Any], seed: int, folder: Path, number: int) -> None:
    block = importlib.import_module(maker).make_block(options, seed, number)
    with aside(folder / f"{number}.npz") as path, path.open("wb") as stream:
        np.savez(stream, **block._asdict())


def _start(task: dict[str, Any], output: int) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    child = subprocess.Popen(
        [sys.executable, "-m", "subquad.data.lra.blocks"],
        stdin=subprocess.PIPE,
        stdout=output,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:  # one that has failed is missed by its blocks
        child.stdin.write(json.dumps(task))
    return child


def _raise_failure(line: str) -> None:
    """Raise what a child has failed with; a line without a failure is the number of a block that is made."""
    if line.startswith("{"):
        failure = json.loads(line)
        raise (ValueError if failure["kind"] == "ValueError" else RuntimeError)(failure["message"])


def main() -> None:
    """Make the blocks that standard input asks for; each one's number goes to standard output, or what went wrong."""
    task = json.load(sys.stdin)
    folder = Path(task["folder"])
    try:
        for number in task["numbers"]:
            _make(task["maker"], task["options"], task["seed"], folder, number)
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # the program that reads it is gone: no more is wanted, nor a message
    except Exception as error:
        message = f"block {number}: {error}" if isinstance(error, ValueError) else f"block {number}: {error!r}"
        sys.stdout.write(json.dumps({"kind": type(error).__name__, "message": message}) + "\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
