"""A training run, from its configuration to its folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from subquad import disk
from subquad.config import read_mapping
from subquad.memory import is_out_of_memory
from subquad.models.stacks import options_of
from subquad.program import command
from subquad.training import checkpoint
from subquad.training.config import TrainConfig, with_steps
from subquad.training.errors import CheckpointError
from subquad.training.loop import Loop
from subquad.training.processes import Processes, check_parallel, device_type, join, now_at, world_size
from subquad.training.progress import check_trackers, draw_curves, read_metrics
from subquad.training.saving import CHECKPOINTS, begin_rng, rng_files
from subquad.training.task import CONFIG, Data, Task
from subquad.training.tasks import prepare_task

if TYPE_CHECKING:
    from subquad.hf import SubquadEncoderForSequenceClassification, SubquadForCausalLM, SubquadForImages
    from subquad.hf.encoders import SubquadForPreTraining
    from subquad.models import Decoder

logger = logging.getLogger(__name__)

CURVES, HOLDER = "curves.png", ".process"
Prepare = Callable[[TrainConfig, Console | None], Task]


@dataclass(frozen=True)
class RunResult:
    """Result of a training run."""

    folder: Path
    config: TrainConfig
    """Configuration with the data's vocabulary size and the number of steps, as in `config.yaml`."""
    model: SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadEncoderForSequenceClassification
    """Model after the last step; with `parallel.shard` it is whole on rank 0 and sharded elsewhere."""
    corpus: Data
    """The text, the sequences (classify, probe) or the held-out images (image)."""
    steps: int
    """Optimizer steps in total, including those before a resume."""
    tokens: int
    """Tokens in those steps."""
    parameters: int
    """Number of parameters; shared ones count once."""
    seconds: float
    """Seconds of training steps in this process, without evaluations and saves."""
    tokens_per_second: float
    """Trained tokens per second in this process."""
    best_step: int | None
    """Step of the lowest held-out loss."""
    best_loss: float | None
    """Lowest held-out loss of the periodic evaluations, in nats per token."""
    interrupted: bool
    """Whether a signal ended the run early, leaving a checkpoint but no final model."""
    skipped: int = 0
    """Steps skipped because of a non-finite loss or gradient (`run.nonfinite=skip`)."""

    @property
    def decoder(self) -> Decoder:
        """The language model without its transformers wrapper; its modules are shared, not copied."""
        model: Any = self.model
        decoder: Decoder = model.decoder
        return decoder

    @property
    def command(self) -> str:
        """The command that resumes this run, in as many processes."""
        return command("train", "--config", self.folder / CONFIG, processes=world_size())


def train(config: TrainConfig, *, console: Console | None = None, prepare: Prepare = prepare_task) -> RunResult:
    """Train the model of `config` on its task in the folder `config.run.folder`, and return the result.

    The folder gets `config.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, `curves.png` and at the end the
    model (`config.json`, `model.safetensors`, `tokenizer.json` for text), which `from_pretrained` reads. A folder with
    a complete checkpoint is resumed bit for bit, unless `run.resume` is never. With `pretrain.kind`, a classifier's
    encoder is first trained as a run in the subfolder `pretrain`, which is resumed likewise. Progress goes to
    `console`, or to the log without one. `prepare` makes the task, by default as `config.task` says.

    Raises `ValueError` for a folder with other files, a mechanism without the form that the task needs, windows that
    the model can't be trained on (`StackOptions.window_labels`) or a text shorter than `batch.length`;
    `CheckpointError` (a `ValueError`) for checkpoints that can't be resumed; `NonFiniteError` for a non-finite loss or
    gradient; `SaveError` (an `OSError`) for a checkpoint that can't be written; `StepMemoryError` (a `MemoryError`) for
    a step that runs out of memory; and `LostProcessError` (an `OSError`) if another process has ended or hangs.
    """
    check_parallel(config)
    check_trackers(config.run.trackers)
    processes = join(config.parallel, device_type(config.run.device))
    with processes.watched():
        return _train(config, processes, console, prepare)


