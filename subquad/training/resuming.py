"""With which checkpoint a run goes on, and whether it may."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from subquad.models.stacks import options_of
from subquad.training import checkpoint
from subquad.training._task import Task
from subquad.training.config import TrainConfig
from subquad.training.errors import CheckpointError
from subquad.training.processes import Processes
from subquad.training.rng import rng_files

logger = logging.getLogger(__name__)


def check_folder(folder: Path) -> None:
    """Raise `ValueError` for a run's folder that is a file, or that holds files of something else than a run."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run.folder={str(folder)!r} is a file; give a folder")
    if (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir():
        return
    found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    if found:
        raise ValueError(
            f"run.folder={str(folder)!r} holds files of something else than a run ({', '.join(found[:3])}"
            f"{', ...' if found[3:] else ''}), which would be overwritten; give a new folder"
        )


def settings_of(task: Task, arguments: TrainingArguments, processes: Processes) -> dict[str, Any]:
    """What must stay the same for a run to go on; the precision is the one that `auto` chose.

    Of `batch` and `processes`, which are those that see different windows, the length and the product must.
    """
    config = task.config
    return {
        "model": config.model.to_dict(),
        "batch": config.batch.to_dict(),
        "optimizer": config.optimizer.to_dict(),
        "run.seed": config.run.seed,
        "run.precision": "bf16" if arguments.bf16 else "float32",
        "processes": processes.data_ranks,
        **task.identity,
    }


def checkpoint_to_resume(root: Path, config: TrainConfig, policy: str, settings: dict[str, Any]) -> Path | None:
    """The newest whole checkpoint in `root`, or None to begin. Raises `CheckpointError` where the run can't go on."""
    if policy == "never":
        if checkpoint.listing(root):
            raise CheckpointError(
                f"{root} holds checkpoints of an earlier run and run.resume is 'never'; choose another run.folder, "
                "delete that one, or set run.resume=auto"
            )
        return None
    found = checkpoint.newest_complete(root)
    if found is None:
        if policy == "must":
            raise CheckpointError(f"run.resume is 'must' but {root} holds no checkpoint; set run.resume=auto to start")
        return None
    manifest = checkpoint.read_manifest(found)
    try:
        checkpoint.check_settings(manifest, settings)
    except CheckpointError as error:
        raise CheckpointError(f"{found}: {error}") from error
    if manifest["step"] > config.run.steps:
        raise CheckpointError(
            f"{found} is at step {manifest['step']}, past run.steps={config.run.steps}; raise run.steps or choose "
            "another run.folder"
        )
    logger.info("going on from %s", found)
    return found


def warn_of_new_random_numbers(found: Path, config: TrainConfig, processes: Processes) -> None:
    """Say so where the random numbers of a run that draws some begin anew, having another number of processes."""
    made_by = len(rng_files(found))
    if made_by != processes.world and draws(config):
        logger.warning(
            "%s was made by %d processes and %d go on: the windows are the same, but what is drawn at random (dropout, "
            "augmentation, hidden tokens) is other than if as many went on",
            found.name,
            made_by,
            processes.world,
        )


def draws(config: TrainConfig) -> bool:
    """Whether a training step draws random numbers."""
    dropout = config.model.dropout > 0 or config.model.attention_dropout > 0 or config.lora.dropout > 0
    return (
        dropout
        or options_of(config.model).draws
        or config.classify.augment
        or bool(config.pretrain.hides)
        or _redraws(config)
    )


def _redraws(config: TrainConfig) -> bool:
    return any(options.get("redraw_interval") for options in config.model.options.values())
