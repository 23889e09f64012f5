"""Save and load the contents of a checkpoint, in all processes together.

Weights are always whole, in `model.safetensors` (with LoRA the adapter). Optimizer states are in `optimizer.pt`, or in
the folder `optimizer` for a sharded model (`subquad.training.sharding`); either kind of run reads both. Other files are
`rng_state_<process>.safetensors` (random generators, without pickled code), `trainer_state.json` (step and best
held-out loss), `skipped.json` (number of skipped steps, if any) and those of `Task.files`: the tokenizer.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from subquad import disk
from subquad.checksums import CHECKSUMS, write_checksums
from subquad.parsing import check_keys, parse_json, read_json
from subquad.training import checkpoint
from subquad.training.errors import CheckpointError, NonFiniteError, SaveError, reading
from subquad.training.processes import Processes, now_at
from subquad.training.task import Task, weights_file

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Subfolder of the run's folder that holds the checkpoints."""
STATE, SKIPPED = "trainer_state.json", "skipped.json"


@dataclass
class TrainerState:
    """Training progress of a run."""

    step: int = 0
    """Optimizer steps so far."""
    best_step: int | None = None
    """Step of the lowest held-out loss."""
    best_loss: float | None = None
    skipped: int = 0
    """Steps skipped because of a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """Length of the current streak of skipped steps."""

    def write(self, folder: Path) -> None:
        """Write `trainer_state.json` and, if steps were skipped, `skipped.json`."""
        state = {"global_step": self.step, "best_global_step": self.best_step, "best_metric": self.best_loss}
        (folder / STATE).write_text(json.dumps(state))
        if self.skipped:
            counts = {"total": self.skipped, "in_a_row": self.skipped_in_a_row}
            (folder / SKIPPED).write_text(json.dumps(counts))

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Read the files of `write` (the keys are those of transformers' Trainer). Raises `CheckpointError`."""
        with reading(folder / STATE):
            state = read_json(folder / STATE)
            check_keys(state, {"global_step": int}, str(folder / STATE))
            counts = {"total": 0, "in_a_row": 0}
            if (folder / SKIPPED).is_file():
                counts = read_json(folder / SKIPPED)
                check_keys(counts, {"total": int, "in_a_row": int}, str(folder / SKIPPED))
            step, loss = state.get("best_global_step"), state.get("best_metric")
            if not (isinstance(step, int | None) and isinstance(loss, float | int | None)):
                raise ValueError(f"the best step and its loss must be numbers, got {step!r} and {loss!r}")
        return cls(state["global_step"], step, loss, counts["total"], counts["in_a_row"])


