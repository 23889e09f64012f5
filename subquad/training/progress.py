"""Progress of a run: a bar or plain lines, `metrics.jsonl`, trackers and loss curves."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from subquad.config import digest
from subquad.disk import aside, write_atomically
from subquad.parsing import check_keys, parse_json, read_text
from subquad.program import install
from subquad.training.errors import SaveError

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
CHECKSUM = "crc32"
"""Key of a line's checksum."""
PLAIN_LINE_SECONDS = 15.0
"""Seconds between progress lines without a terminal."""
PACED_STEPS, PACED_PART = 5, 0.03
"""Least number of steps, and least part of a run's time, from which the number of steps is estimated."""
LATER = 0.05
"""Fraction of the steps to leave out of the scale of the curves, because the first losses are many times higher."""


class Meter:
    """Counts tokens and seconds of training steps, without evaluations and saves."""

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
        """Trained tokens per second since this process began."""
        return self.steps * self.step_tokens / self.seconds if self.seconds else 0.0


class Pace:
    """Estimates how many steps fit into the `minutes` of a run that begins now, after `step` steps."""

    def __init__(self, minutes: float, step: int) -> None:
        self.seconds, self.first = 60 * minutes, step
        self.began = time.monotonic()
        self._later = math.inf
        """When the first step ended, which takes longer than others."""

    def steps_that_fit(self, step: int, evaluating: Callable[[int], float]) -> int | None:
        """Return the total number of steps, after `step` of them; None while these are too few for an estimate.

        `evaluating(steps)` is the time of the evaluations of a run of `steps` steps, in units of a step.
        """
        now, done = time.monotonic() - self.began, step - self.first
        if done == 1:
            self._later = now
        if now >= self.seconds:
            return step
        if done < PACED_STEPS or now < PACED_PART * self.seconds:
            return None
        left = int((self.seconds - now) * (done - 1) / (now - self._later))
        return step + int(left / (1 + evaluating(step + left) / (step + left)))


class Metrics:
    """Appends one JSON object per report to `metrics.jsonl` and sends the same numbers to the trackers.

    Keys of a training record: step, loss (nats per token, example or asked token; mean over all processes), lr,
    grad_norm, tokens (with padding), epochs, tokens_per_s, seconds, and skipped, if steps were skipped so far. Keys of
    an evaluation: step, eval_loss, eval_accuracy (classifiers, probes) and eval_bits_per_dim (images). A resumed run
    first drops the records after its checkpoint. Only rank 0 calls `begin`; nothing is written without it.
    """

    def __init__(self, folder: Path, meter: Meter, windows: int, windows_a_step: int, trackers: Sequence[str]) -> None:
        self.folder = folder
        self.meter = meter
        self.windows = windows
        self.windows_a_step = windows_a_step
        self.names = trackers
        self._trackers: list[Any] | None = None

    def begin(self, step: int) -> None:
        """Open the files and drop the records after the checkpoint of `step`."""
        kept = [record for record in read_metrics(self.folder) if record["step"] <= step]
        write_atomically(self.folder / METRICS, "".join(map(metrics_line, kept)).encode())
        self._trackers = start_trackers(self.names, self.folder, step)

    def training(self, step: int, measured: Mapping[str, float], skipped: int) -> None:
        """Write a training record, without non-finite values (the norm of a skipped step), which JSON can't hold."""
        record = {"step": step} | {name: value for name, value in measured.items() if math.isfinite(value)}
        record |= {
            "tokens": step * self.meter.step_tokens,
            "epochs": step * self.windows_a_step / self.windows,
            "tokens_per_s": self.meter.tokens_per_second,
            "seconds": self.meter.seconds,
        }
        self._write(record | ({"skipped": skipped} if skipped else {}))

    def evaluation(self, step: int, measured: Mapping[str, float]) -> None:
        """Write an evaluation record."""
        self._write({"step": step, **measured})

    def _write(self, record: dict[str, float]) -> None:
        if self._trackers is None:
            return
        try:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(metrics_line(record))
        except OSError as error:
            raise SaveError(
                f"a line of {METRICS} could not be written to {self.folder}: {error}. Checkpoints are untouched: "
                "free some space and run the same command again"
            ) from error
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
            raise ValueError(f"run.trackers={','.join(names)}: {name} is not installed; {install(name)}")


def start_trackers(names: Sequence[str], folder: Path, step: int) -> list[Any]:
    """Start Accelerate's trackers `names` of the run in `folder`, which is at `step`."""
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, WandBTracker

    run = folder.resolve()
    trackers: list[Any] = []
    for name in names:
        if name == "tensorboard":
            trackers.append(TensorBoardTracker("tensorboard", str(folder), purge_step=step + 1))
        elif name == "wandb":  # a fixed id, so that a resumed run stays one run
            trackers.append(
                WandBTracker("subquad", name=folder.name, dir=str(folder), id=digest(str(run)), resume="allow")
            )
        else:
            trackers.append(MLflowTracker("subquad", run_name=folder.name))
    for tracker in trackers:
        tracker.start()
    return trackers


