"""Write the tables and pictures of docs/performance.md from benchmarks/results/*.json.

    python docs/make_performance.py
    python docs/make_performance.py --runs first.json second.json third.json    # repeats of `python -m benchmarks ops`

`python -m benchmarks ... --out benchmarks/results`, `python benchmarks/compare_stdlib.py` and `make gpu` measure the
numbers. A block without results says so.
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
"""Fraction of a CPU aim that counts as met. GPU aims have no such margin."""
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
"""Speed over causal SDPA, forward and forward + backward: B 1, H 8, 64 channels, float32, two cores."""
TITLES = {
    "ops": "operators",
    "fla": "flash-linear-attention",
    "model": "training steps and prefill",
    "decode": "decoding",
}
PICTURES = {
    ("cpu_ops", "time"): "Time of the operators against the number of tokens, forward and forward + backward",
    ("cpu_ops", "memory"): "Peak memory of the operators against the number of tokens",
    ("cpu_ops", "latents"): "Time of Latte against the number of latents",
    ("cpu_model", "time"): "Time of a training step and of prefill against the number of tokens",
    ("cpu_model", "memory"): "Peak memory of a training step against the number of tokens",
    ("cpu_decode", "time"): "Time of one token and size of the state against the context",
}
"""Descriptions of the pictures for readers who cannot see them."""
RUNS = "cpu_ops_runs.json"
"""Speed over causal SDPA in several runs of the same command."""
GPU_TOKENS = (2048, 16384)
"""Lengths measured on a GPU; an aim that names no length holds at each of them."""
REASONS: dict[tuple[str, str], str] = {}
"""Reasons for missed GPU aims, by the first two columns of their rows."""


def main() -> None:
    """Write the page and draw its pictures."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/performance.md.")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="result files of repeats of the same command")
    if runs := parser.parse_args().runs:
        pages.keep(pages.RESULTS / RUNS, [ratios(run) for run in runs])
    pages.rewrite("performance.md", BLOCKS)
    for stem in ("cpu_ops", "cpu_model", "cpu_decode", "gpu_ops", "gpu_model", "gpu_decode"):
        report = loaded(stem)
        if report is not None:
            sys.stdout.write("".join(f"{file}\n" for file in save(report, pages.IMAGES)))


def loaded(stem: str) -> Report | None:
    """Return a result, or None if it was not measured or its step ended before it measured anything."""
    file = pages.RESULTS / f"{stem}.json"
    if not file.is_file():
        return None
    values = pages.read(file)
    values.pop("step", None)
    for row in values.get("rows", []):
        row["label"] = row["label"].replace(" latents a head", " latents per head")  # of results before the rename
    return Report.from_dict(values) if values.get("rows") else None


