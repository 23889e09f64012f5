"""One training run from its configuration to the folder that keeps it."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from subquad.models.stacks import options_of
from subquad.training import checkpoint
from subquad.training.config import TrainConfig
from subquad.training.errors import CheckpointError
from subquad.training.loop import Loop
from subquad.training.processes import Processes, check_parallel, device_type, join, now_at
from subquad.training.progress import check_trackers, draw_curves, read_metrics
from subquad.training.saving import CHECKPOINTS, begin_rng, rng_files
from subquad.training.task import Data, Task
from subquad.training.tasks import prepare_task

if TYPE_CHECKING:
    from subquad.hf import SubquadForCausalLM, SubquadForImages, SubquadForPreTraining, SubquadForSequenceClassification

logger = logging.getLogger(__name__)

CONFIG, CURVES = "config.yaml", "curves.png"
Prepare = Callable[[TrainConfig, Console | None], Task]


@dataclass(frozen=True)
class RunResult:
    """The end of a training run."""

    folder: Path
    config: TrainConfig
    """The configuration with the tokenizer's vocabulary size filled in, as `config.yaml` has it."""
    model: SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadForSequenceClassification
    """The model of `subquad.hf` (or of transformers) after the last step; sharded in processes other than the first,
    where `parallel.shard` made it so."""
    corpus: Data
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


def train(config: TrainConfig, *, console: Console | None = None, prepare: Prepare = prepare_task) -> RunResult:
    """Train the model of `config` on its task and keep the run in `config.run.folder`.

    The folder gets `config.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and at the end the model
    (`config.json`, `model.safetensors`, of a text `tokenizer.json`: `from_pretrained` reads it) and `curves.png`. A
    folder with a complete checkpoint is gone on with, bit for bit, unless `run.resume` is never. `console`
    shows progress; without one it goes to the log. With `pretrain.kind` a classifier's encoder learns first, as a run
    of its own in the folder `pretrain`, and either phase is gone on with. `prepare` makes the
    task, where the configuration does not say which.

    Raises `ValueError` for a folder that holds something else, for a mechanism that has not the form that the task
    needs, for windows that a model can't be trained on (`StackOptions.window_labels`) and for a text shorter than
    `batch.length`, `CheckpointError` (a `ValueError`) for checkpoints that can't be gone on with, `NonFiniteError` for
    a loss or gradient that isn't finite, `SaveError` (an `OSError`) for a checkpoint that can't be written,
    `StepMemoryError` (a `MemoryError`) for a step that needs more memory than there is, and `LostProcessError` (an
    `OSError`) where another process has ended or hangs.
    """
    check_parallel(config)
    check_trackers(config.run.trackers)
    processes = join(config.parallel, device_type(config.run.device))
    with processes.watched():
        return _train(config, processes, console, prepare)


def _train(config: TrainConfig, processes: Processes, console: Console | None, prepare: Prepare) -> RunResult:
    folder = Path(config.run.folder)
    check_folder(folder)
    root = folder / CHECKPOINTS
    now_at("the preparation of the data")
    with processes.first_alone():
        task = prepare(config, console)
    config = task.config
    first = task.first_phase()
    settings = settings_of(task, precision_of(config), processes)

    def find_checkpoint() -> Path | None:
        checkpoint.sweep(root)
        policy = config.run.resume
        if first is not None and policy == "must" and _newest_step(first):
            policy = "auto"  # the checkpoint to go on with may be the first phase's
        found = checkpoint_to_resume(root, config, policy, settings)
        root.mkdir(parents=True, exist_ok=True)
        # What repeats the run is written so that a crash leaves each file whole.
        draft = folder / ".draft.yaml"
        (task.settings or task.config).to_file(draft)
        os.replace(draft, folder / CONFIG)
        for name, content in task.files.items():
            checkpoint.write_atomically(folder / name, content)
        if found is not None:
            warn_of_new_random_numbers(found, config, processes)
        return found

    now_at("the search for a checkpoint")
    start = processes.by_the_first(find_checkpoint)
    if start is None and first is not None:
        task, stopped = _pretrain(task, first, processes, console)
        if stopped is not None:
            return stopped
    with _threads(config.run.threads):
        return replace(_run(task, processes, settings, start, console), config=config)


