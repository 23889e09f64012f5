"""What the Trainer writes and reads: whole checkpoints, by all processes or none."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import TrainerState
from transformers.utils import logging as hf_logging

from subquad.hf.loading import no_bar
from subquad.parsing import read_json
from subquad.training import checkpoint
from subquad.training.config import TrainConfig
from subquad.training.errors import CheckpointError, NonFiniteError, SaveError, reading
from subquad.training.nonfinite import Skipped
from subquad.training.processes import Processes, at
from subquad.training.rng import begin_rng, load_rng, rng_file, rng_files, save_rng

logger = logging.getLogger(__name__)

SKIPPED = "skipped.json"
"""The file in a checkpoint that counts the steps left out; of a run without any there is none."""


class SavingTrainer(Trainer):
    """`transformers.Trainer` whose checkpoints are whole or not there, and are read strictly.

    The weights are `model.safetensors` however the run is spread out; the optimizer's states are `optimizer.pt`, or of
    a model that is sharded the folder `optimizer` (see `subquad.training.sharding`), and either kind of run reads both.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    config: TrainConfig
    processes: Processes
    sharded: bool
    root: Path
    settings: dict[str, Any]
    skipped: Skipped

    def newest_name(self) -> str:
        """The name of the newest checkpoint, for messages."""
        published = checkpoint.listing(self.root)
        return published[-1][1].name if published else "none"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer does, without its warning of another batch.size: with as many windows a step all is well."""
        start = kwargs.get("resume_from_checkpoint")
        if start is not None:
            state = Path(start) / "trainer_state.json"
            with reading(state):  # the Trainer reads it again, and says less of what is wrong
                TrainerState.load_from_json(str(state))
        talker: Any = hf_logging.get_logger("transformers.trainer_utils")
        talker.addFilter(_is_not_about_batches)
        try:
            return super().train(*args, **kwargs)
        finally:
            talker.removeFilter(_is_not_about_batches)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        step = self.state.global_step
        at(f"the checkpoint of step {step}")
        folder = checkpoint.aside(self.root, step)
        with self.processes.together():
            self._require_finite_weights()
        with self._saving(folder, f"the checkpoint of step {step}"):
            with self.processes.together():
                if self.processes.first:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
            self.store_flos()
            weights = self._weights()
            with self.processes.together():
                self._save(str(folder), weights)
                if not self.sharded:
                    self._save_optimizer_and_scheduler(str(folder))
            self._save_shards(folder)
            with self.processes.together():
                self._save_scaler(str(folder))
                self._save_rng_state(str(folder))
                if self.processes.first:
                    self.state.save_to_json(str(folder / "trainer_state.json"))
                    if self.skipped.total:
                        (folder / SKIPPED).write_text(json.dumps(self.skipped.to_dict()))
            with self.processes.together():
                if self.processes.first:
                    checkpoint.publish(folder, self.root / checkpoint.name_of(step), step=step, settings=self.settings)
        with self.processes.together():
            if self.processes.first:
                checkpoint.rotate(self.root, keep=self.config.run.keep, best_step=self.state.best_global_step)

    @contextmanager
    def _saving(self, folder: Path, what: str) -> Iterator[None]:
        """Leave nothing of a save that fails, and say that nothing is lost."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
            if isinstance(error, RuntimeError) and _is_not_of_the_disk(error):
                raise
            if self.processes.first:
                shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(self.root).free / 2**30
            raise SaveError(
                f"{what} could not be written to {folder.parent}, where {free:.2f} GiB are free: {error}. Nothing of "
                f"it is left; what was there before is untouched (newest checkpoint: {self.newest_name()}). Make room "
                "and give the same command again"
            ) from error

    def _require_finite_weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(_local(parameter)).all():
                raise NonFiniteError(
                    f"the weight {name} is not finite after step {self.state.global_step}; nothing was saved. "
                    f"Newest checkpoint: {self.newest_name()}"
                )

    def _weights(self) -> dict[str, Any] | None:
        """The weights of a sharded model, put together in the first process. All processes must call it."""
        if not self.sharded:
            return None
        from subquad.training.sharding import whole_state

        return whole_state(self.model, keep=self.processes.first)

    def _save_shards(self, folder: Path) -> None:
        """Write the optimizer's states of a sharded model. All processes must call it."""
        if not self.sharded:
            return
        from subquad.training import sharding

        names = sharding.save_optimizer(self.model, self.optimizer, folder)
        with self.processes.together():
            if self.processes.first:
                sharding.list_states(folder, names)
                torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # The Trainer's own version also pickles its arguments and turns the configuration's cache off.
        if self.processes.first:
            unwrapped = self.accelerator.unwrap_model(self.model)
            used, unwrapped.config.use_cache = unwrapped.config.use_cache, True
            with no_bar():
                unwrapped.save_pretrained(output_dir or self.root, state_dict=state_dict)
            unwrapped.config.use_cache = used

    def save_final(self, folder: Path) -> None:
        """Put the model at the top of the run's folder. All processes must call it."""
        aside = folder / ".saving-model"
        with self._saving(aside, "the final model"):
            weights = self._weights()
            with self.processes.together():
                if self.processes.first:
                    shutil.rmtree(aside, ignore_errors=True)
                    self._save(str(aside), weights)
                    checkpoint.share(aside)
                    # The configuration comes last: a folder that has it has the weights.
                    last = ("config.json", "adapter_config.json")
                    for path in sorted(aside.iterdir(), key=lambda path: path.name in last):
                        path.replace(folder / path.name)
                    aside.rmdir()

    def _save_rng_state(self, output_dir: str) -> None:
        save_rng(rng_file(Path(output_dir), self.processes.rank))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        made_by = len(rng_files(Path(checkpoint)))
        if made_by == self.processes.world:
            load_rng(rng_file(Path(checkpoint), self.processes.rank))
        else:
            begin_rng(self.config.run.seed, self.processes.rank, self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        weights = Path(resume_from_checkpoint) / "model.safetensors"
        if not weights.is_file():
            raise CheckpointError(f"{resume_from_checkpoint} lacks model.safetensors")
        model = self.model if model is None else model
        with reading(weights):
            if self.sharded:
                from subquad.training.sharding import load_weights

                load_weights(model, weights)
            else:
                load_model(model, weights, strict=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        in_shards = (folder / "optimizer").is_dir()
        for name in ("optimizer" if in_shards else "optimizer.pt", "scheduler.pt"):
            if not (folder / name).exists():
                raise CheckpointError(f"{checkpoint} lacks {name}; resuming without it would change the run")
        with reading(folder):
            skipped = folder / SKIPPED
            self.skipped = Skipped(**read_json(skipped)) if skipped.is_file() else Skipped()
            self._load_optimizer(folder, in_shards=in_shards)
            self.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
        for group, lr in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = lr

    def _load_optimizer(self, folder: Path, *, in_shards: bool) -> None:
        if in_shards or self.sharded:
            from subquad.training import sharding

            if in_shards:
                sharding.load_optimizer(self.model, self.optimizer, folder)
            else:
                sharding.spread_optimizer(self.optimizer, folder / "optimizer.pt")
        else:  # the Trainer of transformers 5.17 can't read it in several processes on a CPU
            states = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(states)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)  # of a DTensor, without importing what it is made of
    return tensor if to_local is None else to_local()


def _is_not_about_batches(record: logging.LogRecord) -> bool:
    return "do not match the ones in the `trainer_state.json`" not in record.getMessage()


def _is_not_of_the_disk(error: RuntimeError) -> bool:
    """Whether something else than the disk has failed: what torch.save raises for it names its writer."""
    return not any(text in str(error) for text in ("inline_container", "PytorchStreamWriter", "iostream"))
