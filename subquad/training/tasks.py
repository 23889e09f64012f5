"""All tasks by name, and checks that a model fits its task."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from subquad.attention import mechanism, names
from subquad.config import suggest
from subquad.models.stacks import STACKS
from subquad.training.config import TrainConfig
from subquad.training.task import Task
from subquad.training.tasks_classify import ClassifyTask, PretrainTask
from subquad.training.tasks_image import ImageTask
from subquad.training.tasks_text import LanguageTask, ProbeTask

TASKS: dict[str, type[Task]] = {
    "language": LanguageTask,
    "classify": ClassifyTask,
    "pretrain": PretrainTask,
    "image": ImageTask,
    "probe": ProbeTask,
}


def check_forms(config: TrainConfig) -> None:
    """Raise `ValueError` for an unknown mechanism or stack, or one without the form that the task needs."""
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
            raise ValueError(f"attention {name!r} is a stack that predicts tokens and can't label sequences")


def check(config: TrainConfig) -> None:
    """Raise `ValueError` or `TypeError` for settings that can't be trained, before any data are read."""
    if config.lora.rank:
        config = _lora().with_base(config)
    check_forms(config)
    TASKS[config.task].check(config)


def prepare_task(config: TrainConfig, console: Console | None) -> Task:
    """Read or make the data of `config` and return its task. Raises the `ValueError`s of `train`."""
    if config.lora.rank:
        config = _lora().with_base(config)
    check_forms(config)
    task = TASKS[config.task].prepare(config, console)
    return _lora().adapt(task) if config.lora.rank else task


def _lora() -> Any:
    """Import `subquad.training.lora` on first use, because it loads transformers."""
    from subquad.training import lora

    return lora
