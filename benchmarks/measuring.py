"""Shared parts of the measurements: the loop over lengths, a row's status and statistics, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypedDict, Unpack

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.config import LayersConfig, ModelConfig, OpsConfig
from benchmarks.memory import peak_bytes
from benchmarks.peers import Peer
from benchmarks.report import Report, Row, What
from benchmarks.timing import Failure, Timing, attempt, ceilings
from subquad.evaluation.provenance import provenance

OUT_OF_TIME = Failure("skipped", "no time was left for it")


class Running(TypedDict, total=False):
    """Arguments of every measurement beside its configuration."""

    shown: bool
    """Whether to show progress on standard error."""
    deadline: float | None
    """A time of `time.monotonic()`; what would start later is marked `skipped`."""
    found: Callable[[Report], None] | None
    """Called with the report after each length, so that an interrupted run keeps its results."""
    command: str
    """The command to record in the report."""


def check_there(device: str) -> None:
    """Raise `ValueError` if `device` is a GPU and PyTorch finds none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available: PyTorch finds no GPU")


def by_length(
    what: What,
    config: OpsConfig | LayersConfig | ModelConfig,
    peers: tuple[list[Peer], list[dict[str, str]]],
    rows_of: Callable[[int, bool], list[Row]],
    **running: Unpack[Running],
) -> Report:
    """Report `rows_of(tokens, late)` for each length; `late` means that it starts after the deadline."""
    (there, records), deadline, found = peers, running.get("deadline"), running.get("found")
    limits = ceilings(config.device, getattr(torch, config.dtype))
    origin = provenance(config.device, tuple(peer.distribution for peer in there))
    rows: list[Row] = []
    progress = Progress(len(config.tokens), shown=running.get("shown", False))
    for tokens in config.tokens:
        progress.step(f"{tokens:,} tokens")
        rows += rows_of(tokens, deadline is not None and time.monotonic() > deadline)
        report = Report(what, config.to_dict(), list(rows), origin, limits, records, running.get("command", ""))
        if found is not None:
            found(report)
    return report


def result_of(result: object) -> Row:
    """Return a row's status and message; for a `Timing` also median, percentiles in seconds and number of repeats."""
    if isinstance(result, Failure):
        return {"status": result.status, "message": result.message}
    row: Row = {"status": "ok", "message": ""}
    if isinstance(result, Timing):
        row |= {"median_s": result.median, "p20_s": result.p20, "p80_s": result.p80, "repeats": len(result.seconds)}
    return row


def over(base: Timing | Failure | None, timing: Timing) -> float | None:
    """Return how many times faster `timing` is than `base`, or None if the base has no time."""
    return base.median / timing.median if isinstance(base, Timing) else None


def memory_of(f: Callable[[], object], device: str) -> int | None:
    """Return the peak bytes of a call, or None if it fails under the profiler."""
    found = attempt(peak_bytes, f, device)
    return None if isinstance(found, Failure) else int(found)


def kernels_of(f: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Return name, launches and microseconds of the kernels of a call that take longest on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        f()
        torch.cuda.synchronize()
    events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.key, event.count, event.self_device_time_total) for event in events[:8]]


class Progress:
    """Progress on standard error: `step("...")` writes a line."""

    def __init__(self, steps: int, *, shown: bool = True) -> None:
        self.steps, self.done, self.shown = steps, 0, shown
        self.start = time.monotonic()

    def step(self, what: str) -> None:
        """Show the start of the next step."""
        self.done += 1
        if self.shown:
            seconds = time.monotonic() - self.start
            sys.stderr.write(f"[{self.done}/{self.steps}, {seconds:.0f} s] {what}\n")
            sys.stderr.flush()
