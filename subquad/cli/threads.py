"""The number of CPU threads of a command: the cores that other processes leave idle."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from subquad.config import read_mapping
from subquad.memory import free_threads
from subquad.training.config import RunConfig
from subquad.training.processes import device_type, world_size

logger = logging.getLogger(__name__)
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which a user sets PyTorch's number of threads."""


def keep_to_idle_cores(device: str) -> None:
    """Set PyTorch's number of threads for the rest of the process to `idle_threads`, for a command on `device`."""
    threads = idle_threads(device, VARIABLES[0], logging.INFO)
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep PyTorch to one CPU thread within the block, for many small operations.

    Threads gain nothing there, and on a machine with a busy core they wait for each other most of the time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_threads(run: RunConfig) -> RunConfig:
    """Return the settings of a run with its number of threads filled in, which is set for what follows training too."""
    kept = Path(run.folder) / "config.yaml"
    run = run.replace(threads=kept_threads(run.threads, run.device, kept, "run.threads"))
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    return run


def kept_threads(threads: int | None, device: str, settings: Path, option: str) -> int | None:
    """Return the number of threads of a training, kept when it resumes so that results are bitwise equal.

    A given `threads` stays as it is. Otherwise return the number in the file `settings` of a resumed training, and
    `idle_threads` for a new one.
    """
    if threads is not None or world_size() > 1:
        return threads
    if settings.is_file():
        kept = read_mapping(settings)
        kept = kept.get("run", kept)
        return kept.get("threads") if isinstance(kept, dict) else None
    return idle_threads(device, option)


def idle_threads(device: str, option: str, level: int = logging.WARNING) -> int | None:
    """Return PyTorch's number of threads less the cores that other processes use; a number set in `VARIABLES` stays.

    None on a GPU and in one of several processes, which leave the number as it is. A message of `level` names the
    `option` that sets another number: a warning for a training, which keeps its number for good.
    """
    if world_size() > 1 or device_type(device) != "cpu":
        return None
    threads = torch.get_num_threads()
    if threads == 1 or any(os.environ.get(name) for name in VARIABLES):
        return threads
    found = free_threads()
    if found < threads:
        busy = "%d of %d CPU threads are used because other processes keep the other cores busy; %s sets the number"
        logger.log(level, busy, found, threads, option)
    return found
