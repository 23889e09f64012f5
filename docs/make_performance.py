"""Write the tables and pictures of docs/performance.md again, from benchmarks/results/*.json.

    python docs/make_performance.py
    python docs/make_performance.py --runs first.json second.json third.json    # several of `python -m benchmarks ops`

The figures are measured by `python -m benchmarks ... --out benchmarks/results` (on a CPU) and `make gpu`; what was not
measured says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pages

from benchmarks.plots import save
from benchmarks.report import Report

Found = float | None
MET = 0.9
"""Of an aim on a CPU: within ten percent counts as met. On a GPU an aim is met in full or missed."""
COMMANDS = {
    "cpu_ops": "python -m benchmarks ops --latents 64,16,32,128,256 --out benchmarks/results",
    "cpu_model": "python -m benchmarks model --out benchmarks/results",
    "cpu_decode": "python -m benchmarks decode --out benchmarks/results",
}
CPU_AIMS: dict[str, dict[int, tuple[float, float]]] = {
    "llp": {1024: (2, 2.5), 4096: (6, 6), 16384: (18, 22)},
    "linear": {1024: (2.5, 3), 4096: (8, 9), 16384: (25, 28)},
    "latte": {1024: (2, 2), 4096: (7, 7), 16384: (22, 22)},
    "elita": {1024: (5, 5), 4096: (20, 20), 16384: (60, 50)},
}
"""Times faster than causal SDPA, forward and forward + backward: B 1, H 8, 64 channels, float32, two cores."""
RUNS = "cpu_ops_runs.json"
"""Times faster in several runs of the same command."""
GPU_TOKENS = (2048, 16384)
"""The lengths that are measured on a GPU; an aim that names none holds at each."""
REASONS: dict[tuple[str, str], str] = {}
"""Why an aim on a GPU is missed, by the first two columns of its row."""


def main() -> None:
    """Rewrite the page and draw its pictures."""
    parser = argparse.ArgumentParser(description="the tables of docs/performance.md")
    parser.add_argument(
        "--runs", nargs="*", type=Path, default=[], help="results of the same command, one after another"
    )
    if runs := parser.parse_args().runs:
        pages.keep(pages.RESULTS / RUNS, [ratios(run) for run in runs])
    pages.rewrite("performance.md", BLOCKS)
    for stem in ("cpu_ops", "cpu_model", "cpu_decode", "gpu_ops", "gpu_model", "gpu_decode"):
        report = loaded(stem)
        if report is not None:
            sys.stdout.write("".join(f"{file}\n" for file in save(report, pages.IMAGES)))


def loaded(stem: str) -> Report | None:
    """A result; None where it was not measured, or where its step ended before it measured anything."""
    file = pages.RESULTS / f"{stem}.json"
    if not file.is_file():
        return None
    values = pages.read(file)
    values.pop("step", None)
    return Report.from_dict(values) if values.get("rows") else None


def cpu_aims() -> str:
    """The aims beside what was measured: forward / forward + backward."""
    report = loaded("cpu_ops")
    if report is None:
        return _waiting("cpu_ops")
    table = _by_length(lambda name, tokens: _beside_aims(report, name, tokens))
    return "\n".join(
        [
            "Times faster than causal `scaled_dot_product_attention`, forward / forward + backward; what is more than",
            "ten percent below its aim is **bold**.",
            "",
            table,
        ]
    )


def _beside_aims(report: Report, name: str, tokens: int) -> str:
    aims = CPU_AIMS[name][tokens]
    parts = [_judged(found, aim) for found, aim in zip(_pair(report, name, tokens), aims, strict=True)]
    return f"{' / '.join(parts)} (aim {aims[0]:g} / {aims[1]:g})"


def _by_length(cell: Callable[[str, int], str]) -> str:
    """A table with a line for each mechanism that has aims and a column for each length."""
    lengths = sorted({tokens for aims in CPU_AIMS.values() for tokens in aims})
    lines = ["| | " + " | ".join(f"T = {tokens:,}" for tokens in lengths) + " |", "|---|" + "---|" * len(lengths)]
    lines += [f"| {name} | {' | '.join(cell(name, tokens) for tokens in lengths)} |" for name in CPU_AIMS]
    return "\n".join(lines)


def ratios(file: Path) -> dict[str, Any]:
    """Times faster of a run, forward and forward + backward, for each line and length that has an aim."""
    report = Report.from_dict(pages.read(file))
    found = {name: {tokens: _pair(report, name, tokens) for tokens in aims} for name, aims in CPU_AIMS.items()}
    return {"date": report.provenance["date"], "commit": report.provenance["commit"], "faster": found}


def cpu_runs() -> str:
    """The same of several runs, their medians held to the aims."""
    runs = pages.read(pages.RESULTS / RUNS)

    def cell(name: str, tokens: int) -> str:
        parts = []
        for place, aim in enumerate(CPU_AIMS[name][tokens]):
            values = [run["faster"][name][str(tokens)][place] for run in runs]
            shown = ", ".join(f"{value:.1f}" for value in values)
            parts.append(shown if median(values) >= MET * aim else f"**{shown}**")
        return " / ".join(parts)

    made = ", ".join(dict.fromkeys(f"{run['date']}, commit {run['commit']}" for run in runs))
    return f"{_by_length(cell)}\n\n{len(runs)} runs, {made}."


def gpu_aims() -> str:
    """The ratios asked for on a GPU, forward + backward, each met, missed (and why) or not measured."""
    if all(loaded(f"gpu_{what}") is None for what in ("ops", "fla", "model", "decode")):
        return "No figure comes from a GPU yet: [GPU_TODO](../benchmarks/GPU_TODO.md) says what waits for one."
    lines = ["| aim (forward + backward) | at | measured | | reason |", "|---|---|---:|---|---|"]
    for text, at, least, value in _gpu_aims():
        missed = value is not None and value < least
        verdict = "not measured" if value is None else "**missed**" if missed else "met"
        measured, reason = "-" if value is None else f"{value:.3f}", REASONS.get((text, at), "") if missed else ""
        lines.append(f"| {text} | {at} | {measured} | {verdict} | {reason} |")
    return "\n".join(lines)


def tables(stem: str) -> str:
    """Return the tables of a result, and where they are from."""
    report = loaded(stem)
    if report is None:
        return _waiting(stem)
    found, versions = report.provenance, report.provenance["versions"]
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    command = report.command.replace("subquad bench", "python -m benchmarks")  # its name when the CPU's were measured
    origin = f"`{command}`, {found['date']}, commit {found['commit']}: {made}."
    return f"{report.table()}\n\n{origin}"


def pictures(stem: str, *names: str) -> str:
    """Return links to pictures that `main` draws."""
    if loaded(stem) is None:
        return _waiting(stem)
    return "\n\n".join(f"![{stem}: {name}](images/{stem}_{name}.png)" for name in names)


def _waiting(stem: str) -> str:
    return f"Not measured yet: `{COMMANDS.get(stem, 'make gpu')}`."


def _judged(found: float | None, aim: float) -> str:
    if found is None:
        return "-"
    return f"{found:.1f}" if found >= MET * aim else f"**{found:.1f}**"


def _row(report: Report | None, name: str, tokens: int, which: str, **more: Any) -> dict[str, Any] | None:
    """The first row of these that was measured."""
    for row in report.rows if report is not None else ():
        wanted = {"name": name, "tokens": tokens, "pass": which, "status": "ok", **more}
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    return None


def _pair(report: Report, name: str, tokens: int) -> list[float | None]:
    """Times faster, forward and forward + backward."""
    sizes = {"llp": {"segment": 256}, "latte": {"latents": 64}}.get(name, {})
    rows = [_row(report, name, tokens, which, **sizes) for which in ("forward", "forward_backward")]
    return [None if row is None else row["times_faster"] for row in rows]


def _faster(stem: str, ours: str, theirs: str, tokens: int, which: str = "forward_backward", **more: Any) -> Found:
    """Return the speed of one line over another's."""
    report = loaded(stem)
    one = _row(report, ours, tokens, which, **more)
    other = _row(report, theirs, tokens, which, **(more if theirs.startswith("flex") else {}))
    return None if one is None or other is None else other["median_s"] / one["median_s"]