def metrics_line(record: Mapping[str, float]) -> str:
    """Return a record of `metrics.jsonl` as its line, whose last number is the CRC-32 of the others as JSON."""
    return json.dumps({**record, CHECKSUM: crc32(json.dumps(record).encode())}) + "\n"


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the records of a run's `metrics.jsonl`, without a truncated last line; else `ValueError` for damage.

    Every bit of a line is covered by its checksum (`metrics_line`).
    """
    path = folder / METRICS
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], 1):
        if line:
            record = parse_json(line, f"{path}, line {number}")
            check_keys(record, {"step": int, CHECKSUM: int}, f"{path}, line {number}")
            if any(not isinstance(value, int | float) for value in record.values()):
                raise ValueError(f"{path}, line {number} must hold numbers, got {line[:80]!r}")
            del record[CHECKSUM]
            if metrics_line(record) != line + "\n":
                raise ValueError(f"{path}, line {number} is damaged: its {CHECKSUM} is not that of the other numbers")
            records.append(record)
    return records


class Bar:
    """A progress bar with loss, tokens/s and time left; plain lines without a terminal; nothing unless `shown`."""

    def __init__(self, console: Console | None, meter: Meter, steps: int | None, *, shown: bool = True) -> None:
        self.console = console
        self.meter = meter
        self.steps = steps
        self.shown = shown
        self._bar: Progress | None = None
        self._newest: dict[str, float] = {}
        self._last_line = 0.0

    def begin(self, step: int) -> None:
        """Show the bar at `step`."""
        self._last_line = time.monotonic()
        if not self.shown or self.console is None or not self.console.is_terminal:
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None, table_column=Column(max_width=40)),  # what the numbers leave of the line
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[text]}"),
        )
        self._bar = Progress(*columns, console=self.console)
        self._bar.add_task("", total=self.steps, completed=step, text="")
        self._bar.start()

    def move(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, total=self.steps, text=self._text(step))

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """Show the newest `values`; without a bar, print a plain line if one is due."""
        self._newest.update(values)
        if self._bar is not None or not self.shown:
            return
        due = "eval_loss" in values or step == 1 or time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS
        if not due:
            return
        self._last_line = time.monotonic()
        tell(self.console, f"step {step}/{'?' if self.steps is None else self.steps} {self._text(step)}")

    def _text(self, step: int) -> str:
        newest, parts = self._newest, []
        if "loss" in newest:
            parts.append(f"loss {newest['loss']:.3f}")
        if "eval_loss" in newest:
            parts.append(f"held-out {newest['eval_loss']:.3f}")
        if "eval_accuracy" in newest:
            parts.append(f"accuracy {newest['eval_accuracy']:.1%}")
        if "eval_bits_per_dim" in newest:
            parts.append(f"{newest['eval_bits_per_dim']:.4f} bits per dimension")
        if self.meter.steps and self.steps is not None:
            left = (self.steps - step) * self.meter.seconds / self.meter.steps
            parts.append(f"{int(left // 60)}:{int(left % 60):02d} left")
        if self.meter.steps:
            parts.append(f"{self.meter.tokens_per_second:,.0f} tokens/s")
        if self._bar is not None:
            room = self._bar.console.width - len(f"training 4444 {self.steps}/{self.steps} ")
            while parts and len("  ".join(parts)) > room:
                parts.pop()
        return "  ".join(parts)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def tell(console: Console | None, text: str) -> None:
    """Print a line of the run's progress on the console, or log it without one."""
    if console is None:
        logger.info("%s", text)
    else:
        console.print(text, highlight=False, soft_wrap=True, markup=False)


def draw_curves(records: Sequence[dict[str, float]], path: Path, *, title: str, unit: str = "token") -> None:
    """Draw the losses of `metrics.jsonl` records, in nats per `unit`, as a PNG.

    If the first training losses lie above the picture, the legend names the first one. Raises `ValueError` if the
    records hold no loss.
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
        label = f"training, from {first:.2f}" if first > high else "training"
        axes.plot(*zip(*train, strict=True), color="#4477aa", linewidth=1.2, label=label)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#cc6677", markersize=4, label="held-out")
    axes.set(xlabel="optimizer step", ylabel=f"loss (nats per {unit})", title=title)
    axes.set_ylim(low, high)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with aside(path) as draft:
        figure.savefig(draft, format="png")


def loss_range(train: Sequence[tuple[float, float]], held_out: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the y range of the curves: all held-out losses, and training losses after the first `LATER` steps."""
    begin = LATER * max(step for step, _ in [*train, *held_out])
    seen = [loss for step, loss in train if step >= begin] + [loss for _, loss in held_out]
    low, high = min(seen), max(seen)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room