def cpu_aims() -> str:
    """Return the table of measured speeds beside their aims: forward / forward + backward."""
    report = loaded("cpu_ops")
    if report is None:
        return _waiting("cpu_ops")
    table = _by_length(lambda name, tokens: _beside_aims(report, name, tokens))
    return "\n".join(
        [
            "Times faster than causal `scaled_dot_product_attention`, forward / forward + backward. A number more than",
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
    """Return a table with a row for each mechanism with aims and a column for each length."""
    lengths = sorted({tokens for aims in CPU_AIMS.values() for tokens in aims})
    lines = ["| | " + " | ".join(f"T = {tokens:,}" for tokens in lengths) + " |", "|---|" + "---|" * len(lengths)]
    lines += [f"| {name} | {' | '.join(cell(name, tokens) for tokens in lengths)} |" for name in CPU_AIMS]
    return "\n".join(lines)


def ratios(file: Path) -> dict[str, Any]:
    """Return a run's speeds, forward and forward + backward, for each mechanism and length with an aim."""
    report = Report.from_dict(pages.read(file))
    found = {name: {tokens: _pair(report, name, tokens) for tokens in aims} for name, aims in CPU_AIMS.items()}
    return {"date": report.provenance["date"], "commit": report.provenance["commit"], "faster": found}


def cpu_runs() -> str:
    """Return the speeds of several runs; bold if their median misses the aim."""
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
    """Return the table of GPU aims, forward + backward: met, missed (with the reason) or not measured."""
    if all(loaded(f"gpu_{what}") is None for what in ("ops", "fla", "model", "decode")):
        return "Nothing has been measured on a GPU yet; [GPU_TODO](../benchmarks/GPU_TODO.md) lists what would be."
    lines = ["| aim (forward + backward) | at | measured | | reason |", "|---|---|---:|---|---|"]
    for text, at, least, value in _gpu_aims():
        missed = value is not None and value < least
        verdict = "not measured" if value is None else "**missed**" if missed else "met"
        measured, reason = "-" if value is None else f"{value:.3f}", REASONS.get((text, at), "") if missed else ""
        lines.append(f"| {text} | {at} | {measured} | {verdict} | {reason} |")
    return "\n".join(lines)


def tables(stem: str) -> str:
    """Return the tables of a result and their origin, folded."""
    report = loaded(stem)
    if report is None:
        return _waiting(stem)
    found, versions = report.provenance, report.provenance["versions"]
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    command = report.command.replace("subquad bench", "python -m benchmarks")  # its name when the CPU's were measured
    origin = f"`{command}`, {found['date']}, commit {found['commit']}: {made}."
    title = f"All numbers: {TITLES[stem.partition('_')[2]]}"
    return f"<details><summary>{title}</summary>\n\n{report.table()}\n\n{origin}\n\n</details>"


def five_mechanisms() -> str:
    """Return the table of the five stdlib recipes at equal steps, which benchmarks/compare_stdlib.py trained."""
    found = pages.read(pages.RESULTS / "five_mechanisms.json")
    first = found["rows"][0]
    lines = []
    for row in found["rows"]:
        states = [f"{state['bytes']:,} B" + ("" if state["measured"] else " (computed)") for state in row["states"]]
        speeds = [f"{row[f'{kind}_tokens_per_second']:,.0f}" for kind in ("train", "decode")]
        lines.append([f"`{row['name']}`", f"{row['bits_per_byte']:.3f}", *speeds, *states])
    headers = ["", "held-out bits per byte", "training tokens/s", "decoding tokens/s"]
    headers += [f"state after {state['tokens']:,} tokens" for state in first["states"]]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{pages.table(headers, lines)}\n\n"
        f"Each model has {first['parameters']:,} parameters and read {first['tokens']:,} tokens in {first['steps']:,} "
        f"steps. For comparison, gzip -9 needs {first['gzip_bits_per_byte']:.3f} and xz -9e "
        f"{first['xz_bits_per_byte']:.3f} bits per byte for the same {first['held_out_bytes']:,} held-out bytes in one "
        f"piece. The state is that of one sequence in float32.\n\n"
        f"`{found['command']}`, {found['date']}, commit {found['commit']}, {found['hardware']}: {versions}; files "
        f"{first['files_hash']}."
    )


def pictures(stem: str, *names: str) -> str:
    """Return links to the pictures that `main` draws."""
    if loaded(stem) is None:
        return _waiting(stem)
    return "\n\n".join(f"![{PICTURES[stem, name]}](images/{stem}_{name}.png)" for name in names)


def _waiting(stem: str) -> str:
    return f"Not measured yet: `{COMMANDS.get(stem, 'make gpu')}`."


def _judged(found: float | None, aim: float) -> str:
    if found is None:
        return "-"
    return f"{found:.1f}" if found >= MET * aim else f"**{found:.1f}**"


def _row(report: Report | None, name: str, tokens: int, which: str, **more: Any) -> dict[str, Any] | None:
    """Return the first measured row with these values."""
    for row in report.rows if report is not None else ():
        wanted = {"name": name, "tokens": tokens, "pass": which, "status": "ok", **more}
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    return None


def _pair(report: Report, name: str, tokens: int) -> list[float | None]:
    """Return the speeds over causal SDPA, forward and forward + backward."""
    sizes = {"llp": {"segment": 256}, "latte": {"latents": 64}}.get(name, {})
    rows = [_row(report, name, tokens, which, **sizes) for which in ("forward", "forward_backward")]
    return [None if row is None else row["times_faster"] for row in rows]


def _faster(stem: str, ours: str, theirs: str, tokens: int, which: str = "forward_backward", **more: Any) -> Found:
    """Return how many times faster `ours` is than `theirs`."""
    report = loaded(stem)
    one = _row(report, ours, tokens, which, **more)
    other = _row(report, theirs, tokens, which, **(more if theirs.startswith("flex") else {}))
    return None if one is None or other is None else other["median_s"] / one["median_s"]


def _of_copy(name: str, tokens: int) -> Found:
    """Return the bytes per second over those of a copy in the same run."""
    report = loaded("gpu_ops")
    row = _row(report, name, tokens, "forward_backward")
    if report is None or row is None or "copy_bytes_per_s" not in report.ceilings:
        return None
    return row["bytes_per_s"] / report.ceilings["copy_bytes_per_s"]


def _steady(name: str) -> Found:
    """Return the time of a token after a context of 1,000 tokens over that after 100,000."""
    row = _row(loaded("gpu_decode"), name, 100000, "token")
    return None if row is None else 1 / row["of_shortest"]


class Aim(NamedTuple):
    """A ratio to reach."""

    text: str
    at: str
    least: float
    """The smallest ratio that meets the aim."""
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
    for segment in (256, 512):
        who = f"llp, segment {segment}, over"
        for at, tokens in lengths:
            found = _faster("gpu_ops", "llp", "flex, llp", tokens, segment=segment)
            yield Aim(f"{who} FlexAttention with its mask: 1.2", at, 1.2, found)
        for least, tokens in ((6, 16384), (1, 2048)):
            found = _faster("gpu_ops", "llp", "sdpa", tokens, segment=segment)
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
    "five-mechanisms": five_mechanisms,
    "gpu-aims": gpu_aims,
}
for _stem in ("cpu_ops", "cpu_model", "cpu_decode", "gpu_ops", "gpu_fla", "gpu_model", "gpu_decode"):
    BLOCKS[_stem.replace("_", "-")] = partial(tables, _stem)

if __name__ == "__main__":
    main()