def _train(config: TrainConfig, processes: Processes, console: Console | None, prepare: Prepare) -> RunResult:
    with ExitStack() as held:  # holds the lock of the folder until the run ends
        return _train_held(held, config, processes, console, prepare)


def _train_held(
    held: ExitStack, config: TrainConfig, processes: Processes, console: Console | None, prepare: Prepare
) -> RunResult:
    folder = Path(config.run.folder)
    check_folder(folder)
    new, config = not folder.exists(), with_kept_steps(config)
    root = folder / CHECKPOINTS
    now_at("the preparation of the data")
    with processes.first_alone():
        task = prepare(config, console)
    config = task.config
    first = task.first_phase()
    settings = settings_of(task, precision_of(config), processes)

    def hold() -> None:
        try:
            held.enter_context(disk.claimed(folder / HOLDER))
        except disk.InUseError as error:
            raise ValueError(
                f"run.folder={str(folder)!r} is being trained by {error}: wait for it, or choose another folder"
            ) from error

    def find_checkpoint() -> Path | None:
        if exists := folder.is_dir():
            hold()
        disk.sweep(folder, "*")
        checkpoint.sweep(root)
        policy = config.run.resume
        if first is not None and policy == "must" and _newest_step(first):
            policy = "auto"  # the checkpoint to resume from may belong to the first phase
        found = checkpoint_to_resume(root, config, policy, settings)
        root.mkdir(parents=True, exist_ok=True)
        if not exists:
            hold()
        task.write_settings(task.config.run.steps)
        for name, content in task.files.items():
            disk.write_atomically(folder / name, content)
        if found is not None:
            warn_of_new_random_numbers(found, config, processes)
        return found

    now_at("the search for a checkpoint")
    start = processes.by_the_first(find_checkpoint)
    if start is None and first is not None:
        task, stopped = _pretrain(task, first, processes, console)
        if stopped is not None:
            return stopped
    try:
        with _threads(config.run.threads):
            return _run(task, processes, settings, start, console)
    except (RuntimeError, MemoryError) as error:
        # Only a folder that this run has made: a run whose sizes don't fit can't be resumed.
        if new and processes.first and is_out_of_memory(error) and not checkpoint.listing(root):
            shutil.rmtree(folder)
        raise


def with_kept_steps(config: TrainConfig) -> TrainConfig:
    """Return `config` with the steps that fitted into the minutes of the run in its folder, if `steps` is not given.

    If the minutes were changed, the steps change in proportion.
    """
    run, file = config.run, Path(config.run.folder) / CONFIG
    if run.steps is not None or run.resume == "never" or not file.is_file():
        return config
    kept = read_mapping(file).get("run") or {}
    steps, minutes = kept.get("steps"), kept.get("minutes", run.minutes)
    return config if steps is None else with_steps(config, max(1, round(steps * run.minutes / minutes)))


def _pretrain(
    task: Task, first: TrainConfig, processes: Processes, console: Console | None
) -> tuple[Task, RunResult | None]:
    """Run or resume the first phase: return the task that starts from it, or `task` and its result if it stopped."""
    config = task.config
    made = _newest_step(first)
    assert first.run.steps is not None  # pretrain.steps
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
    return task.begun_with(result.model), None


def _newest_step(config: TrainConfig) -> int:
    """Return the step of the newest checkpoint of a run, or 0."""
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
    # Reseed: training must not depend on how many numbers the model drew, and dropout must differ between processes.
    begin_rng(config.run.seed, processes.rank)
    loop = Loop(task, model, processes, settings, console)
    loop.run(start)
    if config.run.weights == "best" and not loop.interrupted:
        loop.load_best()
    now_at("the end of the run")
    if processes.first and (records := read_metrics(folder)):
        title = f"{folder.name}: {config.model.attention}"
        draw_curves(records, folder / CURVES, title=title, unit=task.unit)
    if not loop.interrupted:
        loop.checkpoints.save_final(folder)
    state, meter = loop.state, loop.meter
    return RunResult(
        folder=folder,
        config=loop.config,
        model=_plain_model(loop),
        corpus=task.data,
        steps=state.step,
        tokens=state.step * meter.step_tokens,
        parameters=parameters,
        seconds=meter.seconds,
        tokens_per_second=meter.tokens_per_second,
        best_step=state.best_step,
        best_loss=state.best_loss,
        interrupted=loop.interrupted,
        skipped=state.skipped,
    )


