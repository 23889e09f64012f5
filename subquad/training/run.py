"""One training run from its configuration to the folder that keeps it."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from subquad.data import Corpus
from subquad.data.images import ImageSet
from subquad.data.labelled import LabelledCorpus
from subquad.data.probes import ProbeCorpus
from subquad.training import checkpoint
from subquad.training.config import TrainConfig
from subquad.training.curves import draw_curves
from subquad.training.processes import Processes, at, check_parallel, join
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
    """The model after the last step; sharded in processes other than the first, where `parallel.shard` made it so."""
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
    skipped: int = 0
    """Steps left out because their loss or gradient wasn't finite (`run.nonfinite=skip`)."""

    @property
    def command(self) -> str:
        """The command that goes on with this run."""
        return f"subquad train --config {shlex.quote(str(self.folder / CONFIG))}"


def train(
    config: TrainConfig,
    *,
    resume: bool = True,
    console: Console | None = None,
    prepare: Callable[[TrainConfig, Console | None], Task] | None = None,
) -> RunResult:
    """Train the model of `config` on its task and keep the run in `config.run.folder`.

    The folder gets `config.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and at the end the model
    (`config.json`, `model.safetensors`, of a text `tokenizer.json`: `from_pretrained` reads it) and `curves.png`. A
    folder with a complete checkpoint is gone on with, bit for bit; `resume=False` is `run.resume=never`. `console`
    shows progress; without one it goes to the log. With `pretrain.kind` a classifier's encoder learns first, as a run
    of its own in the folder `pretrain`, and either phase is gone on with. `prepare` makes the
    task, where the configuration does not say which.

    Raises `ValueError` for a folder that holds something else, for a mechanism that has not the form that the task
    needs, for windows that a model can't be trained on (`tasks.window_labels`) and for a text shorter than
    `batch.length`, `CheckpointError` (a `ValueError`) for checkpoints that can't be gone on with, `NonFiniteError` for
    a loss or gradient that isn't finite, `SaveError` (an `OSError`) for a checkpoint that can't be written,
    `StepMemoryError` (a `MemoryError`) for a step that needs more memory than there is, and `LostProcessError` (an
    `OSError`) where another process has ended or hangs.
    """
    from subquad.training._arguments import trains_on_cpu

    check_parallel(config)
    processes = join(config.parallel, cpu=trains_on_cpu(config))
    with processes.watched():
        return _train(config, processes, console, prepare or prepare_task, resume=resume)


def _train(
    config: TrainConfig,
    processes: Processes,
    console: Console | None,
    prepare: Callable[[TrainConfig, Console | None], Task],
    *,
    resume: bool,
) -> RunResult:
    from subquad.training._arguments import training_arguments
    from subquad.training.pretrain import has_begun, pretrain
    from subquad.training.resuming import check_folder, checkpoint_to_resume, settings_of, warn_of_new_random_numbers

    folder = Path(config.run.folder)
    check_folder(folder)
    root = folder / CHECKPOINTS
    arguments = training_arguments(config, root)
    at("the preparation of the data")
    with arguments.main_process_first(local=False, desc="preparing the data"):
        task = prepare(config, console)
    config = task.config
    two_phases = config.task == "classify" and config.pretrain.kind != "none"
    settings = settings_of(task, arguments, processes)

    def find_checkpoint() -> Path | None:
        checkpoint.sweep(root)
        policy = "never" if not resume else config.run.resume
        if two_phases and policy == "must" and has_begun(config):
            policy = "auto"  # the checkpoint to go on with may be the first phase's
        found = checkpoint_to_resume(root, config, policy, settings)
        root.mkdir(parents=True, exist_ok=True)
        _keep_settings(folder, task)
        if found is not None:
            warn_of_new_random_numbers(found, config, processes)
        return found

    at("the search for a checkpoint")
    start = processes.by_the_first(find_checkpoint)
    if two_phases and start is None:
        task, stopped = pretrain(task, console, resume=resume)
        if stopped is not None:
            return stopped
    with _threads(config.run.threads):
        return replace(_run(task, arguments, processes, settings, start, console), config=config)


