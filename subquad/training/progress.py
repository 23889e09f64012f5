"""What a run shows and writes while it trains: a bar or plain lines, `metrics.jsonl`, TensorBoard events."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from subquad.parsing import check_keys, parse_json, read_text
from subquad.training.checkpoint import write_atomically
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
PLAIN_LINE_SECONDS = 15.0
"""Seconds between two lines of progress where there is no terminal."""


class Meter(TrainerCallback):
    """Tokens, and seconds of training steps (evaluations and saves don't count)."""

    def __init__(self, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        self.steps = 0
        self.seconds = 0.0
        self._begin = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self._begin
        self.steps += 1

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second since this process began."""
        return self.steps * self.step_tokens / self.seconds if self.seconds else 0.0


class Metrics(TrainerCallback):
    """Appends one JSON object per report to `metrics.jsonl` and the same numbers to TensorBoard.

    Keys of a training record: step, loss (nats a token, an example or an asked token; the mean over all processes), lr,
    grad_norm, tokens (padding included), epochs, tokens_per_s, seconds, and skipped, the steps left out so far, once
    there are any. Of an evaluation: step, eval_loss, and of a classifier or a probe eval_accuracy, of images
    eval_bits_per_dim. A run that goes on first drops the records after its checkpoint.
    """

    def __init__(self, folder: Path, meter: Meter, windows: int, step_windows: int) -> None:
        self.folder = folder
        self.meter = meter
        self.windows = windows
        self.step_windows = step_windows
        self._writer: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the files; forget what came after the checkpoint."""
        if not state.is_world_process_zero:
            return
        from torch.utils.tensorboard.writer import SummaryWriter

        kept = [record for record in read_metrics(self.folder) if record["step"] <= state.global_step]
        write_atomically(self.folder / METRICS, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=state.global_step + 1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a training record or an evaluation."""
        if self._writer is None or not logs:
            return
        step = state.global_step
        record: dict[str, float]
        if "loss" in logs:
            record = {
                "step": step,
                "loss": logs["loss"],
                "lr": logs["learning_rate"],
                "grad_norm": float(logs["grad_norm"]),
                "tokens": step * self.meter.step_tokens,
                "epochs": step * self.step_windows / self.windows,
                "tokens_per_s": self.meter.tokens_per_second,
                "seconds": self.meter.seconds,
            }
            if "skipped" in logs:
                record["skipped"] = logs["skipped"]
            if not math.isfinite(record["grad_norm"]):
                del record["grad_norm"]  # the last step was left out: JSON has no word for its norm
        elif "eval_loss" in logs:
            names = ("eval_loss", "eval_accuracy", "eval_bits_per_dim")
            record = {"step": step} | {name: logs[name] for name in names if name in logs}
        else:
            return
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(
                    f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", value, step
                )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Bring the events to disk with every checkpoint."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the events' file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The records of a run's `metrics.jsonl`; a last line that was cut off is left out, another is a `ValueError`."""
    path = folder / METRICS
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], 1):
        if line:
            record = parse_json(line, f"{path}, line {number}")
            check_keys(record, {"step": int}, f"{path}, line {number}")
            if any(not isinstance(value, int | float) for value in record.values()):
                raise ValueError(f"{path}, line {number} must hold numbers, got {line[:80]!r}")
            records.append(record)
    return records


class Bar(TrainerCallback):
    """A progress bar with loss, tokens/s and time left; without a terminal, a plain line now and then."""

    def __init__(self, console: Console | None, meter: Meter, config: TrainConfig) -> None:
        self.console = console
        self.meter = meter
        self.config = config
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._loss: float | None = None
        self._held_out: float | None = None
        self._accuracy: float | None = None
        self._bits: float | None = None
        self._last_line = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar."""
        self._last_line = time.monotonic()
        if self.console is None or not self.console.is_terminal or not state.is_world_process_zero:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self.console)
        self._task = self._bar.add_task("", total=self.config.run.steps, completed=state.global_step, text="")
        self._bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step, text=self._text(state.global_step))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take over the newest losses; print a plain line where there is no bar."""
        logs = logs or {}
        self._loss = logs.get("loss", self._loss)
        self._held_out = logs.get("eval_loss", self._held_out)
        self._accuracy = logs.get("eval_accuracy", self._accuracy)
        self._bits = logs.get("eval_bits_per_dim", self._bits)
        if self._bar is not None or not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():
            return
        due = "eval_loss" in logs or state.global_step == 1 or time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS
        if not due:
            return
        self._last_line = time.monotonic()
        line = f"step {state.global_step}/{self.config.run.steps} {self._text(state.global_step)}"
        if self.console is None:
            logger.info("%s", line)
        else:
            self.console.print(line, highlight=False, soft_wrap=True)

    def _text(self, step: int) -> str:
        parts = []
        if self._loss is not None:
            parts.append(f"loss {self._loss:.3f}")
        if self._held_out is not None:
            parts.append(f"held-out {self._held_out:.3f}")
        if self._accuracy is not None:
            parts.append(f"accuracy {self._accuracy:.1%}")
        if self._bits is not None:
            parts.append(f"{self._bits:.4f} bits a dimension")
        if self.meter.steps:
            left = (self.config.run.steps - step) * self.meter.seconds / self.meter.steps
            parts.append(f"{self.meter.tokens_per_second:,.0f} tokens/s")
            parts.append(f"{int(left // 60)}:{int(left % 60):02d} left")
        return "  ".join(parts)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