class Checkpoints:
    """Saves and loads the checkpoints of a run in the folder `root`, in all processes together."""

    def __init__(
        self,
        root: Path,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        processes: Processes,
        settings: dict[str, Any],
    ) -> None:
        self.root, self.task, self.model = root, task, model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.processes, self.settings = processes, settings

    def newest_name(self) -> str:
        """Return the name of the newest checkpoint for messages, or `none`."""
        published = checkpoint.listing(self.root)
        return published[-1][1].name if published else "none"

    def save(self, state: TrainerState) -> None:
        """Publish a checkpoint, then delete old ones. All processes must call it.

        Raises `NonFiniteError` for non-finite weights and `SaveError` if the disk fails; both leave nothing of the
        checkpoint, and earlier ones untouched.
        """
        step = state.step
        now_at(f"the checkpoint of step {step}")
        folder = checkpoint.aside(self.root, step)
        together, first = self.processes.together, self.processes.first
        with together():
            self.require_finite_weights(step)
        with self.disk(folder, f"the checkpoint of step {step}"):
            with together():
                if first:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
            weights = self.whole_weights(keep=first)
            with together():
                self.write_weights(folder, weights)
            self.write_optimizer(folder)
            with together():
                save_rng(rng_file(folder, self.processes.rank))
                if first:
                    state.write(folder)
                    for name, content in self.task.files.items():
                        (folder / name).write_bytes(content)
            with together():
                if first:
                    checkpoint.publish(folder, self.root / checkpoint.name_of(step), step=step, settings=self.settings)
        with together():
            if first:
                checkpoint.rotate(self.root, keep=self.task.config.run.keep, best_step=state.best_step)

    def save_final(self, folder: Path) -> None:
        """Write the model to the run's folder. All processes must call it."""
        aside = folder / ".saving-model"
        with self.disk(aside, "the final model"):
            weights = self.whole_weights(keep=self.processes.first)
            with self.processes.together():
                if self.processes.first:
                    shutil.rmtree(aside, ignore_errors=True)
                    self.write_weights(aside, weights)
                    checkpoint.share(aside)
                    disk.sync(aside)
                    # Move the configuration last: after a crash, a folder that has it also has the weights.
                    last = ("config.json", "adapter_config.json")
                    names = {path.name for path in aside.iterdir()}
                    (folder / CHECKSUMS).unlink(missing_ok=True)
                    for path in sorted(aside.iterdir(), key=lambda path: path.name in last):
                        path.replace(folder / path.name)
                    aside.rmdir()
                    write_checksums(folder, names.union(self.task.files))
                    disk.sync(folder)

    def load(self, folder: Path) -> TrainerState:
        """Load weights, optimizer and schedule strictly. Raises `CheckpointError`. All processes must call it."""
        in_shards = (folder / "optimizer").is_dir()
        for name in (STATE, "optimizer" if in_shards else "optimizer.pt", "scheduler.pt"):
            if not (folder / name).exists():
                raise CheckpointError(f"{folder} lacks {name}, and resuming without it would change the run")
        state = TrainerState.read(folder)
        self.load_weights(folder)
        with reading(folder):
            if in_shards:
                _sharding().load_optimizer(self.model, self.optimizer, folder)
            else:
                self.load_optimizer(folder / "optimizer.pt")
            self.scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        return state

    def load_random_numbers(self, folder: Path, step: int) -> None:
        """Restore all random generators, or reseed them if another number of processes made the checkpoint."""
        if len(rng_files(folder)) == self.processes.world:
            load_rng(rng_file(folder, self.processes.rank))
        else:
            begin_rng(self.task.config.run.seed, self.processes.rank, step)

    @contextmanager
    def disk(self, folder: Path, what: str) -> Iterator[None]:
        """If the block fails to write `what`, delete `folder` and raise `SaveError`."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
            # torch.save's errors about the disk contain the name of its writer; other RuntimeErrors are bugs.
            of_the_disk = any(text in str(error) for text in ("inline_container", "PytorchStreamWriter", "iostream"))
            if isinstance(error, RuntimeError) and not of_the_disk:
                raise
            if self.processes.first:
                shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(self.root).free / 2**30
            said = "PyTorch could write no more" if isinstance(error, RuntimeError) else error
            raise SaveError(
                f"{what} could not be written to {folder.parent}, where {free:.2f} GiB are free: {said}. It was "
                f"deleted; earlier files are untouched (newest checkpoint: {self.newest_name()}). Free some space and "
                "run the same command again"
            ) from error

    def require_finite_weights(self, step: int) -> None:
        """Raise `NonFiniteError` with the name of a non-finite weight of this process, if any."""
        for name, parameter in self.model.named_parameters():
            to_local = getattr(parameter, "to_local", None)  # a DTensor's, without importing torch.distributed.tensor
            if not torch.isfinite(parameter if to_local is None else to_local()).all():
                raise NonFiniteError(
                    f"the weight {name} is not finite after step {step}; nothing was saved. Newest checkpoint: "
                    f"{self.newest_name()}"
                )

    def whole_weights(self, *, keep: bool) -> dict[str, Any] | None:
        """Gather a sharded model's weights (empty without `keep`); None for others. All processes must call it."""
        return None

    def write_weights(self, folder: Path, weights: dict[str, Any] | None) -> None:
        """Write the model or the adapter on rank 0."""
        if self.processes.first:
            self.task.save_weights(self.model, folder, weights)

    def load_weights(self, folder: Path) -> None:
        """Load the model's weights. Raises `CheckpointError` if names or shapes differ."""
        self.task.load_weights(self.model, folder)

    def write_optimizer(self, folder: Path) -> None:
        """Write the optimizer and schedule states. All processes must call it."""
        with self.processes.together():
            if self.processes.first:
                torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
                torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")

    def load_optimizer(self, file: Path) -> None:
        """Load optimizer states that were saved whole."""
        self.optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


class ShardedCheckpoints(Checkpoints):
    """Saves and loads the checkpoints of a sharded model."""

    def whole_weights(self, *, keep: bool) -> dict[str, Any]:
        return _sharding().whole_state(self.model, keep=keep)

    def load_weights(self, folder: Path) -> None:
        with reading(folder / "model.safetensors"):
            _sharding().load_weights(self.model, weights_file(folder))

    def write_optimizer(self, folder: Path) -> None:
        """Write this process's shards of the optimizer states, and the schedule. All processes must call it."""
        names = _sharding().save_optimizer(self.model, self.optimizer, folder)
        with self.processes.together():
            if self.processes.first:
                _sharding().list_states(folder, names)
                torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")

    def load_optimizer(self, file: Path) -> None:
        _sharding().spread_optimizer(self.optimizer, file)


def _sharding() -> Any:
    """Import `subquad.training.sharding` on first use, because it loads much of torch.distributed."""
    from subquad.training import sharding

    return sharding


def rng_file(folder: Path, process: int) -> Path:
    """Return the file of the random generators of one process."""
    return folder / f"rng_state_{process}.safetensors"


def rng_files(folder: Path) -> list[Path]:
    """Return the files of the random generators of all processes."""
    return sorted(folder.glob("rng_state_*.safetensors"))


def begin_rng(seed: int, process: int, step: int = 0) -> None:
    """Seed all random generators differently for each process and step; process 0 at step 0 uses `seed` itself."""
    words = np.random.SeedSequence((seed, process, step)).generate_state(1)
    number = int(words[0]) if process or step else seed
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def save_rng(path: Path) -> None:
    """Write the states of the random generators of Python, NumPy and PyTorch."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors: dict[str, Tensor] = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    numbers = {"python": [version, gauss], "numpy": [str(name), int(position), int(has_gauss), float(cached)]}
    save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})


def load_rng(path: Path) -> None:
    """Restore the states that `save_rng` wrote. Raises `CheckpointError` if the file is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, and this process can't resume with the same random numbers without it; use as many "
            "processes as made the checkpoint"
        )
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
            numbers: dict[str, Any] = parse_json(file.metadata()["numbers"], "its numbers")
        version, gauss = numbers["python"]
        name, position, has_gauss, cached = numbers["numpy"]
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
        np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(tensors["torch"])
        if torch.cuda.is_available() and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"])
    except Exception as error:  # each generator has its own error types
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