def _run(
    task: Task,
    arguments: TrainingArguments,
    processes: Processes,
    settings: dict[str, Any],
    start: Path | None,
    console: Console | None,
) -> RunResult:
    from subquad.training.flow import Flow, StopSignal
    from subquad.training.progress import Bar, Meter, Metrics

    config = task.config
    folder = Path(config.run.folder)
    step_windows = config.batch.size * config.batch.accumulation * processes.data_ranks
    meter = Meter(config.step_tokens * processes.data_ranks)
    metrics = Metrics(folder, meter, task.count, step_windows)
    bar = Bar(console, meter, config)
    with StopSignal() as stop:
        flow = Flow(config.run, stop)
        trainer, parameters = _trainer(task, arguments, processes, settings, [meter, flow, metrics, bar])
        try:
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
        finally:
            bar.close()
            metrics.close()
    at("the end of the run")
    if processes.first:
        _draw(folder, config)
    if not flow.interrupted:
        trainer.save_final(folder)
    return RunResult(
        folder=folder,
        config=config,
        model=_plain_model(trainer, task),
        corpus=task.data,
        steps=trainer.state.global_step,
        tokens=trainer.state.global_step * meter.step_tokens,
        parameters=parameters,
        seconds=meter.seconds,
        tokens_per_second=meter.tokens_per_second,
        best_step=trainer.state.best_global_step,
        best_loss=trainer.state.best_metric,
        interrupted=flow.interrupted,
        out_of_time=flow.out_of_time,
        skipped=trainer.skipped.total,
    )


def _trainer(
    task: Task, arguments: TrainingArguments, processes: Processes, settings: dict[str, Any], callbacks: list[Any]
) -> tuple[SubquadTrainer, int]:
    """The trainer of a fresh model, and the model's parameters, counted before they are shared out."""
    from transformers import set_seed

    from subquad.training.reading import NumberedWindows
    from subquad.training.rng import begin_rng
    from subquad.training.trainer import SubquadTrainer

    trainer_class = task.trainer or SubquadTrainer
    if task.config.lora.rank:
        from subquad.training.lora import LoraTrainer as trainer_class  # noqa: N813

    set_seed(task.config.run.seed)
    model = task.make_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not processes.first:
        begin_rng(task.config.run.seed, processes.rank)
    trainer = trainer_class(
        model,
        task.config,
        settings,
        args=arguments,
        processes=processes,
        train_dataset=NumberedWindows(task.train, task.config.data.workers),
        eval_dataset=task.held_out,
        compute_metrics=task.measure,
        callbacks=callbacks,
    )
    trainer.augment, trainer.together = task.augment, task.together
    return trainer, parameters


def _plain_model(trainer: SubquadTrainer, task: Task) -> Any:
    """The model without what training has put around it.

    A sharded one is put together in the first process, and in all where a second phase begins with its weights; in the
    others it stays as it is.
    """
    if not trainer.sharded:
        return trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    from subquad.training.sharding import whole_state

    keep = trainer.processes.first or task.config.task == "pretrain"
    weights = whole_state(trainer.model, keep=keep)
    if not keep:
        return trainer.model
    model: Any = task.make_model()
    model.load_state_dict(weights)
    device = trainer.args.device
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    if device.type == "cuda" and 2 * size > torch.cuda.mem_get_info(device)[0]:
        logger.warning("the whole model has no room beside its shares on %s: it stays on the CPU", device)
        return model
    return model.to(device)


def _draw(folder: Path, config: TrainConfig) -> None:
    """Draw the run's curves, where it has any."""
    from subquad.training.progress import read_metrics

    records = read_metrics(folder)
    if records:
        units = {"language": "token", "classify": "example", "image": "pixel", "probe": "asked token"}
        unit = units.get(config.task, "predicted token")
        draw_curves(records, folder / CURVES, title=f"{folder.name}: {config.model.attention}", unit=unit)


def _keep_settings(folder: Path, task: Task) -> None:
    """Write what repeats the run, so that a crash leaves each file whole."""
    draft = folder / ".draft.yaml"
    (task.settings or task.config).to_file(draft)
    os.replace(draft, folder / CONFIG)
    for name, content in task.files.items():
        checkpoint.write_atomically(folder / name, content)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
