"""When a run logs, evaluates, saves and stops: by its configuration, by its time limit, or by a signal."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from subquad.attention import Attention
from subquad.training.config import RunConfig

logger = logging.getLogger(__name__)


class StopSignal:
    """Turns the first SIGINT or SIGTERM into `received`; a second SIGINT interrupts at once. Restores the handlers."""

    def __init__(self) -> None:
        self.received = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
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


class Flow(TrainerCallback):
    """Decides after each step; in a run of several processes all decide alike."""

    def __init__(self, run: RunConfig, stop: StopSignal) -> None:
        self.run = run
        self.stop = stop
        self.out_of_time = False
        self.interrupted = False
        self._start = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock of the time limit."""
        self._start = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set what the Trainer does after this step."""
        step, last = state.global_step, state.global_step >= self.run.steps
        minutes = (time.monotonic() - self._start) / 60
        late = self.run.max_minutes is not None and minutes >= self.run.max_minutes and not last
        self.interrupted, self.out_of_time = _any_process(args, self.stop.received, late)
        ends = last or self.interrupted or self.out_of_time
        control.should_training_stop |= ends
        control.should_save = ends or step % self.run.save_every == 0
        # An interrupted run wants to be gone: what it would measure, the run that goes on measures again.
        control.should_evaluate = self.run.eval_every > 0 and (
            last or self.out_of_time or (step % self.run.eval_every == 0 and not self.interrupted)
        )
        # Losses are means since the report before: a report at every checkpoint leaves none half told to a resume.
        due = control.should_save or control.should_evaluate
        control.should_log = due or step == 1 or step % self.run.log_every == 0
        if self.out_of_time:
            logger.warning("stopping at step %d of %d: run.max_minutes=%s", step, self.run.steps, self.run.max_minutes)


class AfterStep(TrainerCallback):
    """Tells every mechanism that the optimizer has stepped (`Attention.after_step`), before anything is saved.

    A buffer that a mechanism then draws anew is that of process 0 in all processes.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Not called for the parts of an accumulated batch."""
        for module in kwargs["model"].modules():
            if isinstance(module, Attention):
                before = [buffer._version for buffer in module.buffers()]
                module.after_step(state.global_step)
                for buffer, version in zip(module.buffers(), before, strict=True):
                    if args.world_size > 1 and buffer._version != version:
                        torch.distributed.broadcast(buffer, src=0)


def _any_process(args: TrainingArguments, *flags: bool) -> list[bool]:
    """Each flag, True where it is in any process."""
    if args.world_size == 1:
        return list(flags)
    seen = torch.tensor([int(flag) for flag in flags], device=args.device)
    torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in seen.tolist()]
