"""The number of CPU threads of a command that trains."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from subquad.config import read_mapping
from subquad.memory import free_threads
from subquad.training.config import RunConfig
from subquad.training.processes import device_type, world_size

logger = logging.getLogger(__name__)


def with_threads(run: RunConfig) -> RunConfig:
    """Return the settings of a run with its number of threads filled in."""
    kept = Path(run.folder) / "config.yaml"
    return run.replace(threads=kept_threads(run.threads, run.device, kept, "run.threads"))


def kept_threads(threads: int | None, device: str, settings: Path, option: str) -> int | None:
    """Return the number of threads of a training, kept when it resumes so that results are bitwise equal.

    A given `threads` stays as it is, also None in one of several processes. Otherwise return the number in the file
    `settings` of a resumed training; for a new one on a CPU, PyTorch's number less the cores that other processes use.
    """
    if threads is not None or world_size() > 1:
        return threads
    if settings.is_file():
        kept = read_mapping(settings)
        kept = kept.get("run", kept)
        return kept.get("threads") if isinstance(kept, dict) else None
    if device_type(device) != "cpu":
        return None
    found = free_threads()
    if found < torch.get_num_threads():
        logger.warning("%s is set to %d because other processes keep the other cores busy", option, found)
    return found
