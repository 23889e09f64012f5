"""`measure_ops`: our operators beside `scaled_dot_product_attention` and other libraries, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from benchmarks import peers as _peers
from benchmarks.config import OpsConfig
from benchmarks.machine import ceilings
from benchmarks.operators import PRODUCTS, Case, Operator, Pass, Shape, check_mechanisms, our_cases, sdpa
from benchmarks.progress import Progress
from benchmarks.report import Report, Row
from benchmarks.timing import Failure, Timing, attempt, clock_of, interleave
from subquad.evaluation.provenance import provenance
from subquad.memory import peak_bytes

OUT_OF_TIME = Failure("skipped", "no time was left for it")


class Line(NamedTuple):
    """A case at one length, and what was made of it."""

    case: Case
    shape: Shape
    operator: Operator | Failure


class Key(NamedTuple):
    """Which call: the number of the line, and the pass."""

    line: int
    which: Pass


def check_ops(config: OpsConfig) -> None:
    """Raise `ValueError` for what cannot be measured here."""
    check_there(config.device)
    check_mechanisms(config.mechanisms)
    _peers.chosen(config.peers, config.device)


def check_there(device: str) -> None:
    """Raise `ValueError` for a GPU that is not there."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not there: PyTorch finds no GPU")


def measure_ops(
    config: OpsConfig | None = None,
    /,
    *,
    shown: bool = False,
    deadline: float | None = None,
    found: Callable[[Report], None] | None = None,
    command: str = "",
) -> Report:
    """Time, memory, FLOP/s and bytes/s of operators, at each length, and how many times faster than causal SDPA.

    Args:
        config: what to measure; `OpsConfig()` is the table of the documentation.
        shown: whether progress goes to standard error.
        deadline: a time of `time.monotonic()`; lengths that would begin later are marked `skipped`.
        found: hears of the report after each length, so that a run that is stopped leaves what it has.
        command: what is written into the report as its command.

    Each time is the median of interleaved repeats: every case runs once in turn, then all again. On a GPU it is the
    GPU's own time. A case that runs out of memory, or fails, is a row that says so. Raises `ValueError` for a device
    that is not there, an unknown mechanism or peer.
    """
    config = OpsConfig() if config is None else config
    check_ops(config)
    there, records = _peers.chosen(config.peers, config.device)
    cases = [sdpa(), *our_cases(config.mechanisms, config.backends or [None])]
    cases += _peers.cases_beside(there, records, config.mechanisms, config.device)
    limits = ceilings(config.device, getattr(torch, config.dtype))
    origin = provenance(config.device, tuple(peer.distribution for peer in there))
    rows: list[Row] = []

    def report() -> Report:
        return Report("ops", config.to_dict(), list(rows), origin, limits, records, command)

    with Progress(len(config.tokens), shown=shown) as progress:
        for tokens in config.tokens:
            progress.step(f"{tokens:,} tokens")
            late = deadline is not None and time.monotonic() > deadline
            rows += _length(config, cases, tokens, progress.say, late=late)
            if found is not None:
                found(report())
    return report()


def _length(config: OpsConfig, cases: list[Case], tokens: int, told: Callable[[str], None], *, late: bool) -> list[Row]:
    """The rows of one length."""
    torch.compiler.reset()  # FlexAttention compiles for each length; the caches of the others would fill up
    lines = list[Line]()
    for case in cases:
        for shape in _shapes(config, case, tokens):
            lines.append(Line(case, shape, OUT_OF_TIME if late else attempt(case.make, shape)))
    passes = [cast(Pass, which) for which in config.passes]
    runs = {
        Key(n, which): line.operator.run(which)
        for n, line in enumerate(lines)
        if isinstance(line.operator, Operator)
        for which in passes
        if which in line.case.passes
    }
    times = interleave(
        runs,
        clock=clock_of(config.device),
        repeats=config.repeats,
        seconds=config.seconds,
        told=lambda key: told(f"{tokens:,} tokens: {lines[key.line].case.name}, {key.which.replace('_', ' + ')}"),
    )
    rows = list[Row]()
    for n, line in enumerate(lines):
        for which in passes:
            if which in line.case.passes:
                rows.append(_row(line, which, times.get(Key(n, which)), times.get(Key(0, which))))
    return rows


def _shapes(config: OpsConfig, case: Case, tokens: int) -> list[Shape]:
    """The sizes of a case at one length: several where it depends on what has several values."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    batch = config.batch_of(tokens)
    return [
        Shape(batch, config.heads, tokens, config.channels, latents, segment, config.device, dtype)
        for latents in (config.latents if case.by_latents else config.latents[:1])
        for segment in (config.segment if case.by_segment else config.segment[:1])
    ]


def _row(line: Line, which: Pass, timing: Timing | Failure | None, base: Timing | Failure | None) -> Row:
    case, shape, operator = line
    row: dict[str, Any] = {
        "name": case.name,
        "label": case.label(shape),
        "kind": case.kind,
        "backend": case.backend,
        "tokens": shape.tokens,
        "batch": shape.batch,
        "heads": shape.heads,
        "channels": shape.channels,
        "latents": shape.latents if case.by_latents else None,
        "segment": shape.segment if case.by_segment else None,
        "pass": which,
        **status_of(operator if isinstance(operator, Failure) else timing),
    }
    if not isinstance(operator, Operator) or not isinstance(timing, Timing):
        return row
    flops = None if case.flops is None else round(PRODUCTS[which] * case.flops(shape))
    return {
        **row,
        **statistics_of(timing),
        "times_faster": base.median / timing.median if isinstance(base, Timing) else None,
        "peak_bytes": None if which == "backward" else memory_of(lambda: operator.run(which).call(None), shape.device),
        "io_bytes": operator.io_bytes(which),
        "flops": flops,
        "flops_per_s": None if flops is None else flops / timing.median,
        "bytes_per_s": operator.moved_bytes(which) / timing.median,
    }


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
