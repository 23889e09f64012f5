"""Measure operators beside `scaled_dot_product_attention` and other libraries in one process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

import torch

from benchmarks import peers as libraries
from benchmarks.config import OpsConfig
from benchmarks.measuring import OUT_OF_TIME, Running, by_length, check_there, kernels_of, memory_of, over, result_of
from benchmarks.operators import PRODUCTS, Case, Operator, Pass, Shape, check_mechanisms, our_cases, sdpa
from benchmarks.report import Report, Row
from benchmarks.timing import Failure, Run, Timing, attempt, clock_of, interleave
from subquad.memory import total_bytes


class Line(NamedTuple):
    """A case at one length, with its operator or the reason why it can't be built."""

    case: Case
    shape: Shape
    operator: Operator | Failure


class Key(NamedTuple):
    """A timed call: the index of its line, and the pass."""

    line: int
    which: Pass


def check_ops(config: OpsConfig) -> None:
    """Raise `ValueError` if this configuration can't be measured here."""
    check_there(config.device)
    check_mechanisms(config.mechanisms)
    libraries.chosen(config.peers, config.device)


def measure_ops(config: OpsConfig | None = None, /, **running: Unpack[Running]) -> Report:
    """Measure time, peak memory, FLOP/s, bytes/s and speed relative to causal SDPA of operators at each length.

    Args:
        config: what to measure; `OpsConfig()` is the documentation's table.
        running: whether to show progress, and more (`Running`).

    Each time is the median of interleaved repeats: every case runs once, then all again. On a GPU it is the GPU's own
    time. A case that fails or runs out of memory becomes a row with that status. Raises `ValueError` for a missing
    device or an unknown mechanism or peer.
    """
    config = OpsConfig() if config is None else config
    check_ops(config)
    there, records = libraries.chosen(config.peers, config.device)
    cases = [sdpa()]
    others = libraries.cases_beside(there, records, config.mechanisms, config.device)
    for name in config.mechanisms:  # each with those that it is compared with
        cases += [*our_cases([name], config.backends or [None]), *(case for case in others if case.beside == name)]
    cases += [case for case in others if case.beside is None]
    rows_of = partial(rows_of_length, config, cases, [])
    return by_length("ops", config, (there, records), rows_of, **running)


def rows_of_length(config: OpsConfig, cases: list[Case], earlier: list[Row], tokens: int, late: bool) -> list[Row]:
    """Return the rows of one length, with the first case as their base, and add them to those of earlier lengths.

    A pass that would take longer than `config.limit`, by its time at an earlier length, is skipped, and on a CPU one
    that would need more than four fifths of the memory, by its peak there: the system would end the process.
    """
    torch.compiler.reset()  # FlexAttention compiles for each length and would fill the compiler's cache
    lines = list[Line]()
    for case in cases:
        for shape in _shapes(config, case, tokens):
            lines.append(Line(case, shape, OUT_OF_TIME if late else attempt(case.make, shape)))
    passes = [cast(Pass, which) for which in config.passes]
    runs: dict[Key, Run] = {}
    skipped: dict[Key, Timing | Failure] = {}
    for n, line in enumerate(lines):
        for which in passes:
            if which in line.case.passes and isinstance(line.operator, Operator):
                seconds, needed = _expected(earlier, line, which)
                if seconds > config.limit:
                    skipped[Key(n, which)] = Failure("skipped", f"it could take {seconds:,.0f} s a pass")
                elif config.device == "cpu" and needed > 0.8 * (total_bytes("cpu") or math.inf):
                    skipped[Key(n, which)] = Failure("skipped", f"it could need {needed / 2**30:,.1f} GiB")
                else:
                    runs[Key(n, which)] = line.operator.run(which)
    times = skipped | interleave(
        runs,
        clock=clock_of(config.device),
        repeats=config.repeats,
        seconds=config.seconds,
    )
    rows = list[Row]()
    for n, line in enumerate(lines):
        for which in passes:
            if which in line.case.passes:
                rows.append(_row(line, which, times.get(Key(n, which)), times.get(Key(0, which))))
    earlier += rows
    return rows


def _expected(earlier: list[Row], line: Line, which: Pass) -> tuple[float, float]:
    """Return the seconds and bytes that a pass may take, by the longest earlier length.

    Seconds grow by the square of the ratio of lengths, bytes by the ratio.
    """
    label, tokens = line.case.label(line.shape), line.shape.tokens
    known = [row for row in earlier if (row["label"], row["pass"], row["status"]) == (label, which, "ok")]
    longest = max(known, key=lambda row: row["tokens"], default=None)
    if longest is None:
        return 0.0, 0.0
    ratio = tokens / longest["tokens"]
    return longest["median_s"] * ratio**2, (longest.get("peak_bytes") or 0) * ratio


def _shapes(config: OpsConfig, case: Case, tokens: int) -> list[Shape]:
    """Return the sizes of a case at one length, one for each value of the options that it depends on."""
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
        **result_of(operator if isinstance(operator, Failure) else timing),
    }
    if not isinstance(operator, Operator) or not isinstance(timing, Timing):
        return row
    flops = None if case.flops is None else round(PRODUCTS[which] * case.flops(shape))
    if shape.device.startswith("cuda"):
        found = attempt(kernels_of, lambda: operator.run(which).call(None))
        row["kernels"] = found.message if isinstance(found, Failure) else found
    return {
        **row,
        "times_faster": over(base, timing),
        "peak_bytes": None if which == "backward" else memory_of(lambda: operator.run(which).call(None), shape.device),
        "io_bytes": operator.io_bytes(which),
        "flops": flops,
        "flops_per_s": None if flops is None else flops / timing.median,
        "bytes_per_s": operator.moved_bytes(which) / timing.median,
    }
