"""The training loop. Read `Loop.run` first, then the methods that it calls, from top to bottom.

Accelerate wraps the model for several processes and gathers their values. Window order, checks before a step,
checkpoints and resuming are this package's own.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, skip_first_batches
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from subquad.attention import after_step
from subquad.memory import is_out_of_memory
from subquad.training import checkpoint
from subquad.training.config import with_steps
from subquad.training.errors import NonFiniteError
from subquad.training.memory import give_back
from subquad.training.optimizers import build_optimizer
from subquad.training.processes import Processes, now_at
from subquad.training.progress import Bar, Meter, Metrics, Pace, tell
from subquad.training.reading import DealtBatches, HeldOutBatches, NumberedWindows, RunOrder, naming
from subquad.training.saving import CHECKPOINTS, Checkpoints, ShardedCheckpoints, TrainerState
from subquad.training.task import Batch, Task, count_items

logger = logging.getLogger(__name__)


class Loop:
    """One process's training of `model`, freshly made by `task`, together with the other `processes`.

    Checkpoints are published atomically (`subquad.training.checkpoint`); resuming loads weights strictly and fails if a
    file is missing. If a loss or gradient isn't finite in any process, all processes raise `NonFiniteError`, with the
    step and the windows, before the optimizer steps, or all skip the step (`run.nonfinite`).
    """

    def __init__(
        self, task: Task, model: nn.Module, processes: Processes, settings: dict[str, Any], console: Console | None
    ) -> None:
        self.task, self.config, self.processes = task, task.config, processes
        config, folder = task.config, Path(task.config.run.folder)
        self.bf16 = settings["run.precision"] == "bf16"
        self.sharded = config.parallel.shard and processes.world > 1
        self.device = processes.torch_device
        # Accelerate fixes device and precision for the whole Python process, but runs in one process may differ: so
        # models are moved to their device here and run under torch's own autocast.
        self.accelerator = Accelerator(
            cpu=processes.world > 1 and self.device.type == "cpu",
            device_placement=False,
            mixed_precision="no",
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
        )
        if config.run.activation_checkpointing:
            recomputing: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
            for module in recomputing:
                module.gradient_checkpointing = True
        self.model: Any = model.to(self.device)
        if self.sharded:
            from subquad.training.sharding import shard

            shard(self.model, processes, bf16=self.bf16)
            self.spread = self.model  # on a CPU, `prepare` would wrap it in DistributedDataParallel
        else:
            self.spread = self.accelerator.prepare(self.model)
        self.sharing: Callable[[], AbstractContextManager[Any]] = processes.sharing_windows()
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scheduler = LambdaLR(self.optimizer, lambda step: self.config.schedule.factor(step, self.steps))
        self.state = TrainerState()
        kind = ShardedCheckpoints if self.sharded else Checkpoints
        self.checkpoints = kind(
            folder / CHECKPOINTS, task, self.model, self.optimizer, self.scheduler, processes, settings
        )

        self.windows = NumberedWindows(task.train, config.data.workers)
        self.meter = Meter(config.step_tokens * processes.data_ranks)
        windows_a_step = config.batch.size * config.batch.accumulation * processes.data_ranks
        self.metrics = Metrics(folder, self.meter, task.count, windows_a_step, config.run.trackers)
        self.console = console
        self.pace = Pace(config.run.minutes, 0)
        self.bar = Bar(console if processes.first else None, self.meter, self.steps, shown=processes.first)
        self.loss_sum = torch.tensor(0.0, device=self.device)
        """Sum of the losses of the `loss_steps` steps since the last report."""
        self.loss_steps = 0
        self.step_windows: list[int] = []
        self.step_losses: list[Tensor] = []
        self.interrupted = False

    def run(self, start: Path | None) -> None:
        """Train from the checkpoint `start`, or from scratch if None, to the last step or a signal."""
        run = self.config.run
        if start is not None:
            self.state = self.checkpoints.load(start)
        if self.processes.first:
            self.metrics.begin(self.state.step)
            self.announce()
        self.bar.begin(self.state.step)
        self.spread.train()
        self.pace = Pace(run.minutes, self.state.step)
        try:
            with StopSignal() as stop, naming(self.windows, self.config.data.worker_timeout):
                ended = self.steps is not None and self.state.step >= self.steps
                batches = iter(()) if ended else iter(self.train_batches())
                while not ended:
                    parts: list[Batch] = [next(batches) for _ in range(self.config.batch.accumulation)]
                    if start is not None:  # after the first batch, because starting a loader draws a random number
                        self.checkpoints.load_random_numbers(start, self.state.step)
                        start = None
                    self.meter.start()
                    measured = self.train_step(parts)
                    self.meter.stop()
                    self.after_step()

                    step = self.state.step
                    last = step == self.steps
                    [self.interrupted] = self.processes.any_of(stop.received)
                    ended = last or self.interrupted
                    saves = ended or step % run.save_every == 0
                    every = 0 if self.steps is None else run.evaluation_interval(self.steps)
                    # An interrupted run should end soon: the resumed run does its evaluation.
                    evaluates = every > 0 and (last or (step % every == 0 and not self.interrupted))
                    self.bar.move(step)
                    # A reported loss is the mean since the last report. A report at every checkpoint keeps unfinished
                    # sums out of checkpoints.
                    if saves or evaluates or step == 1 or step % run.log_every == 0:
                        self.report(measured)
                    if evaluates:
                        saves |= self.is_best(self.report_evaluation())
                    if saves:
                        self.checkpoints.save(self.state)
        finally:
            self.bar.close()
            self.metrics.close()

    @property
    def steps(self) -> int | None:
        """Steps in total; None until `fix_steps` knows how many fit into `run.minutes`."""
        return self.config.run.steps

    def fix_steps(self) -> None:
        """Fix the number of steps by the first process's pace once it has measured enough, and write it down."""

        def evaluating(steps: int) -> float:
            """Return the time of the evaluations in units of a step: an item without a backward pass takes a third."""
            interval = self.config.run.evaluation_interval(steps)
            items = count_items(self.task.held_out) / self.metrics.windows_a_step
            return steps / interval * items / 3 if interval else 0.0

        def fix() -> int | None:
            steps = self.pace.steps_that_fit(self.state.step, evaluating)
            if steps is not None:
                self.task.write_settings(steps)
                tell(self.console, self.extent(steps))
            return steps

        steps = self.bar.steps = self.processes.by_the_first(fix)
        self.config = with_steps(self.config, steps)

    def announce(self) -> None:
        """Print the model, the data, the device and the length of the run."""
        run, parameters = self.config.run, sum(parameter.numel() for parameter in self.model.parameters())
        windows = f"{self.metrics.windows:,} windows of {self.config.batch.length:,} tokens"
        tell(self.console, f"training {parameters:,} parameters on {windows} in {run.folder}")
        told = f"for {run.minutes:g} minutes: the first steps show how many fit"
        tell(self.console, told if self.steps is None else self.extent(self.steps))

    def extent(self, steps: int) -> str:
        """Return the amount of data that `steps` steps read, as text."""
        passes = steps * self.metrics.windows_a_step / self.metrics.windows
        shown = f"{passes:,.1f}" if passes >= 1 else f"{passes:.2g}"
        return f"{steps:,} steps of {self.meter.step_tokens:,} tokens, {shown} passes over the data"

    def train_batches(self) -> DataLoader[Any]:
        """Return a loader of this process's remaining batches, from the order that all processes share."""
        batch, processes = self.config.batch, self.processes
        # The total is not known yet: a number that no run reaches.
        steps = 2**40 if self.steps is None else self.steps
        total = steps * batch.size * batch.accumulation * processes.data_ranks
        order = RunOrder(len(self.windows), self.config.run.seed, total, self.task.together)
        dealt = DealtBatches(order, batch.size, processes.data_rank, processes.data_ranks)
        loader = self.loader(self.windows, dealt)
        done = self.state.step * batch.accumulation
        return skip_first_batches(loader, done) if done else loader

    def loader(self, items: Dataset[Any], batches: Sampler[list[int]]) -> DataLoader[Any]:
        """Return a loader of `items` in these `batches`, read by `data.workers` processes."""
        data = self.config.data
        return DataLoader(
            items,
            batch_sampler=batches,
            collate_fn=default_collate,
            pin_memory=self.device.type == "cuda",
            num_workers=data.workers,
            timeout=data.worker_timeout if data.workers else 0,
        )

    def train_step(self, parts: list[Batch]) -> dict[str, float]:
        """Take one optimizer step on the batches in `parts`; return its learning rate and gradient norm."""
        self.step_windows, self.step_losses = [], []
        sum_before = self.loss_sum.clone()
        labels = self.count_labels(parts)
        for number, batch in enumerate(parts, 1):
            self.training_pass(batch, labels, last=number == len(parts))
        self.loss_steps += 1

        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        if math.isfinite(norm):
            self.state.skipped_in_a_row = 0
            if self.config.optimizer.clip > 0:
                torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.optimizer.clip, total)
        else:
            self.leave_out(norm, sum_before)
        self.optimizer.step()
        rate = float(self.scheduler.get_last_lr()[0])
        self.model.zero_grad()
        self.state.step += 1
        if self.steps is None:  # before the next learning rate, which depends on the number of steps
            self.fix_steps()
        self.scheduler.step()
        return {"lr": rate, "grad_norm": norm}

    def count_labels(self, parts: list[Batch]) -> Tensor | None:
        """Return the number of labels in a step over all processes; None if the task's batch losses are plain means."""
        counts = [self.task.count_labels(batch) for batch in parts]
        if counts[0] is None:
            return None
        count = torch.stack([part for part in counts if part is not None]).sum().to(self.device)
        return self.accelerator.gather(count).sum() / 1  # division makes it floating, of the default dtype

    def training_pass(self, batch: Batch, labels: Tensor | None, *, last: bool) -> None:
        """Add the gradients of one batch, exchanged after the `last` one; raise `StepMemoryError` if out of memory."""
        step = self.state.step + 1
        self.step_windows += batch.pop("window").tolist()
        if self.task.augment is not None:
            batch = self.task.augment(batch)
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
        now_at(f"the forward pass of step {step}")
        try:
            with self.sharing(), nullcontext() if last else self.accelerator.no_sync(self.spread):
                loss = self.loss(self.placed(batch), labels)
                now_at(f"the backward pass of step {step}")
                # A non-finite loss must make its gradients non-finite: all processes see gradients, but not losses.
                poison = torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)
                self.accelerator.backward(loss * poison)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            give_back(error, self.model)
            raise self.task.explain_memory(error, self.device) from error
        now_at(f"the end of step {step}")
        self.step_losses.append(loss.detach())
        self.loss_sum += loss.detach()

    def loss(self, batch: Batch, labels: Tensor | None) -> Tensor:
        """Return the contribution of one batch to the step's loss: a mean of means, or a sum over `labels` labels."""
        with self.autocast():
            loss = self.task.loss(self.spread, batch, labels)
        if labels is None:
            return loss / self.config.batch.accumulation
        return loss * self.processes.world  # undoes the mean over processes: `labels` already counts all of them

    def autocast(self) -> AbstractContextManager[Any]:
        """Return bfloat16 autocast if the run uses it; a sharded model has its own mixed precision."""
        enabled = self.bf16 and not self.sharded
        return torch.autocast(self.device.type, torch.bfloat16) if enabled else nullcontext()

    def placed(self, batch: Batch) -> Batch:
        """Return the batch on the model's device."""
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def leave_out(self, norm: float, sum_before: Tensor) -> None:
        """Skip a step whose gradient `norm`, equal in all processes, isn't finite, or raise `NonFiniteError`."""
        state, run = self.state, self.config.run
        cause = self.cause(norm).describe(state.step + 1, self.processes.world)
        newest = self.checkpoints.newest_name()
        if run.nonfinite == "stop":
            raise NonFiniteError(
                f"{cause}; the optimizer has not stepped and nothing was saved. Newest checkpoint: {newest}. Try a "
                "lower optimizer.lr, a longer schedule.warmup or optimizer.clip; run.nonfinite=skip skips such steps"
            )
        state.skipped += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= run.nonfinite_limit:
            raise NonFiniteError(
                f"{cause}: run.nonfinite_limit={run.nonfinite_limit} steps in a row were not finite "
                f"({state.skipped} in total); nothing was saved since {newest}. Try a lower optimizer.lr, a longer "
                "schedule.warmup or optimizer.clip"
            )
        if self.processes.first:
            logger.warning("%s; skipped the step (%d so far)", cause, state.skipped)
        self.model.zero_grad()  # without a gradient the optimizer changes neither parameters, moments nor decay
        self.loss_sum = sum_before  # reported losses leave out skipped steps
        self.loss_steps -= 1

    def cause(self, norm: float) -> Cause:
        """Return the first process's non-finite loss with its windows, or else the gradient `norm` with all windows."""
        rank, windows = self.processes.rank, self.step_windows
        worst = next((float(loss) for loss in self.step_losses if not math.isfinite(float(loss))), None)
        mine = Cause(rank, "loss", worst, windows) if worst is not None else Cause(rank, "gradient norm", norm, windows)
        causes: list[Cause] = self.processes.gather_objects(mine)
        losses = [cause for cause in causes if cause.what == "loss"]
        if losses:
            return losses[0]
        return Cause(0, "gradient norm", norm, [w for c in causes[:: self.processes.context] for w in c.windows])

    def after_step(self) -> None:
        """Call `attention.after_step` before saves; broadcast buffers that it redraws from rank 0."""
        before = [buffer._version for buffer in self.model.buffers()]
        after_step(self.model, self.state.step)
        for buffer, version in zip(self.model.buffers(), before, strict=True):
            if self.processes.world > 1 and buffer._version != version:
                torch.distributed.broadcast(buffer, src=0)

    def report(self, measured: dict[str, float]) -> None:
        """Report `measured` and the mean loss over all processes since the last report; nothing if all were skipped."""
        if self.loss_steps == 0:
            return
        loss = self.accelerator.gather(self.loss_sum).mean().item() / self.loss_steps
        self.loss_sum, self.loss_steps = torch.zeros_like(self.loss_sum), 0
        self.metrics.training(self.state.step, {"loss": loss, **measured}, self.state.skipped)
        self.bar.report(self.state.step, {"loss": loss})

    def report_evaluation(self) -> dict[str, float]:
        """Evaluate on the held-out items, report the values and return them."""
        now_at(f"the evaluation after step {self.state.step}")
        measured = self.evaluate()
        self.metrics.evaluation(self.state.step, measured)
        self.bar.report(self.state.step, measured)
        return measured

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss` and the task's other measures, without changing the random state of training."""
        size = self.task.held_out_size(self.config.batch.size)
        dealt = HeldOutBatches(
            count_items(self.task.held_out), size, self.processes.data_rank, self.processes.data_ranks
        )
        rows: dict[str, list[Tensor]] = {}
        self.model.eval()
        with torch.random.fork_rng():
            for number, batch in enumerate(self.loader(self.task.held_out, dealt)):
                with self.sharing(), self.autocast():
                    values = self.task.evaluate(self.model, self.placed(batch))
                for name, values_B in values.items():
                    rows.setdefault(name, []).append(self.gather_rows(values_B, size, dealt.counts(number)))
        self.model.train()
        return self.task.measure({name: torch.cat(parts).cpu().numpy() for name, parts in rows.items()})

    def load_best(self) -> None:
        """Load the weights of the step with the lowest held-out loss, if that isn't the last step."""
        state = self.state
        if state.best_step is None or state.best_step == state.step:
            return
        self.checkpoints.load_weights(self.checkpoints.root / checkpoint.name_of(state.best_step))
        if self.processes.first:
            logger.info("the model has the weights of step %d, which has the lowest held-out loss", state.best_step)

    def gather_rows(self, values_B: Tensor, size: int, counts: list[int]) -> Tensor:
        """Return the values of all processes in the order of the items, without the padding of batches to `size`."""
        processes = self.processes
        if processes.world == 1:
            return values_B[: counts[0]]
        full = values_B.new_zeros(size)
        full[: len(values_B)] = values_B
        gathered: Any = self.accelerator.gather(full)
        parts = gathered.unflatten(0, (processes.data_ranks, processes.context, -1))
        # The loss of a window is the mean over the processes that share it.
        parts = parts[:, 0] if processes.context == 1 else parts.mean(1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def is_best(self, measured: dict[str, float]) -> bool:
        """Return whether the held-out loss is the lowest so far, and record it if so."""
        state, loss = self.state, measured["eval_loss"]
        if not math.isfinite(loss):
            raise NonFiniteError(f"the held-out loss is {loss} after step {state.step}; nothing was saved")
        best = state.best_loss is None or loss < state.best_loss
        if best:
            state.best_loss, state.best_step = loss, state.step
        return best


@dataclass(frozen=True)
class Cause:
    """A non-finite number of one process, and the windows of its part of the step."""

    rank: int
    what: str
    """`loss` or `gradient norm`."""
    value: float
    windows: list[int]

    def describe(self, step: int, processes: int) -> str:
        """Return the text for an error message."""
        where = f" in process {self.rank}" if processes > 1 and self.what == "loss" else ""
        return f"the {self.what} is {self.value} at step {step}{where}, in the batch of windows {self.windows}"


class StopSignal:
    """Set `received` on the first SIGINT or SIGTERM; a second SIGINT interrupts at once. Handlers are restored."""

    def __init__(self) -> None:
        self.received = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set signal handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = True
        logger.warning("received %s: saving after this step", signal.Signals(number).name)
