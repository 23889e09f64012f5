"""Repeats of one benchmark on each machine, kept as one file of values: `benchmarks/results/cpu_WHAT_runs.json`.

    python -m benchmarks.runs first.json second.json third.json    # reports of one command, on one machine

A value is named `ROW | COLUMN`, as the tables of docs/performance.md and benchmarks/results show it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.config import LayersConfig
from benchmarks.report import Report, Row, described
from subquad.parsing import read_json

RESULTS = Path(__file__).parent / "results"
BOTH = ("forward", "forward_backward")
LENGTHS, CONTEXTS = (1024, 4096, 16384), (64, 4096, 32768)
PASSES = {"forward": "forward", "forward_backward": "forward + backward", "step": "training", "prefill": "prefill"}
SCANS = {
    "retnet": "gated scan by head",
    "gla": "gated scan by channel",
    "mamba2": "gated scan as Mamba-2",
    "delta_net": "delta scan",
    "gated_delta_net": "delta scan by head",
    "kda": "delta scan by channel",
}
"""Operators whose time and memory depend on the kind of their decays alone, by the mechanism that has them."""
OPERATORS = ("llp", "linear", "latte", "elita", *SCANS)
THEIRS = ("gated_delta_net", "mamba2")
"""Scans that transformers computes in torch."""
SIZES: dict[str, dict[str, Any]] = {"llp": {"segment": 256}, "window": {"segment": 256}, "latte": {"latents": 64}}
MODELS = ("full", "llp", "window", "linear", "latte", "elita")
DECODERS = ("linear", "latte", "elita", "window", "llp", "gla", "mamba2", "gated_delta_net", "kda")
Value = Callable[[Report], float | None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Add the named reports to the file of their benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runs", description="Keep repeats of one benchmark.")
    parser.add_argument("files", nargs="+", type=Path, help="reports of the same command on the same machine")
    reports = [Report.load(file) for file in parser.parse_args(arguments).files]
    if len({report.stem for report in reports}) > 1:
        parser.error(f"the files are repeats of one command, got {', '.join(report.stem for report in reports)}")
    keep(RESULTS / f"{reports[0].stem}_runs.json", [kept(report) for report in reports])


def kept(report: Report) -> dict[str, Any]:
    """Return what is kept of a run: date, commit, machine, command and values."""
    made = {name: report.provenance[name] for name in ("date", "commit")}
    found = {name: value(report) for name, value in values(report.what)}
    return {**made, "machine": described(report.provenance["machine"]), "command": report.command, "found": found}


def keep(file: Path, made: list[dict[str, Any]]) -> None:
    """Write runs to `file`, in place of those of the same machine, before those of others."""
    there = read_json(file) if file.is_file() else []
    runs = [*made, *(run for run in there if run["machine"] != made[0]["machine"])]
    file.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def values(what: str) -> Iterator[tuple[str, Value]]:
    """Yield the values of a benchmark by name."""
    yield from {"ops": _of_operators, "layers": _of_layers, "model": _of_models, "decode": _of_decoding}[what]()


def _of_operators() -> Iterator[tuple[str, Value]]:
    for name, which, tokens in product(OPERATORS, BOTH, LENGTHS):
        value = partial(_value, name, tokens, which, "times_faster", **SIZES.get(name, {}))
        yield f"{SCANS.get(name, name)}, {PASSES[which]} | T = {tokens:,}", value
    for tokens in LENGTHS[1:]:
        value = partial(_over, "linear", "linear-attention-transformer", tokens, "forward_backward")
        yield f"linear, forward + backward, / linear-attention-transformer | T = {tokens:,}", value
    for name, which, tokens in product(THEIRS, BOTH, LENGTHS):
        value = partial(_over, name, f"transformers, {name}", tokens, which)
        yield f"{SCANS[name]}, {PASSES[which]}, / transformers | T = {tokens:,}", value
    for name, tokens in product((*OPERATORS, "window"), LENGTHS):
        yield f"{SCANS.get(name, name)}, in + out / peak memory | T = {tokens:,}", partial(_lean, name, tokens)
    named = SCANS | {f"transformers, {name}": f"{SCANS[name]}, transformers" for name in THEIRS}
    for (name, shown), tokens in product(named.items(), LENGTHS):
        yield f"{shown}, peak memory | T = {tokens:,}", partial(_peak, name, tokens)


def _of_layers() -> Iterator[tuple[str, Value]]:
    names = LayersConfig().mechanisms
    for name, which, tokens in product(names, BOTH, LENGTHS):
        yield f"{name}, {PASSES[which]} | T = {tokens:,}", partial(_value, name, tokens, which, "times_faster")
    for name, tokens in product(("full", *names), LENGTHS):
        yield f"{name}, peak memory | T = {tokens:,}", partial(_peak, name, tokens)


def _of_models() -> Iterator[tuple[str, Value]]:
    for name, which, tokens in product(MODELS, ("step", "prefill"), (2048, 8192)):
        yield f"{name}, {PASSES[which]} | T = {tokens:,}", partial(_value, name, tokens, which, "over_transformers")


def _of_decoding() -> Iterator[tuple[str, Value]]:
    for name, tokens in product((*DECODERS, "qwen3_5"), CONTEXTS):
        shown = "imported Qwen3.5, / transformers' own" if name == "qwen3_5" else name
        value = partial(_value, name, tokens, "token", "over_transformers", form="recorded")
        yield f"{shown} | after {tokens:,}", value
    for name in DECODERS:
        value = partial(_value, name, 64, "token", "over_transformers", form="compiled")
        yield f"{name} | compiled, after 64", value
        yield f"{name} | after 32,768 / after 64", partial(_flat, name)
        yield f"{name} | / by hand, after 64", partial(_by_hand, name)


def _row(report: Report, name: str, tokens: int, which: str, **more: Any) -> Row | None:
    """Return the first measured row with these values."""
    wanted = {"name": name, "tokens": tokens, "pass": which, "status": "ok", **more}
    return next((row for row in report.rows if all(row.get(key) == value for key, value in wanted.items())), None)


def _value(name: str, tokens: int, which: str, key: str, report: Report, **more: Any) -> float | None:
    row = _row(report, name, tokens, which, **more)
    return None if row is None else row.get(key)


def _peak(name: str, tokens: int, report: Report) -> float | None:
    return _value(name, tokens, "forward_backward", "peak_bytes", report)


def _lean(name: str, tokens: int, report: Report) -> float | None:
    row = _row(report, name, tokens, "forward_backward", **SIZES.get(name, {}))
    return None if row is None or not row["peak_bytes"] else row["io_bytes"] / row["peak_bytes"]


def _quotient(one: Row | None, other: Row | None) -> float | None:
    """Return how many times faster `one` is than `other`."""
    return None if one is None or other is None else other["median_s"] / one["median_s"]


def _over(ours: str, theirs: str, tokens: int, which: str, report: Report) -> float | None:
    return _quotient(_row(report, ours, tokens, which), _row(report, theirs, tokens, which))


def _flat(name: str, report: Report) -> float | None:
    short, long = (_row(report, name, tokens, "token", form="recorded") for tokens in (64, 32768))
    return _quotient(long, short)


def _by_hand(name: str, report: Report) -> float | None:
    ours, floor = _row(report, name, 64, "token", form="recorded"), _row(report, f"by hand: {name}", 64, "token")
    return _quotient(ours, floor)


if __name__ == "__main__":
    main()
