"""The Hugging Face Trainer with its holes closed: atomic saves, strict resume, no step on what isn't finite."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as hf_logging

from subquad.data import EpochOrder
from subquad.hf import SubquadForCausalLM, SubquadForImages, SubquadForPreTraining, SubquadForSequenceClassification
from subquad.training import checkpoint
from subquad.training.config import TrainConfig
from subquad.training.errors import CheckpointError, NonFiniteError, reading
from subquad.training.flow import AfterStep
from subquad.training.optimizers import build_optimizer
from subquad.training.rng import load_rng, rng_file, save_rng

logger = logging.getLogger(__name__)


class NumberedWindows(Dataset[dict[str, Tensor]]):
    """A dataset whose items carry their number as `window`, so that an error can name the batch."""

    def __init__(self, windows: Dataset[dict[str, Tensor]]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self.windows[index], "window": torch.tensor(index)}


class RunOrder(Sampler[int]):
    """The windows of a whole run as one sequence: epoch after epoch, each in its own order, cut to `total`.

    The window at a place depends on the seed and the place alone, so skipping the batches already trained is exact,
    also in the middle of an epoch, and a longer run begins with a shorter one.
    """

    def __init__(self, windows: int, seed: int, total: int) -> None:
        self.windows, self.seed, self.total = windows, seed, total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        left, epoch = self.total, 0
        while left > 0:
            for index in EpochOrder(self.windows, self.seed, epoch):
                if left == 0:
                    return
                yield int(index)
                left -= 1
            epoch += 1


class SubquadTrainer(Trainer):
    """`transformers.Trainer` over windows of a text or made-up sequences, with our optimizers and checkpoints.

    Every checkpoint is published whole (see `subquad.training.checkpoint`); resuming loads the weights strictly and
    fails where a file is missing. A loss or gradient that isn't finite raises `NonFiniteError`, which names the step
    and the windows, before the optimizer steps.
    """

    model: SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadForSequenceClassification
    train_dataset: NumberedWindows

    def __init__(
        self,
        model: SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadForSequenceClassification,
        config: TrainConfig,
        settings: dict[str, Any],
        args: TrainingArguments,
        **rest: Any,
    ) -> None:
        self.config = config
        self.root = Path(str(args.output_dir))
        self.settings = settings
        self.step_windows: list[int] = []
        self.augment: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
        super().__init__(model=model, args=args, **rest)
        # A mean over equally long windows needs no count of tokens; the Trainer then divides by the accumulation.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.add_callback(AfterStep())

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        batch = self.config.batch
        total = self.config.run.steps * batch.size * batch.accumulation * self.args.world_size
        return RunOrder(len(self.train_dataset), self.config.run.seed, total)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the configuration."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.config.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The schedule of the configuration."""
        if self.lr_scheduler is None:
            schedule = self.config.schedule
            self.lr_scheduler = LambdaLR(
                self.create_optimizer() if optimizer is None else optimizer,
                lambda step: schedule.factor(step, num_training_steps),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward on one batch; a loss that isn't finite stops the run."""
        accumulated = len(self.step_windows) // self.config.batch.size
        if accumulated >= self.config.batch.accumulation:
            self.step_windows = []
        self.step_windows += inputs.pop("window").tolist()
        if self.augment is not None:
            inputs = self.augment(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._require_finite("loss", loss)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer does, but the random numbers of training go on as if nothing had been evaluated."""
        with torch.random.fork_rng():
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer does; the held-out loss of images in bits too."""
        if self.config.task == "image" and "eval_loss" in logs:
            logs["eval_bits_per_dim"] = logs["eval_loss"] / math.log(2)
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of a held-out batch; of a probe with the likeliest tokens, of a text without the logits."""
        if self.config.task == "language":
            inputs = {**inputs, "output_logits": False}
        elif self.config.task == "probe":
            inputs = {**inputs, "use_cache": False}
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        return loss, logits.argmax(-1) if self.config.task == "probe" and logits is not None else logits, labels

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self._require_finite("gradient norm", norm)
        return norm

    def _require_finite(self, what: str, value: Tensor | float) -> None:
        number = float(value)
        if not math.isfinite(number):
            raise NonFiniteError(
                f"the {what} is {number} at step {self.state.global_step + 1}, in the batch of windows "
                f"{self.step_windows}; the optimizer has not stepped and nothing was saved. Newest checkpoint: "
                f"{self._newest_name()}. Try a lower optimizer.lr, a longer schedule.warmup or optimizer.clip"
            )

    def _newest_name(self) -> str:
        published = checkpoint.listing(self.root)
        return published[-1][1].name if published else "none"

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        loss = metrics["eval_loss"]
        if not math.isfinite(loss):
            raise NonFiniteError(f"the held-out loss is {loss} after step {self.state.global_step}; nothing was saved")
        best = self.state.best_metric is None or loss < self.state.best_metric
        if best:
            self.state.best_metric = loss
            self.state.best_global_step = self.state.global_step
            self.control.should_save = True
        return best

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise NonFiniteError(
                    f"the weight {name} is not finite after step {self.state.global_step}; nothing was saved. "
                    f"Newest checkpoint: {self._newest_name()}"
                )
        step = self.state.global_step
        folder = checkpoint.aside(self.root, step)
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.store_flos()
        self.save_model(str(folder), _internal_call=True)
        self._save_optimizer_and_scheduler(str(folder))
        self._save_scaler(str(folder))
        self._save_rng_state(str(folder))
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoint.publish(folder, self.root / checkpoint.name_of(step), step=step, settings=self.settings)
            checkpoint.rotate(self.root, keep=self.config.run.keep, best_step=self.state.best_global_step)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # The Trainer's own version also pickles its arguments and turns the configuration's cache off.
        if self.args.should_save:
            unwrapped = self.accelerator.unwrap_model(self.model)
            used, unwrapped.config.use_cache = unwrapped.config.use_cache, True
            with _no_bar_of_its_own():
                unwrapped.save_pretrained(output_dir or self.root, state_dict=state_dict)
            unwrapped.config.use_cache = used

    def _save_rng_state(self, output_dir: str) -> None:
        save_rng(rng_file(Path(output_dir), self.args.process_index))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_rng(rng_file(Path(checkpoint), self.args.process_index))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        weights = Path(resume_from_checkpoint) / "model.safetensors"
        if self.is_fsdp_enabled or not weights.is_file():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with reading(resume_from_checkpoint):
            load_model(self.model if model is None else model, weights, strict=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not self.is_fsdp_enabled:
            for name in ("optimizer.pt", "scheduler.pt"):
                if not (Path(checkpoint) / name).is_file():
                    raise CheckpointError(f"{checkpoint} lacks {name}; resuming without it would change the run")
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)


@contextmanager
def _no_bar_of_its_own() -> Iterator[None]:
    """Keep transformers from drawing a progress bar across ours."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def training_arguments(config: TrainConfig, root: Path) -> TrainingArguments:
    """The Trainer's arguments; reports, evaluations and saves are left to our callbacks."""
    cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    precision = config.run.precision
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16(cpu) else "float32"
        logger.info("run.precision is %s on this machine", precision)
    arguments = TrainingArguments(
        output_dir=str(root),
        max_steps=config.run.steps,
        per_device_train_batch_size=config.batch.size,
        per_device_eval_batch_size=config.batch.size,
        gradient_accumulation_steps=config.batch.accumulation,
        max_grad_norm=config.optimizer.clip,
        seed=config.run.seed,
        bf16=precision == "bf16",
        use_cpu=cpu,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=not cpu,
        ddp_find_unused_parameters=False,
        label_names=["labels"],
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several GPUs take several processes (torchrun), never DataParallel
    return arguments


def _multiplies_bf16(cpu: bool) -> bool:
    """Whether the processor (or the GPU) has instructions for products of bfloat16.

    Of AMX PyTorch tells the tiles only; all processors that have them multiply bfloat16 with them (AMX-BF16).
    """
    if not cpu:
        return torch.cuda.is_bf16_supported()
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)
