"""Measure the tokens/s of decoders whose weights are stored in fewer than 32 bits."""

from __future__ import annotations

import time
from copy import deepcopy
from itertools import chain, product
from typing import Any, Unpack

import torch

from benchmarks.config import SIZES, PrecisionSpeedConfig
from benchmarks.measuring import OUT_OF_TIME, Progress, Running, check_there, result_of
from benchmarks.models import build_decoder, check_models
from benchmarks.precision import PRECISIONS
from benchmarks.report import Report, Row
from benchmarks.timing import Failure, Run, Timing, attempt, interleave
from subquad.evaluation.provenance import provenance
from subquad.generation.batch_state import StaticBatchState
from subquad.models import Decoder
from subquad.models.precision import set_precision

STEPS = 8
"""Tokens of a timed call."""


def check_precision_speed(config: PrecisionSpeedConfig) -> None:
    """Raise `ValueError` or `TypeError` if this configuration can't be measured here."""
    check_there(config.device)
    check_models(config.mechanisms, {}, stacks=False)


def measure_precision_speed(config: PrecisionSpeedConfig | None = None, /, **running: Unpack[Running]) -> Report:
    """Measure the tokens/s of recorded decoding steps with weights of each precision, side by side.

    All precisions of a mechanism and a size are timed in turns, `STEPS` tokens a call, in one process with `threads`
    threads. `times_float32` is the median of the ratios to float32 in the same round. `weight_bytes` are those of all
    weights, the table of embeddings included, of which a token reads one row. Other arguments and the treatment of
    failures are as in `measure_ops`.
    """
    config = PrecisionSpeedConfig() if config is None else config
    check_precision_speed(config)
    threads, deadline = torch.get_num_threads(), running.get("deadline")
    rows: list[Row] = []
    try:
        torch.set_num_threads(config.threads)
        report = Report(
            "precision_speed",
            config.to_dict(),
            rows,
            provenance(config.device),
            command=running.get("command", ""),
        )
        cases = list(product(config.sizes, config.mechanisms))
        progress = Progress(len(cases), shown=running.get("shown", False))
        for size, name in cases:
            progress.step(f"{name}, {size}")
            late = deadline is not None and time.monotonic() > deadline
            found = OUT_OF_TIME if late else attempt(_rows, config, size, name)
            rows += _failed(size, name, found) if isinstance(found, Failure) else found
            if (keep := running.get("found")) is not None:
                keep(report)
    finally:
        torch.set_num_threads(threads)
    return report


def _named(size: str, name: str) -> dict[str, Any]:
    return {"name": name, "size": size, "label": f"{name}, {size}", "kind": "ours"}


def _failed(size: str, name: str, failure: Failure) -> list[Row]:
    return [{**_named(size, name), "stored": "", "status": failure.status, "message": failure.message}]


def _rows(config: PrecisionSpeedConfig, size: str, name: str) -> list[Row]:
    model = build_decoder(name, longest=2, options={}, **SIZES[size]).eval().to(config.device)
    parameters = model.num_parameters()
    models: dict[str, Decoder] = {}
    for precision, asked in PRECISIONS.items():
        models[precision] = deepcopy(model)
        set_precision(models[precision], **asked)
    runs = {precision: _run(config, other) for precision, other in models.items()}
    times = interleave(runs, repeats=config.repeats, seconds=config.seconds)
    base, rows = times["float32"], list[Row]()
    for precision, other in models.items():
        result = times[precision]
        row: Row = {**_named(size, name), "stored": precision, "parameters": parameters, "batch": config.batch}
        row |= {"pass": "token", "weight_bytes": _bytes(other), **result_of(result)}
        if isinstance(result, Timing):
            row |= {f"{key}_s": row[f"{key}_s"] / STEPS for key in ("median", "p20", "p80")}
            row["tokens_per_s"] = config.batch / row["median_s"]
            row["times_float32"] = 1 / result.relative_to(base) if isinstance(base, Timing) else None
        rows.append(row)
    return rows


def _run(config: PrecisionSpeedConfig, model: Decoder) -> Run:
    """Return the timed call: recorded steps from a state that goes on from call to call."""
    batch_state = StaticBatchState(model, config.batch, 1)
    tokens = list(range(config.batch))

    @torch.no_grad()
    def steps(_: Any) -> None:
        for _ in range(STEPS):
            batch_state.step(tokens)

    return Run(steps, before=lambda: None)


def _bytes(model: Decoder) -> int:
    kept = {id(x): x.nbytes for x in chain(model.parameters(), model.buffers())}
    return sum(kept.values())
