"""One training run from its configuration to the folder that keeps it."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from subquad.data import Corpus
from subquad.data.images import ImageSet
from subquad.data.labelled import LabelledCorpus
from subquad.data.probe_items import ProbeCorpus
from subquad.training import checkpoint
from subquad.training.config import TrainConfig
from subquad.training.curves import draw_curves
from subquad.training.errors import CheckpointError
from subquad.training.tasks import Task, prepare_task

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

    from subquad.hf import SubquadForCausalLM, SubquadForImages, SubquadForPreTraining, SubquadForSequenceClassification
    from subquad.training.trainer import SubquadTrainer

logger = logging.getLogger(__name__)

CONFIG, CHECKPOINTS, CURVES = "config.yaml", "checkpoints", "curves.png"


@dataclass(frozen=True)
class RunResult:
    """What a training run ended with."""

    folder: Path
    config: TrainConfig
    """The configuration with the tokenizer's vocabulary size filled in, as `config.yaml` has it."""
    model: SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadForSequenceClassification
    """The model after the last step."""
    corpus: Corpus | ImageSet | LabelledCorpus | ProbeCorpus
    """The text or, with task=classify and task=probe, the sequences; with task=image the held-out images."""
    steps: int
    """Optimizer steps in all, those before a resume included."""
    tokens: int
    """Tokens in those steps."""
    parameters: int
    """Parameters of the model, shared ones counted once."""
    seconds: float
    """Seconds of training steps in this process, evaluations and saves left out."""
    tokens_per_second: float
    """Trained tokens a second in this process."""
    best_step: int | None
    """Step of the lowest held-out loss."""
    best_loss: float | None
    """That loss, nats a token, on the windows of the periodic evaluation."""
    interrupted: bool
    """Whether a signal ended the run before its last step: a checkpoint is there, the final model isn't."""
    out_of_time: bool
    """Whether `run.max_minutes` ended the run before its last step."""

    @property
    def command(self) -> str:
        """The command that goes on with this run."""
        return f"subquad train --config {shlex.quote(str(self.folder / CONFIG))}"


def train(config: TrainConfig, *, resume: bool = True, console: Console | None = None) -> RunResult:
    """Train the model of `config` on its task and keep the run in `config.run.folder`.

    The folder gets `config.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and at the end the model
    (`config.json`, `model.safetensors`, of a text `tokenizer.json`: `from_pretrained` reads it) and `curves.png`. A
    folder with a complete checkpoint is gone on with, bit for bit; `resume=False` is `run.resume=never`. `console`
    shows progress; without one it goes to the log. With `pretrain.kind` a classifier's encoder learns first, as a run
    of its own in the folder `pretrain`, and either phase is gone on with.

    Raises `ValueError` for a mechanism that has not the form that the task needs, for windows that a model can't be
    trained on (`tasks.window_labels`) and for a text shorter than `batch.length`, `CheckpointError` (a `ValueError`)
    for checkpoints that can't be gone on with, and `NonFiniteError` for a loss or gradient that isn't finite.
    """
    from subquad.training.pretrain import has_begun, pretrain
    from subquad.training.trainer import training_arguments

    folder = Path(config.run.folder)
    root = folder / CHECKPOINTS
    arguments = training_arguments(config, root)
    with arguments.main_process_first(local=False, desc="preparing the data"):
        task = prepare_task(config, console)
    config = task.config
    two_phases = config.task == "classify" and config.pretrain.kind != "none"
    settings = _settings(task, arguments)
    main = arguments.process_index == 0
    with arguments.main_process_first(local=False, desc="looking for a checkpoint"):
        if main:
            checkpoint.sweep(root)
        policy = "never" if not resume else config.run.resume
        if two_phases and policy == "must" and has_begun(config):
            policy = "auto"  # the checkpoint to go on with may be the first phase's
        start = _checkpoint_to_resume(root, config, policy, settings)
        if main:
            root.mkdir(parents=True, exist_ok=True)
            _keep_settings(folder, task)
    if two_phases and start is None:
        task, stopped = pretrain(task, console, resume=resume)
        if stopped is not None:
            return stopped
    with _threads(config.run.threads):
        return replace(_run(task, arguments, settings, start, console), config=config)


