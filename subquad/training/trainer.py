"""The Hugging Face Trainer with its holes closed: atomic saves, strict resume, no step on what isn't finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from subquad.hf import SubquadForCausalLM, SubquadForImages, SubquadForPreTraining, SubquadForSequenceClassification
from subquad.training._saves import SavingTrainer
from subquad.training.config import TrainConfig
from subquad.training.errors import NonFiniteError
from subquad.training.flow import AfterStep
from subquad.training.memory import explained, give_back, is_out_of_memory
from subquad.training.nonfinite import Cause, Skipped
from subquad.training.optimizers import build_optimizer
from subquad.training.order import DealtBatches, HeldOutBatches, RunOrder
from subquad.training.processes import Processes, at
from subquad.training.reading import ReadingTrainer

logger = logging.getLogger(__name__)


class SubquadTrainer(SavingTrainer, ReadingTrainer):
    """`transformers.Trainer` over windows of a text or made-up sequences, with our optimizers and checkpoints.

    Every checkpoint is published whole (see `subquad.training.checkpoint`); resuming loads the weights strictly and
    fails where a file is missing. A loss or gradient that isn't finite in any process raises `NonFiniteError` in all,
    which names the step and the windows, before the optimizer steps, or leaves the step out (`run.nonfinite`).
    """

    model: SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadForSequenceClassification
    loss_alone: ClassVar = {"output_logits": False, "use_cache": False}
    """Arguments by which a language model computes no more than its loss."""

    def __init__(
        self,
        model: SubquadForCausalLM | SubquadForImages | SubquadForPreTraining | SubquadForSequenceClassification,
        config: TrainConfig,
        settings: dict[str, Any],
        args: TrainingArguments,
        processes: Processes | None = None,
        **rest: Any,
    ) -> None:
        self.config = config
        self.root = Path(str(args.output_dir))
        self.settings = settings
        self.processes = Processes(device=args.device.type) if processes is None else processes
        self.sharded = config.parallel.shard and self.processes.world > 1
        self.step_windows: list[int] = []
        self.step_losses: list[Tensor] = []
        self.skipped = Skipped()
        self.augment: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
        self.together = 1
        self._sharing: Callable[[], AbstractContextManager[Any]] = self.processes.sharing_windows()
        self._held_out = HeldOutBatches(0, 1)
        self._held_out_step = -1
        if config.run.activation_checkpointing:
            recomputing: list[Any] = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
            for module in recomputing:
                module.gradient_checkpointing = True
        super().__init__(model=model, args=args, **rest)
        if self.sharded:
            from subquad.training.sharding import shard

            shard(self.model, self.processes, bf16=args.bf16)
        # A mean over equally long windows needs no count of tokens; the Trainer then divides by the accumulation.
        self.model_accepts_loss_kwargs = config.task == "language" and config.data.pack == "documents"
        self.remove_callback(PrinterCallback)
        self.add_callback(AfterStep())

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's part of the run's order; Accelerate's own dealing knows nothing of shared windows."""
        batch, processes = self.config.batch, self.processes
        total = self.config.run.steps * batch.size * batch.accumulation * processes.data_ranks
        order = RunOrder(len(self.train_dataset), self.config.run.seed, total, self.together)
        dealt = DealtBatches(order, batch.size, processes.data_rank, processes.data_ranks)
        return self._loader(self.train_dataset, dealt)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This process's part of the held-out items."""
        items: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        ranks = (self.processes.data_rank, self.processes.data_ranks)
        self._held_out = HeldOutBatches(len(items), self.config.batch.size, *ranks)
        self._held_out_step = -1
        return self._loader(items, self._held_out)

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
        """Forward and backward on one batch. Raises `StepMemoryError` where it needs more memory than there is."""
        step = self.state.global_step + 1
        if len(self.step_losses) in (0, self.config.batch.accumulation):
            self.step_windows, self.step_losses = [], []
            self._loss_before = self._tr_loss.clone()
        self.step_windows += inputs.pop("window").tolist()
        if self.augment is not None:
            inputs = self.augment(inputs)
        if self.sharded:
            shards: Any = self.model
            shards.set_requires_gradient_sync(self.accelerator.sync_gradients)
        at(f"the forward pass of step {step}")
        try:
            with self._sharing():
                loss = super().training_step(model, inputs, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            give_back(error, self.model)
            raise explained(error, self.config, self.args.device) from error
        at(f"the end of step {step}")
        self.step_losses.append(loss)
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the Trainer does; a loss that isn't finite makes the gradient so, which all processes see."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if not model.training:
            return result
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        at(f"the backward pass of step {self.state.global_step + 1}")
        poisoned = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)
        return (poisoned, *result[1:]) if isinstance(result, tuple) else poisoned

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer does, but the random numbers of training go on as if nothing had been evaluated."""
        at(f"the evaluation after step {self.state.global_step}")
        self.gather_function = self._gather_held_out
        with torch.random.fork_rng():
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer does; the held-out loss of images in bits too, and how many steps were left out."""
        if self.config.task == "image" and "eval_loss" in logs:
            logs["eval_bits_per_dim"] = logs["eval_loss"] / math.log(2)
        if self.skipped.total and "loss" in logs:
            logs["skipped"] = self.skipped.total
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of a held-out batch; of a probe with the likeliest tokens, of a text without the logits."""
        self._held_out_step += 1
        if self.config.task == "language":
            inputs = {**inputs, **self.loss_alone}
        elif self.config.task == "probe":
            inputs = {**inputs, "use_cache": False}
        if self.model_accepts_loss_kwargs:
            return self._packed_prediction_step(model, inputs, *args, **kwargs)
        with self._sharing():
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        return loss, logits.argmax(-1) if self.config.task == "probe" and logits is not None else logits, labels

    def _packed_prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of each window by itself: they have unequal numbers of labels, and batches are made up by chance.

        Processes that compute together do so equally often: one with fewer windows computes its last one again.
        """
        count = len(inputs["input_ids"])
        times = count if self.processes.world == 1 else self._held_out.size
        self.model_accepts_loss_kwargs = False
        try:
            losses: list[Any] = []
            for i in (min(i, count - 1) for i in range(times)):
                window = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in inputs.items()}
                losses.append(Trainer.prediction_step(self, model, window, *args, **kwargs)[0])
        finally:
            self.model_accepts_loss_kwargs = True
        return torch.stack(losses[:count]), None, None

    def _gather_held_out(self, rows: Any) -> Any:
        """The rows of all processes in the order of the items, without those that fill up a batch."""
        if not isinstance(rows, Tensor):
            return type(rows)(self._gather_held_out(part) for part in rows)
        processes, counts = self.processes, self._held_out.counts(self._held_out_step)
        rows = rows[: self._held_out.size]  # the Trainer repeats the losses of windows, as if they were one
        if processes.world == 1:
            return rows[: counts[0]]
        full = rows.new_zeros(self._held_out.size, *rows.shape[1:])
        full[: len(rows)] = rows
        gathered: Any = self.accelerator.gather(full)
        parts = gathered.unflatten(0, (processes.data_ranks, processes.context, -1))
        # The mean of the losses of processes that share windows is the windows' loss.
        parts = parts[:, 0] if processes.context == 1 else parts.mean(1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        if math.isfinite(float(norm)):
            self.skipped.in_a_row = 0
        else:
            self._leave_out(model, float(norm))
        return norm

    def _leave_out(self, model: nn.Module, norm: float) -> None:
        """Leave out the step whose gradient norm, the same in all processes, isn't finite; or end the run."""
        step, run = self.state.global_step + 1, self.config.run
        cause = self._cause(norm).describe(step, self.processes.world)
        if run.nonfinite == "stop":
            raise NonFiniteError(
                f"{cause}; the optimizer has not stepped and nothing was saved. Newest checkpoint: "
                f"{self.newest_name()}. Try a lower optimizer.lr, a longer schedule.warmup or optimizer.clip; "
                "run.nonfinite=skip leaves such steps out"
            )
        self.skipped.total += 1
        self.skipped.in_a_row += 1
        if self.skipped.in_a_row >= run.nonfinite_limit:
            raise NonFiniteError(
                f"{cause}: run.nonfinite_limit={run.nonfinite_limit} steps in a row were not finite "
                f"({self.skipped.total} in all); nothing was saved since {self.newest_name()}. Try a lower "
                "optimizer.lr, a longer schedule.warmup or optimizer.clip"
            )
        if self.processes.first:
            logger.warning("%s; the step is left out (%d so far)", cause, self.skipped.total)
        model.zero_grad()  # an optimizer leaves parameters without a gradient as they are, moments and decay included
        # The reported loss is the mean over the steps that count.
        self._tr_loss.copy_(self._loss_before)
        self._globalstep_last_logged += 1

    def _cause(self, norm: float) -> Cause:
        """What isn't finite: the loss of the first process where it is that, else the gradient norm of all."""
        values = [float(loss) for loss in self.step_losses]
        worst = next((value for value in values if not math.isfinite(value)), None)
        rank, windows = self.processes.rank, self.step_windows
        mine = Cause(rank, "loss", worst, windows) if worst is not None else Cause(rank, "gradient norm", norm, windows)
        if self.processes.world == 1:
            return mine
        causes: list[Any] = [None] * self.processes.world
        torch.distributed.all_gather_object(causes, mine)
        losses = [cause for cause in causes if cause.what == "loss"]
        if losses:
            found: Cause = losses[0]
            return found
        every = [window for cause in causes[:: self.processes.context] for window in cause.windows]
        return Cause(0, "gradient norm", norm, every)

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
