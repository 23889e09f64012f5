"""The skeleton of the measurements: rows length by length, status and statistics of a row, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.config import ModelConfig, OpsConfig
from benchmarks.memory import peak_bytes
from benchmarks.peers import Peer
from benchmarks.report import Report, Row, What
from benchmarks.timing import Failure, Timing, attempt, ceilings
from subquad.evaluation.provenance import provenance

OUT_OF_TIME = Failure("skipped", "no time was left for it")
Tell = Callable[[str], None]


def check_there(device: str) -> None:
    """Raise `ValueError` for a GPU that is not there."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not there: PyTorch finds no GPU")


def by_length(
    what: What,
    config: OpsConfig | ModelConfig,
    peers: tuple[list[Peer], list[dict[str, str]]],
    rows_of: Callable[[int, bool, Tell], list[Row]],
    *,
    shown: bool,
    deadline: float | None,
    found: Callable[[Report], None] | None,
    command: str,
) -> Report:
    """Report `rows_of(tokens, late, tell)` of each length; `late` where the length begins after the deadline."""
    there, records = peers
    limits = ceilings(config.device, getattr(torch, config.dtype))
    origin = provenance(config.device, tuple(peer.distribution for peer in there))
    rows: list[Row] = []
    with Progress(len(config.tokens), shown=shown) as progress:
        for tokens in config.tokens:
            progress.step(f"{tokens:,} tokens")
            rows += rows_of(tokens, deadline is not None and time.monotonic() > deadline, progress.say)
            report = Report(what, config.to_dict(), list(rows), origin, limits, records, command)
            if found is not None:
                found(report)
    return report


def status_of(result: object) -> dict[str, str]:
    """`ok`, or what went wrong and how."""
    if isinstance(result, Failure):
        return {"status": result.status, "message": result.message}
    return {"status": "ok", "message": ""}


def statistics_of(timing: Timing) -> dict[str, float | int]:
    """Median, percentiles and how many repeats they are of."""
    return {
        "median_s": timing.median,
        "p20_s": timing.p20,
        "p80_s": timing.p80,
        "repeats": len(timing.seconds),
    }


def memory_of(f: Callable[[], object], device: str) -> int | None:
    """The peak, or None where the call fails under the eyes of the profiler."""
    found = attempt(peak_bytes, f, device)
    return None if isinstance(found, Failure) else int(found)


class Progress:
    """`with Progress(3) as progress: progress.step("llp, 1,024 tokens")`, once for each of the steps."""

    def __init__(self, steps: int, *, shown: bool = True) -> None:
        self.steps, self.done, self.shown = steps, 0, shown
        self.start = time.monotonic()
        self.bar: Any = None
        if shown and sys.stderr.isatty():
            self.bar = _bar()

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, what: str) -> None:
        """Begin the next step."""
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=what)
        elif self.shown:
            seconds = time.monotonic() - self.start
            sys.stderr.write(f"[{self.done + 1}/{self.steps}, {seconds:.0f} s] {what}\n")
            sys.stderr.flush()
        self.done += 1

    def say(self, what: str) -> None:
        """Show on a bar what goes on inside the step; lines stay as they are."""
        if self.bar is not None:
            self.bar.update(self.task, description=what)


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True), transient=True)