def _run(
    task: Task,
    arguments: TrainingArguments,
    settings: dict[str, Any],
    start: Path | None,
    console: Console | None,
) -> RunResult:
    from transformers import set_seed

    from subquad.training.flow import Flow, StopSignal
    from subquad.training.progress import Bar, Meter, Metrics
    from subquad.training.trainer import NumberedWindows, SubquadTrainer

    trainer_class = SubquadTrainer
    if task.config.lora.rank:
        from subquad.training.lora import LoraTrainer as trainer_class  # noqa: N813

    config = task.config
    folder = Path(config.run.folder)
    step_windows = config.batch.size * config.batch.accumulation * arguments.world_size
    set_seed(config.run.seed)
    model = task.make_model()
    meter = Meter(config.step_tokens * arguments.world_size)
    metrics = Metrics(folder, meter, task.count, step_windows)
    bar = Bar(console, meter, config)
    with StopSignal() as stop:
        flow = Flow(config.run, stop)
        trainer = trainer_class(
            model,
            config,
            settings,
            args=arguments,
            train_dataset=NumberedWindows(task.train),
            eval_dataset=task.held_out,
            compute_metrics=task.measure,
            callbacks=[meter, flow, metrics, bar],
        )
        trainer.augment = task.augment
        try:
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
        finally:
            bar.close()
            metrics.close()
    if trainer.is_world_process_zero():
        _finish(folder, trainer, final=not flow.interrupted)
    return RunResult(
        folder=folder,
        config=config,
        model=trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),  # without training's autocast
        corpus=task.data,
        steps=trainer.state.global_step,
        tokens=trainer.state.global_step * meter.step_tokens,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=meter.seconds,
        tokens_per_second=meter.tokens_per_second,
        best_step=trainer.state.best_global_step,
        best_loss=trainer.state.best_metric,
        interrupted=flow.interrupted,
        out_of_time=flow.out_of_time,
    )


def _finish(folder: Path, trainer: SubquadTrainer, *, final: bool) -> None:
    """Draw the curves and, at the end of a run, put the model at the top of its folder."""
    from subquad.training.progress import read_metrics

    records = read_metrics(folder)
    if records:
        units = {"language": "token", "classify": "example", "image": "pixel", "probe": "asked token"}
        unit = units.get(trainer.config.task, "predicted token")
        title = f"{folder.name}: {trainer.config.model.attention}"
        draw_curves(records, folder / CURVES, title=title, unit=unit)
    if not final:
        return
    aside = folder / ".saving-model"
    shutil.rmtree(aside, ignore_errors=True)
    trainer._save(str(aside))
    checkpoint.share(aside)
    # The configuration comes last: a folder that has it has the weights.
    last = ("config.json", "adapter_config.json")
    for path in sorted(aside.iterdir(), key=lambda path: path.name in last):
        os.replace(path, folder / path.name)
    aside.rmdir()


def _keep_settings(folder: Path, task: Task) -> None:
    """Write what repeats the run, so that a crash leaves each file whole."""
    draft = folder / ".draft.yaml"
    task.config.to_file(draft)
    os.replace(draft, folder / CONFIG)
    for name, content in task.files.items():
        checkpoint.write_atomically(folder / name, content)


def _settings(task: Task, arguments: TrainingArguments) -> dict[str, Any]:
    """What must stay the same for a run to go on; the precision is the one that `auto` chose."""
    config = task.config
    return {
        "model": config.model.to_dict(),
        "batch": config.batch.to_dict(),
        "optimizer": config.optimizer.to_dict(),
        "run.seed": config.run.seed,
        "run.precision": "bf16" if arguments.bf16 else "float32",
        "processes": arguments.world_size,
        **task.identity,
    }


def _checkpoint_to_resume(root: Path, config: TrainConfig, policy: str, settings: dict[str, Any]) -> Path | None:
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


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
