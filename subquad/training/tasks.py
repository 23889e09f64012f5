"""What a run learns, prepared: the next token or pixel, the labels of sequences, what a probe asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from subquad.attention import mechanism, names
from subquad.config import suggest
from subquad.models.stacks import STACKS
from subquad.training._task import Task
from subquad.training._task_classify import classification_task, labelled
from subquad.training._task_image import check_image, image_task
from subquad.training._task_language import language_task, window_labels
from subquad.training._task_pretrain import pretraining_task
from subquad.training._task_probe import check_probe, probe_task
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Task", "check_forms", "check_image", "check_probe", "labelled", "prepare_task", "window_labels"]


def check_forms(config: TrainConfig) -> None:
    """Raise `ValueError` for an unknown mechanism or stack and for one that has not the form that the task needs."""
    classifies = config.task in ("classify", "pretrain")
    needed, other, task = ("bidirectional", "causal", "language")
    if not classifies:
        needed, other, task = ("causal", "bidirectional", "classify")
    elif config.classify.causal:
        needed, other, task = ("causal", "bidirectional", "classify without classify.causal")
    valid = {*names(), *STACKS}
    for name in config.model.mechanisms:
        if name not in valid:
            raise ValueError(f"unknown attention {name!r}; {suggest(name, valid)}")
        hint = " and --classify.causal true" if needed == "bidirectional" and name not in STACKS else ""
        forms = STACKS[name].forms if name in STACKS else mechanism(name).forms
        if needed not in forms:
            raise ValueError(
                f"attention {name!r} has no {needed} form, which --task {config.task} needs; its {other} form is for "
                f"--task {task}{hint}"
            )
        if classifies and name in STACKS and "bidirectional" not in forms:
            raise ValueError(f"attention {name!r} is a stack that predicts tokens and labels no sequences")


def prepare_task(config: TrainConfig, console: Console | None) -> Task:
    """Read or make the data of `config`. Raises `ValueError` as `train` says."""
    if config.lora.rank:
        from subquad.training import lora

        plain = lora.with_base(config)
        return lora.adapt(_prepare(plain, console))
    return _prepare(config, console)


def _prepare(config: TrainConfig, console: Console | None) -> Task:
    check_forms(config)
    if config.task == "language":
        return language_task(config, console)
    if config.task == "image":
        return image_task(config)
    if config.task == "pretrain":
        return pretraining_task(config, console)
    return classification_task(config, console) if config.task == "classify" else probe_task(config)