def _pretrain(
    task: Task, first: TrainConfig, processes: Processes, console: Console | None
) -> tuple[Task, RunResult | None]:
    """Run the first phase, or what is left of it; the task then begins with what it has learned.

    Return also the result of a first phase that was stopped before its end, made the task's, where there is one.
    """
    config, began = task.config, time.monotonic()
    made = _newest_step(first)
    if made > first.run.steps:
        raise CheckpointError(
            f"{Path(first.run.folder) / CHECKPOINTS / checkpoint.name_of(made)} is at step {made} of the first phase, "
            f"past pretrain.steps={first.run.steps}; raise pretrain.steps or choose another run.folder"
        )
    if console is not None:
        console.print(f"first phase: {config.pretrain.kind}, {first.run.steps} steps", highlight=False)
    result = _train(first, processes, console, prepare_task)
    if result.steps < first.run.steps:
        folder = Path(config.run.folder)
        return task, replace(result, folder=folder, config=config, steps=0, tokens=0, interrupted=True)
    if config.run.max_minutes is not None:
        left = max(config.run.max_minutes - (time.monotonic() - began) / 60, 1e-3)
        task = replace(task, config=config.replace(run=config.run.replace(max_minutes=left)))
    return task.begun_with(result.model), None


def _newest_step(config: TrainConfig) -> int:
    """Return the step of the newest checkpoint of a run; 0 without one."""
    made = checkpoint.listing(Path(config.run.folder) / CHECKPOINTS)
    return made[-1][0] if made else 0


def _run(
    task: Task, processes: Processes, settings: dict[str, Any], start: Path | None, console: Console | None
) -> RunResult:
    config = task.config
    folder = Path(config.run.folder)
    begin_rng(config.run.seed, 0)
    model = task.make_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Training draws the same numbers whatever the model has drawn; the processes draw others, or all would drop alike.
    begin_rng(config.run.seed, processes.rank)
    loop = Loop(task, model, processes, settings, console)
    loop.run(start)
    now_at("the end of the run")
    if processes.first and (records := read_metrics(folder)):
        title = f"{folder.name}: {config.model.attention}"
        draw_curves(records, folder / CURVES, title=title, unit=task.unit)
    if not loop.interrupted:
        loop.checkpoints.save_final(folder)
    standing, meter = loop.standing, loop.meter
    return RunResult(
        folder=folder,
        config=config,
        model=_plain_model(loop),
        corpus=task.data,
        steps=standing.step,
        tokens=standing.step * meter.step_tokens,
        parameters=parameters,
        seconds=meter.seconds,
        tokens_per_second=meter.tokens_per_second,
        best_step=standing.best_step,
        best_loss=standing.best_loss,
        interrupted=loop.interrupted,
        out_of_time=loop.out_of_time,
        skipped=standing.skipped,
    )


def _plain_model(loop: Loop) -> Any:
    """Return the model without what training has put around it.

    A sharded one is put together in the first process, and in all where a second phase begins with its weights; in the
    others it stays as it is.
    """
    keep = loop.processes.first or loop.task.begins_another
    weights = loop.checkpoints.whole_weights(keep=keep)
    if not weights:
        return loop.model
    model = loop.task.make_model()
    model.load_state_dict(weights)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    if loop.device.type == "cuda" and 2 * size > torch.cuda.mem_get_info(loop.device)[0]:
        logger.warning("the whole model has no room beside its shares on %s: it stays on the CPU", loop.device)
        return model
    return model.to(loop.device)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def precision_of(config: TrainConfig) -> str:
    """Return the precision of the run, `bf16` or `float32`; for `auto` what this machine multiplies fast."""
    precision = config.run.precision
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16(device_type(config.run.device)) else "float32"
        logger.info("run.precision is %s on this machine", precision)
    return precision


def _multiplies_bf16(device: str) -> bool:
    """Whether the processor (or the GPU, of `device` cuda) has instructions for products of bfloat16.

    Of AMX PyTorch tells the tiles only; all processors that have them multiply bfloat16 with them (AMX-BF16).
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


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


def settings_of(task: Task, precision: str, processes: Processes) -> dict[str, Any]:
    """Return what must stay the same for a run to go on; the precision is the one that `auto` chose.

    Of `batch` and `processes`, which are those that see different windows, the length and the product must.
    """
    config = task.config
    return {
        "model": config.model.to_dict(),
        "batch": config.batch.to_dict(),
        "optimizer": config.optimizer.to_dict(),
        "run.seed": config.run.seed,
        "run.precision": precision,
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
        or any(options.get("redraw_interval") for options in config.model.options.values())
    )