def _plain_model(loop: Loop) -> Any:
    """Return the model without wrappers; a sharded one is gathered on rank 0, or on all if another phase follows."""
    keep = loop.processes.first or loop.task.begins_another
    weights = loop.checkpoints.whole_weights(keep=keep)
    if not weights:
        return loop.model
    model = loop.task.make_model()
    model.load_state_dict(weights)
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    if loop.device.type == "cuda" and 2 * size > torch.cuda.mem_get_info(loop.device)[0]:
        logger.warning("the gathered model stays on the CPU: %s has no room for it beside its shards", loop.device)
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
    """Return `bf16` or `float32`; `auto` means bf16 if this machine multiplies it fast."""
    precision = config.run.precision
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16(device_type(config.run.device)) else "float32"
        logger.info("run.precision is %s on this machine", precision)
    return precision


def _multiplies_bf16(device: str) -> bool:
    """Return whether the GPU (`device` cuda) or the CPU has instructions for bfloat16 products.

    A CPU needs AVX-512 BF16 or AMX; without them bfloat16 is far slower than float32. For AMX, PyTorch only reports
    tiles, but all processors with tiles have AMX-BF16 too.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported()
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


def check_folder(folder: Path) -> None:
    """Raise `ValueError` if `folder` is a file or holds other files than a run's."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run.folder={str(folder)!r} is a file; give a folder")
    if (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir():
        return
    found = sorted({file.name for file in folder.iterdir()} - {HOLDER}) if folder.is_dir() else []
    if found:
        raise ValueError(
            f"run.folder={str(folder)!r} is not a run, but has other files ({', '.join(found[:3])}"
            f"{', ...' if found[3:] else ''}), which might be overwritten; give a new folder"
        )


def settings_of(task: Task, precision: str, processes: Processes) -> dict[str, Any]:
    """Return the settings that a resumed run must keep; `precision` is what `auto` chose."""
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
    """Return the newest complete checkpoint in `root`, or None to start. Raises `CheckpointError` if none fits."""
    if policy == "never":
        if checkpoint.listing(root):
            raise CheckpointError(
                f"{root} has checkpoints of an earlier run and run.resume is 'never'; choose another run.folder, "
                "delete the old one, or set run.resume=auto"
            )
        return None
    found = checkpoint.newest_complete(root)
    if found is None:
        if policy == "must":
            raise CheckpointError(f"run.resume is 'must' but {root} has no checkpoint; set run.resume=auto to start")
        return None
    manifest = checkpoint.read_manifest(found)
    try:
        checkpoint.check_settings(manifest, settings)
    except CheckpointError as error:
        raise CheckpointError(f"{found}: {error}") from error
    if config.run.steps is not None and manifest["step"] > config.run.steps:
        raise CheckpointError(
            f"{found} is at step {manifest['step']}, past run.steps={config.run.steps}; raise run.steps or choose "
            "another run.folder"
        )
    logger.info("resuming from %s", found)
    return found


def warn_of_new_random_numbers(found: Path, config: TrainConfig, processes: Processes) -> None:
    """Warn if random numbers start anew because the checkpoint was made by another number of processes."""
    made_by = len(rng_files(found))
    if made_by != processes.world and draws(config):
        logger.warning(
            "%s was made by %d processes and is resumed by %d: the windows are the same, but random numbers (dropout, "
            "augmentation, hidden tokens) differ from those of an uninterrupted run",
            found.name,
            made_by,
            processes.world,
        )


def draws(config: TrainConfig) -> bool:
    """Return whether a training step draws random numbers."""
    dropout = config.model.dropout > 0 or config.model.attention_dropout > 0 or config.lora.dropout > 0
    return (
        dropout
        or options_of(config.model).draws
        or config.classify.augment
        or bool(config.pretrain.hides)
        or any(options.get("redraw_interval") for options in config.model.options.values())
    )
