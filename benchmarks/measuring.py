"""Shared parts of the measurements: the loop over lengths, a row's status and statistics, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self

import torch

from benchmarks.config import LayersConfig, ModelConfig, OpsConfig
from benchmarks.memory import peak_bytes
from benchmarks.peers import Peer
from benchmarks.report import Report, Row, What
from benchmarks.timing import Failure, Timing, attempt, ceilings
from subquad.evaluation.provenance import provenance

OUT_OF_TIME = Failure("skipped", "no time was left for it")
Tell = Callable[[str], None]


def check_there(device: str) -> None:
    """Raise `ValueError` if `device` is a GPU and PyTorch finds none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available: PyTorch finds no GPU")


def by_length(
    what: What,
    config: OpsConfig | LayersConfig | ModelConfig,
    peers: tuple[list[Peer], list[dict[str, str]]],
    rows_of: Callable[[int, bool, Tell], list[Row]],
    *,
    shown: bool,
    deadline: float | None,
    found: Callable[[Report], None] | None,
    command: str,
) -> Report:
    """Report `rows_of(tokens, late, tell)` for each length; `late` means that it starts after the deadline."""
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
    """Return a row's status and message: those of a `Failure`, else `ok`."""
    if isinstance(result, Failure):
        return {"status": result.status, "message": result.message}
    return {"status": "ok", "message": ""}


def statistics_of(timing: Timing) -> dict[str, float | int]:
    """Return a row's median and 20th and 80th percentile in seconds, and the number of repeats."""
    return {"median_s": timing.median, "p20_s": timing.p20, "p80_s": timing.p80, "repeats": len(timing.seconds)}


def over(base: Timing | Failure | None, timing: Timing) -> float | None:
    """Return how many times faster `timing` is than `base`, or None if the base has no time."""
    return base.median / timing.median if isinstance(base, Timing) else None


def memory_of(f: Callable[[], object], device: str) -> int | None:
    """Return the peak bytes of a call, or None if it fails under the profiler."""
    found = attempt(peak_bytes, f, device)
    return None if isinstance(found, Failure) else int(found)


class Progress:
    """Progress on standard error: `with Progress(3) as progress`, then `progress.step("...")` for each step."""

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

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, what: str) -> None:
        """Show the start of the next step."""
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=what)
        elif self.shown:
            seconds = time.monotonic() - self.start
            sys.stderr.write(f"[{self.done + 1}/{self.steps}, {seconds:.0f} s] {what}\n")
            sys.stderr.flush()
        self.done += 1

    def say(self, what: str) -> None:
        """Show a detail of the current step, only if there is a bar."""
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