def _of_copy(name: str, tokens: int) -> Found:
    """Return bytes a second over those of a copy in the same run."""
    report = loaded("gpu_ops")
    row = _row(report, name, tokens, "forward_backward")
    if report is None or row is None or "copy_bytes_per_s" not in report.ceilings:
        return None
    return row["bytes_per_s"] / report.ceilings["copy_bytes_per_s"]


def _steady(name: str) -> Found:
    """Return the time of a token after 1,000 over that after 100,000."""
    row = _row(loaded("gpu_decode"), name, 100000, "token")
    return None if row is None else 1 / row["of_shortest"]


class Aim(NamedTuple):
    """A ratio that is asked for."""

    text: str
    at: str
    least: float
    """From where on it is met."""
    found: Found


def _gpu_aims() -> Iterator[Aim]:
    lengths = [(f"T = {tokens:,}", tokens) for tokens in GPU_TOKENS]
    for at, tokens in lengths:
        yield Aim("latte over the `chunk_gla` route: 2", at, 2, _faster("gpu_fla", "latte", "fla, chunk_gla", tokens))
    for text, least in (("latte over flash SDPA: 3", 3), ("latte over flash SDPA, the far aim: 15", 15)):
        yield Aim(text, "T = 16,384", least, _faster("gpu_ops", "latte", "sdpa", 16384))
    for name, theirs in (("linear", "chunk_linear_attn"), ("elita", "chunk_simple_gla")):
        for at, tokens in lengths:
            yield Aim(f"{name} over `{theirs}`: 1.2", at, 1.2, _faster("gpu_fla", name, f"fla, {theirs}", tokens))
    for at, tokens in lengths:
        yield Aim("elita's bytes a second over a copy's: 0.6", at, 0.6, _of_copy("elita", tokens))
    for size in (256, 512):
        who = f"llp, segment {size}, over"
        for at, tokens in lengths:
            found = _faster("gpu_ops", "llp", "flex, llp", tokens, segment=size)
            yield Aim(f"{who} FlexAttention with its mask: 1.2", at, 1.2, found)
        for least, tokens in ((6, 16384), (1, 2048)):
            found = _faster("gpu_ops", "llp", "sdpa", tokens, segment=size)
            yield Aim(f"{who} flash SDPA: {least}", f"T = {tokens:,}", least, found)
    for name in ("llp", "latte"):
        for least, batch, tokens in ((1, 16, 2048), (2, 4, 16384)):
            found = _faster("gpu_model", name, "sdpa", tokens, "step")
            yield Aim(f"training a decoder of {name} over flash SDPA: {least}", f"{batch} x {tokens:,}", least, found)
    for name in ("llp", "latte", "linear", "elita", "window"):
        text = f"{name}: a token after 1,000 over one after 100,000: 1 / 1.05"
        yield Aim(text, "decoding", 1 / 1.05, _steady(name))


BLOCKS: dict[str, Callable[[], str]] = {
    "cpu-aims": cpu_aims,
    "cpu-runs": cpu_runs,
    "cpu-ops-pictures": partial(pictures, "cpu_ops", "time", "memory"),
    "cpu-latents": partial(pictures, "cpu_ops", "latents"),
    "cpu-model-pictures": partial(pictures, "cpu_model", "time", "memory"),
    "cpu-decode-pictures": partial(pictures, "cpu_decode", "time"),
    "gpu-aims": gpu_aims,
}
for _stem in ("cpu_ops", "cpu_model", "cpu_decode", "gpu_ops", "gpu_fla", "gpu_model", "gpu_decode"):
    BLOCKS[_stem.replace("_", "-")] = partial(tables, _stem)

if __name__ == "__main__":
    main()
