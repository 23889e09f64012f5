"""Writing and reading the contents of a checkpoint: whole or not there, by all processes or none.

The weights are `model.safetensors` (of LoRA the adapter) however the run is spread out; the optimizer's states are
`optimizer.pt`, or of a sharded model the folder `optimizer` (see `subquad.training.sharding`): either kind of run reads
both. `rng_state_<process>.safetensors` holds random number generators in a format that can hold nothing that runs,
`trainer_state.json` the step and the best held-out loss, and `skipped.json` the steps left out, where there are any.
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

from subquad.parsing import check_keys, parse_json, read_json
from subquad.training import checkpoint
from subquad.training.errors import CheckpointError, NonFiniteError, SaveError, reading
from subquad.training.processes import Processes, now_at
from subquad.training.task import Task, weights_file

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints, in that of the run."""
STATE, SKIPPED = "trainer_state.json", "skipped.json"


@dataclass
class Standing:
    """The place of a run in its training."""

    step: int = 0
    """Optimizer steps so far."""
    best_step: int | None = None
    """Step of the lowest held-out loss."""
    best_loss: float | None = None
    skipped: int = 0
    """Steps left out because their loss or gradient wasn't finite."""
    skipped_in_a_row: int = 0
    """The steps just left out, one after another."""

    def write(self, folder: Path) -> None:
        """Write `trainer_state.json` and, where steps were left out, `skipped.json`."""
        state = {"global_step": self.step, "best_global_step": self.best_step, "best_metric": self.best_loss}
        (folder / STATE).write_text(json.dumps(state))
        if self.skipped:
            counts = {"total": self.skipped, "in_a_row": self.skipped_in_a_row}
            (folder / SKIPPED).write_text(json.dumps(counts))

    @classmethod
    def read(cls, folder: Path) -> Standing:
        """Read what `write` wrote, or the Trainer of transformers, which trained before. Raises `CheckpointError`."""
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
    """The checkpoints of a run in the folder `root`: what all processes write and read together."""

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
        """Return the name of the newest checkpoint, for messages."""
        published = checkpoint.listing(self.root)
        return published[-1][1].name if published else "none"

    def save(self, standing: Standing) -> None:
        """Publish a checkpoint and delete old ones. All processes must call it.

        Raises `NonFiniteError` for weights that are not finite and `SaveError` where the disk fails: then nothing is
        left of the checkpoint, and what was there before is untouched.
        """
        step = standing.step
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
                self.write_random_numbers(folder)
                if first:
                    standing.write(folder)
            with together():
                if first:
                    checkpoint.publish(folder, self.root / checkpoint.name_of(step), step=step, settings=self.settings)
        with together():
            if first:
                checkpoint.rotate(self.root, keep=self.task.config.run.keep, best_step=standing.best_step)

    def save_final(self, folder: Path) -> None:
        """Put the model at the top of the run's folder. All processes must call it."""
        aside = folder / ".saving-model"
        with self.disk(aside, "the final model"):
            weights = self.whole_weights(keep=self.processes.first)
            with self.processes.together():
                if self.processes.first:
                    shutil.rmtree(aside, ignore_errors=True)
                    self.write_weights(aside, weights)
                    checkpoint.share(aside)
                    # The configuration comes last: a folder that has it has the weights.
                    last = ("config.json", "adapter_config.json")
                    for path in sorted(aside.iterdir(), key=lambda path: path.name in last):
                        path.replace(folder / path.name)
                    aside.rmdir()

    def load(self, folder: Path) -> Standing:
        """Read weights, optimizer and schedule, strictly. Raises `CheckpointError`. All processes must call it."""
        in_shards = (folder / "optimizer").is_dir()
        for name in (STATE, "optimizer" if in_shards else "optimizer.pt", "scheduler.pt"):
            if not (folder / name).exists():
                raise CheckpointError(f"{folder} lacks {name}; resuming without it would change the run")
        standing = Standing.read(folder)
        self.load_weights(folder)
        with reading(folder):
            if in_shards:
                _sharding().load_optimizer(self.model, self.optimizer, folder)
            else:
                self.load_optimizer(folder / "optimizer.pt")
            self.scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        return standing

    def load_random_numbers(self, folder: Path, step: int) -> None:
        """Set all generators as the checkpoint has them; anew where another number of processes made it."""
        if len(rng_files(folder)) == self.processes.world:
            load_rng(rng_file(folder, self.processes.rank))
        else:
            begin_rng(self.task.config.run.seed, self.processes.rank, step)

    @contextmanager
    def disk(self, folder: Path, what: str) -> Iterator[None]:
        """Leave nothing of a save that fails, and say that nothing is lost."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
            # What torch.save raises for the disk names its writer.
            of_the_disk = any(text in str(error) for text in ("inline_container", "PytorchStreamWriter", "iostream"))
            if isinstance(error, RuntimeError) and not of_the_disk:
                raise
            if self.processes.first:
                shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(self.root).free / 2**30
            raise SaveError(
                f"{what} could not be written to {folder.parent}, where {free:.2f} GiB are free: {error}. Nothing of "
                f"it is left; what was there before is untouched (newest checkpoint: {self.newest_name()}). Make room "
                "and give the same command again"
            ) from error

    def require_finite_weights(self, step: int) -> None:
        """Raise `NonFiniteError` that names a weight of this process which isn't finite."""
        for name, parameter in self.model.named_parameters():
            to_local = getattr(parameter, "to_local", None)  # of a DTensor, without importing what it is made of
            if not torch.isfinite(parameter if to_local is None else to_local()).all():
                raise NonFiniteError(
                    f"the weight {name} is not finite after step {step}; nothing was saved. Newest checkpoint: "
                    f"{self.newest_name()}"
                )

    def whole_weights(self, *, keep: bool) -> dict[str, Any] | None:
        """Return the weights where `model` has a part of them alone, and empty without `keep`; None where it has all.

        All processes must call it.
        """
        return None

    def write_weights(self, folder: Path, weights: dict[str, Any] | None) -> None:
        """Write the model, or the adapter, in the first process."""
        if self.processes.first:
            self.task.save_weights(self.model, folder, weights)

    def load_weights(self, folder: Path) -> None:
        """Read the model's weights. Raises `CheckpointError` where names or shapes are others."""
        self.task.load_weights(self.model, folder)

    def write_optimizer(self, folder: Path) -> None:
        """Write the states of the optimizer and of the schedule. All processes must call it."""
        with self.processes.together():
            if self.processes.first:
                torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
                torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")

    def load_optimizer(self, file: Path) -> None:
        """Read the optimizer's states where they were saved whole."""
        self.optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def write_random_numbers(self, folder: Path) -> None:
        """Write the generators of this process."""
        save_rng(rng_file(folder, self.processes.rank))


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of a run whose model is shared out over the processes."""

    def whole_weights(self, *, keep: bool) -> dict[str, Any]:
        """Return the weights put together; empty without `keep`. All processes must call it."""
        return _sharding().whole_state(self.model, keep=keep)

    def load_weights(self, folder: Path) -> None:
        """Read this process's part of the weights. Raises `CheckpointError` where names or shapes are others."""
        with reading(folder / "model.safetensors"):
            _sharding().load_weights(self.model, weights_file(folder))

    def write_optimizer(self, folder: Path) -> None:
        """Write the states of the optimizer, each process its part, and of the schedule. All processes must call it."""
        names = _sharding().save_optimizer(self.model, self.optimizer, folder)
        with self.processes.together():
            if self.processes.first:
                _sharding().list_states(folder, names)
                torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")

    def load_optimizer(self, file: Path) -> None:
        _sharding().spread_optimizer(self.optimizer, file)


def _sharding() -> Any:
    """Return the module of shared-out models, which loads much of torch.distributed."""
    from subquad.training import sharding

    return sharding


def rng_file(folder: Path, process: int) -> Path:
    """Return the file that holds the generators of one process."""
    return folder / f"rng_state_{process}.safetensors"


def rng_files(folder: Path) -> list[Path]:
    """Return the files of all processes."""
    return sorted(folder.glob("rng_state_*.safetensors"))


def begin_rng(seed: int, process: int, step: int = 0) -> None:
    """Set all generators to numbers of their own for a process and a step; process 0 at step 0 begins with `seed`."""
    words = np.random.SeedSequence((seed, process, step)).generate_state(1)
    number = int(words[0]) if process or step else seed
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def save_rng(path: Path) -> None:
    """Write the states of Python's, NumPy's and PyTorch's generators."""
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
    """Set all generators to what `save_rng` wrote; `CheckpointError` where the file is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: this process can't go on with the same random numbers; "
            "resume with as many processes as made the checkpoint"
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
    except Exception as error:  # each generator checks its own state, in its own way
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
