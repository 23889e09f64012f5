"""The first phase of a classifier's training: its encoder learns from the training sequences without their labels."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subquad.models.build import build_encoder
from subquad.models.encoder import Encoder, EncoderConfig
from subquad.models.pretraining import PretrainingModel
from subquad.training import checkpoint
from subquad.training._task import Task
from subquad.training.config import TrainConfig
from subquad.training.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console

    from subquad.hf import SubquadForSequenceClassification
    from subquad.training.run import RunResult

FOLDER = "pretrain"
"""The first phase's folder, in that of the run."""
OWN = ("class_token",)
"""Parameters of a classifier's encoder that causal pretraining does not have: a class token would see nothing."""


def pretrained_encoder(config: TrainConfig) -> EncoderConfig:
    """The encoder of the first phase: that of the classifier, in its causal form where the next token is predicted."""
    encoder = config.encoder(2).replace(towers=1)
    if config.pretrain.kind == "causal":
        pooling = "mean" if encoder.pooling == "class" else encoder.pooling
        encoder = encoder.replace(causal=True, pooling=pooling)
    return encoder


def check_pretraining(config: TrainConfig) -> None:
    """Raise `ValueError` where the first phase cannot be, or its weights would not fit the classifier."""
    options = config.pretrain
    if not options.effective:
        return
    with torch.device("meta"):
        target = build_encoder(config.encoder(2))
        if options.joint_weight > 0 and not isinstance(target, Encoder):
            raise ValueError(
                f"pretrain.joint_weight={options.joint_weight}: attention {config.model.attention!r} keeps no vector "
                "for each token to predict it from; leave it out, or choose a mechanism"
            )
        if options.kind == "none":
            return
        try:
            source = PretrainingModel(pretrained_encoder(config), options.kind).encoder
        except ValueError as error:
            raise ValueError(f"pretrain.kind={options.kind}: {error}") from error
    if config.model.attention == "perceiver_io" and config.model.max_positions < config.batch.length:
        raise ValueError(
            f"pretrain.kind={options.kind}: perceiver_io asks with a query for each of "
            f"model.max_positions={config.model.max_positions} positions, below batch.length={config.batch.length}; "
            "raise model.max_positions"
        )
    has, needs = _shapes(source), _shapes(target)
    wrong = sorted(name for name in has.keys() | needs.keys() if name not in OWN and has.get(name) != needs.get(name))
    if wrong:
        shown = ", ".join([*wrong[:3], *(["..."] if wrong[3:] else [])])
        raise ValueError(
            f"pretrain.kind={options.kind}: the causal form of attention {config.model.attention!r} has not the "
            f"weights of its bidirectional form, which classifies: {shown}; "
            "choose denoise, or classify.causal=true"
        )


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def first_phase(config: TrainConfig) -> TrainConfig:
    """The first phase as a run of its own, in the folder `pretrain` of the classifier's."""
    options, run = config.pretrain, config.run
    return config.replace(
        task="pretrain",
        optimizer=config.optimizer.replace(lr=config.optimizer.lr if options.lr is None else options.lr),
        schedule=config.schedule.replace(warmup=min(config.schedule.warmup, options.steps // 10)),
        run=run.replace(folder=str(Path(run.folder) / FOLDER), steps=options.steps),
    )


def has_begun(config: TrainConfig) -> bool:
    """Whether the first phase has left a checkpoint."""
    return bool(checkpoint.listing(Path(config.run.folder) / FOLDER / "checkpoints"))


def pretrain(task: Task, console: Console | None, *, resume: bool) -> tuple[Task, RunResult | None]:
    """Run the first phase, or what is left of it; the classifier's task then begins with its encoder.

    With the result of a first phase that was stopped before its end, made the classifier's, where there is one.
    """
    from subquad.training.run import train

    config, begin = task.config, time.monotonic()
    _check_steps(config)
    if console is not None:
        console.print(f"first phase: {config.pretrain.kind}, {config.pretrain.steps} steps", highlight=False)
    result = train(first_phase(config), resume=resume, console=console)
    if result.steps < config.pretrain.steps:
        stopped = replace(result, folder=Path(config.run.folder), config=config, steps=0, tokens=0, interrupted=True)
        return task, stopped
    learned: Any = result.model
    weights = {name: tensor.cpu() for name, tensor in learned.model.encoder.state_dict().items()}
    if config.run.max_minutes is not None:
        left = max(config.run.max_minutes - (time.monotonic() - begin) / 60, 1e-3)
        config = config.replace(run=config.run.replace(max_minutes=left))
    make: Any = task.make_model
    return replace(task, config=config, make_model=lambda: begin_with(make(), weights)), None


def _check_steps(config: TrainConfig) -> None:
    """Raise `CheckpointError` where the first phase has gone further than it is to."""
    made = checkpoint.listing(Path(config.run.folder) / FOLDER / "checkpoints")
    if made and made[-1][0] > config.pretrain.steps:
        raise CheckpointError(
            f"{made[-1][1]} is at step {made[-1][0]} of the first phase, past pretrain.steps={config.pretrain.steps}; "
            "raise pretrain.steps or choose another run.folder"
        )


def begin_with(model: SubquadForSequenceClassification, weights: dict[str, Tensor]) -> SubquadForSequenceClassification:
    """The classifier with an encoder's weights; what they lack (`OWN`) keeps its first values."""
    missing, unexpected = model.model.encoder.load_state_dict(weights, strict=False)
    wrong = [*(name for name in missing if name not in OWN), *unexpected]
    if wrong:
        raise ValueError(f"the weights of the first phase do not fit the classifier: {', '.join(wrong)}")
    return model
