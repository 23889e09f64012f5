"""Progress of a run: a bar or plain lines, `metrics.jsonl`, trackers, and at the end its curves."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from subquad.config import digest
from subquad.parsing import check_keys, parse_json, read_text
from subquad.training.checkpoint import write_atomically

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
PLAIN_LINE_SECONDS = 15.0
"""Seconds between two lines of progress where there is no terminal."""
LATER = 0.05
"""The share of the steps after which the losses set the scale: the first ones are many times as high."""


class Meter:
    """Tokens, and seconds of training steps (evaluations and saves don't count)."""

    def __init__(self, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        self.steps = 0
        self.seconds = 0.0
        self._begin = 0.0

    def start(self) -> None:
        """Start the clock of a step."""
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self._begin
        self.steps += 1

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens a second since this process began."""
        return self.steps * self.step_tokens / self.seconds if self.seconds else 0.0


class Metrics:
    """Appends one JSON object per report to `metrics.jsonl` and gives the same numbers to the trackers.

    Keys of a training record: step, loss (nats a token, an example or an asked token; the mean over all processes), lr,
    grad_norm, tokens (padding included), epochs, tokens_per_s, seconds, and skipped, the steps left out so far, once
    there are any. Of an evaluation: step, eval_loss, and of a classifier or a probe eval_accuracy, of images
    eval_bits_per_dim. A run that goes on first drops the records after its checkpoint. Until `begin`, which the first
    process alone calls, nothing is written.
    """

    def __init__(self, folder: Path, meter: Meter, windows: int, windows_a_step: int, trackers: Sequence[str]) -> None:
        self.folder = folder
        self.meter = meter
        self.windows = windows
        self.windows_a_step = windows_a_step
        self.names = trackers
        self._trackers: list[Any] | None = None

    def begin(self, step: int) -> None:
        """Open the files; forget what came after the checkpoint of `step`."""
        kept = [record for record in read_metrics(self.folder) if record["step"] <= step]
        write_atomically(self.folder / METRICS, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._trackers = start_trackers(self.names, self.folder, step)

    def training(self, step: int, measured: Mapping[str, float], skipped: int) -> None:
        """Write a training record. What isn't finite, as the norm of a step that was left out, JSON has no word for."""
        record = {"step": step} | {name: value for name, value in measured.items() if math.isfinite(value)}
        record |= {
            "tokens": step * self.meter.step_tokens,
            "epochs": step * self.windows_a_step / self.windows,
            "tokens_per_s": self.meter.tokens_per_second,
            "seconds": self.meter.seconds,
        }
        self._write(record | ({"skipped": skipped} if skipped else {}))

    def evaluation(self, step: int, measured: Mapping[str, float]) -> None:
        """Write an evaluation."""
        self._write({"step": step, **measured})

    def _write(self, record: dict[str, float]) -> None:
        if self._trackers is None:
            return
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        named = {
            f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
            for name, value in record.items()
            if name != "step"
        }
        for tracker in self._trackers:
            tracker.log(named, step=record["step"])

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers or ():
            tracker.finish()
        self._trackers = None


def check_trackers(names: Sequence[str]) -> None:
    """Raise `ValueError` for a tracker that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"run.trackers={','.join(names)}: {name} is not installed; pip install {name}")


def start_trackers(names: Sequence[str], folder: Path, step: int) -> list[Any]:
    """Return Accelerate's trackers of the run in `folder`, which goes on after `step`."""
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, WandBTracker

    run = folder.resolve()
    trackers: list[Any] = []
    for name in names:
        if name == "tensorboard":
            trackers.append(TensorBoardTracker("tensorboard", str(folder), purge_step=step + 1))
        elif name == "wandb":  # the same identity each time: a run that goes on is one run there too
            trackers.append(
                WandBTracker("subquad", name=folder.name, dir=str(folder), id=digest(str(run)), resume="allow")
            )
        else:
            trackers.append(MLflowTracker("subquad", run_name=folder.name))
    for tracker in trackers:
        tracker.start()
    return trackers


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


class Bar:
    """A progress bar with loss, tokens/s and time left; without a terminal, a plain line now and then.

    `shown` is False in processes other than the first, which show nothing.
    """

    def __init__(self, console: Console | None, meter: Meter, steps: int, *, shown: bool = True) -> None:
        self.console = console
        self.meter = meter
        self.steps = steps
        self.shown = shown
        self._bar: Progress | None = None
        self._newest: dict[str, float] = {}
        self._last_line = 0.0

    def begin(self, step: int) -> None:
        """Show the bar of a run that is at `step`."""
        self._last_line = time.monotonic()
        if not self.shown or self.console is None or not self.console.is_terminal:
            return
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self.console)
        self._bar.add_task("", total=self.steps, completed=step, text="")
        self._bar.start()

    def move(self, step: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, text=self._text(step))

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Take over the newest losses; print a plain line where there is no bar."""
        self._newest.update(values)
        if self._bar is not None or not self.shown:
            return
        due = "eval_loss" in values or step == 1 or time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS
        if not due:
            return
        self._last_line = time.monotonic()
        line = f"step {step}/{self.steps} {self._text(step)}"
        if self.console is None:
            logger.info("%s", line)
        else:
            self.console.print(line, highlight=False, soft_wrap=True)

    def _text(self, step: int) -> str:
        newest, parts = self._newest, []
        if "loss" in newest:
            parts.append(f"loss {newest['loss']:.3f}")
        if "eval_loss" in newest:
            parts.append(f"held-out {newest['eval_loss']:.3f}")
        if "eval_accuracy" in newest:
            parts.append(f"accuracy {newest['eval_accuracy']:.1%}")
        if "eval_bits_per_dim" in newest:
            parts.append(f"{newest['eval_bits_per_dim']:.4f} bits a dimension")
        if self.meter.steps:
            left = (self.steps - step) * self.meter.seconds / self.meter.steps
            parts.append(f"{self.meter.tokens_per_second:,.0f} tokens/s")
            parts.append(f"{int(left // 60)}:{int(left % 60):02d} left")
        return "  ".join(parts)

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def draw_curves(records: Sequence[dict[str, float]], path: Path, *, title: str, unit: str = "token") -> None:
    """Draw the losses of `metrics.jsonl` records, in nats a `unit`, as a PNG.

    The training losses of the first steps may lie above the picture; then the legend has the first one.

    Raises `ValueError` where there is no loss to draw.
    """
    train = [(record["step"], record["loss"]) for record in records if "loss" in record]
    held_out = [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]
    if not train and not held_out:
        raise ValueError(f"there is no loss to draw among {len(records)} records")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    low, high = loss_range(train, held_out)
    if train:
        first = train[0][1]
        label = f"training, from {first:.2f} on" if first > high else "training"
        axes.plot(*zip(*train, strict=True), color="#4477aa", linewidth=1.2, label=label)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#cc6677", markersize=4, label="held-out")
    axes.set(xlabel="optimizer step", ylabel=f"loss (nats a{'n' if unit[0] in 'aeiou' else ''} {unit})", title=title)
    axes.set_ylim(low, high)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def loss_range(train: Sequence[tuple[float, float]], held_out: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the range of the picture: all held-out losses, and the training losses but for the first steps'."""
    begin = LATER * max(step for step, _ in [*train, *held_out])
    seen = [loss for step, loss in train if step >= begin] + [loss for _, loss in held_out]
    low, high = min(seen), max(seen)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room
