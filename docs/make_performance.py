"""Write the tables and pictures of docs/performance.md from benchmarks/results/*.json.

    python docs/make_performance.py
    python docs/make_performance.py --runs first.json second.json third.json    # repeats of one command, on one machine

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
from benchmarks.report import Report, described, size

Found = float | None
COMMANDS = {
    "cpu_ops": "python -m benchmarks ops --latents 64,16,32,128,256 --out benchmarks/results",
    "cpu_layers": "python -m benchmarks layers --out benchmarks/results",
    "cpu_model": "python -m benchmarks model --out benchmarks/results",
    "cpu_decode": "OMP_NUM_THREADS=1 python -m benchmarks decode --compile --out benchmarks/results",
}
TITLES = {
    "ops": "operators",
    "layers": "layers",
    "flex": "FlexAttention",
    "fla": "flash-linear-attention",
    "scans": "gated and delta scans",
    "model": "training steps and prefill",
    "decode": "decoding",
}
PICTURES = {
    ("cpu_ops", "time"): "Time of the operators against the number of tokens, forward and forward + backward",
    ("cpu_ops", "memory"): "Peak memory of the operators against the number of tokens",
    ("cpu_ops", "latents"): "Time of Latte against the number of latents",
    ("cpu_model", "time"): "Time of a training step and of prefill against the number of tokens",
    ("cpu_model", "memory"): "Peak memory of a training step against the number of tokens",
    ("cpu_decode", "time"): "Time of one token against the context",
    ("cpu_decode", "state"): "Size of the state against the context",
}
"""Descriptions of the pictures for readers who cannot see them."""
LENGTHS = (1024, 4096, 16384)
PASSES = {"forward": "forward", "forward_backward": "forward + backward", "step": "training", "prefill": "prefill"}
OPERATORS: dict[str, dict[int, tuple[float, float]]] = {
    "llp": {1024: (2, 2.5), 4096: (7, 7.5), 16384: (24, 26)},
    "linear": {1024: (2.8, 3.6), 4096: (10, 11), 16384: (32, 34)},
    "latte": {1024: (2.4, 3), 4096: (8, 9), 16384: (28, 32)},
    "elita": {1024: (9, 15), 4096: (28, 40), 16384: (100, 140)},
    "retnet": {16384: (30, 30)},
    "gla": {16384: (10, 12)},
    "mamba2": {},
    "delta_net": {16384: (10, 10)},
    "gated_delta_net": {16384: (10, 10)},
    "kda": {16384: (10, 10)},
}
"""Speed over causal SDPA, forward and forward + backward: B 1, H 8, 64 channels, float32, two cores."""
SCANS = {
    "retnet": "gated scan by head",
    "gla": "gated scan by channel",
    "mamba2": "gated scan as Mamba-2",
    "delta_net": "delta scan",
    "gated_delta_net": "delta scan by head",
    "kda": "delta scan by channel",
}
"""Operators whose time and memory depend on the kind of their decays alone, by the mechanism that has them."""
THEIRS = {"gated_delta_net": (1.2, 4.0), "mamba2": (4.0, 2.0)}
"""Speed over transformers' functions in torch at 16,384 tokens, forward and forward + backward."""
SIZES = {"llp": {"segment": 256}, "window": {"segment": 256}, "latte": {"latents": 64}}
LEAN = 1 / 1.1
"""Bytes of inputs and outputs with their gradients, over the peak memory of forward + backward."""
MODELS = {2048: 2.0, 8192: 5.0}
"""Tokens per second over those of transformers' Llama, in training and in prefill, by length."""
STEPS: dict[str, Found] = {"linear": 1.8, "latte": 1.8, "elita": 1.8, "window": 1.5, "llp": 1.5}
STEPS |= dict.fromkeys(("gla", "mamba2", "gated_delta_net", "kda"))
"""Decoded tokens per second over those of transformers' Llama at a context of 64."""
QWEN = 1.5
"""The same of an imported Qwen3.5 over transformers' own, at each context."""
COMPILED, BY_HAND, FLAT = 2.5, 1 / 1.25, 1 / 1.1
"""The same of compiled steps; speed over the step written by hand; speed after 32,768 tokens over that after 64."""
GPU_SCANS = {
    "retnet": "chunk_simple_gla",
    "gla": "chunk_gla",
    "mamba2": "mamba_chunk_scan_combined",
    "delta_net": "chunk_delta_rule",
    "gated_delta_net": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
}
"""Kernels on a GPU of flash-linear-attention, and one of mamba-ssm, that compute what our operators do."""
REASONS: dict[tuple[str, str], str] = {}
"""Reasons for missed GPU aims, by the first two columns of their rows."""


class Cell(NamedTuple):
    """A value of a run, in a row and a column of the table of runs, and the least that meets its aim, if it has one."""

    row: str
    column: str
    found: Callable[[Report], Found]
    least: float | None = None
    shown: Callable[[float], str] = "{:.3g}".format

    @property
    def key(self) -> str:
        """Return its name in the file of the runs."""
        return f"{self.row} | {self.column}"


def main() -> None:
    """Write the page and draw its pictures."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/performance.md.")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="result files of repeats of the same command")
    if files := parser.parse_args().runs:
        reports = [Report.load(file) for file in files]
        if len({report.stem for report in reports}) > 1:
            parser.error(f"--runs are repeats of one command, got {', '.join(report.stem for report in reports)}")
        keep_runs(pages.RESULTS / f"{reports[0].stem}_runs.json", [kept(report) for report in reports])
    for stem in dict.fromkeys(stem for stem, _ in PICTURES):
        report = loaded(stem)
        if report is not None:
            drawn = save(report, pages.IMAGES)
            for stale in set(pages.IMAGES.glob(f"{stem}_*.png")) - set(drawn):
                stale.unlink()
            sys.stdout.write("".join(f"{file}\n" for file in drawn))
    pages.rewrite("performance.md", BLOCKS)


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


def cells(what: str) -> Iterator[Cell]:
    """Yield the values of a benchmark's table of runs."""
    if what == "ops":
        for name, aims in OPERATORS.items():
            sizes, shown = SIZES.get(name, {}), SCANS.get(name, name)
            for place, which in enumerate(("forward", "forward_backward")):
                for tokens in LENGTHS:
                    found = partial(_value, name, tokens, which, "times_faster", **sizes)
                    least = aims[tokens][place] if tokens in aims else None
                    yield Cell(f"{shown}, {PASSES[which]}", f"T = {tokens:,}", found, least)
        for tokens in (4096, 16384):
            found = partial(_over, "linear", "linear-attention-transformer", tokens, "forward_backward")
            yield Cell("linear, forward + backward, / linear-attention-transformer", f"T = {tokens:,}", found, 1)
        for name, leasts in THEIRS.items():
            for which, least in zip(("forward", "forward_backward"), leasts, strict=True):
                for tokens in LENGTHS:
                    found = partial(_over, name, f"transformers, {name}", tokens, which)
                    aim = least if tokens == 16384 else None
                    yield Cell(f"{SCANS[name]}, {PASSES[which]}, / transformers", f"T = {tokens:,}", found, aim)
        for name in (*OPERATORS, "window"):
            for tokens in LENGTHS:
                yield Cell(
                    f"{SCANS.get(name, name)}, in + out / peak memory",
                    f"T = {tokens:,}",
                    partial(_lean, name, tokens),
                    LEAN,
                )
        named = SCANS | {f"transformers, {name}": f"{SCANS[name]}, transformers" for name in THEIRS}
        for name, shown in named.items():
            for tokens in LENGTHS:
                found = partial(_value, name, tokens, "forward_backward", "peak_bytes")
                yield Cell(f"{shown}, peak memory", f"T = {tokens:,}", found, shown=size)
    elif what == "layers":
        from benchmarks.config import LayersConfig

        for name in LayersConfig().mechanisms:
            for which in ("forward", "forward_backward"):
                for tokens in LENGTHS:
                    found, least = partial(_value, name, tokens, which, "times_faster"), 1.0 if tokens == 4096 else None
                    yield Cell(f"{name}, {PASSES[which]}", f"T = {tokens:,}", found, least)
        for name in ("full", *LayersConfig().mechanisms):
            for tokens in LENGTHS:
                found = partial(_value, name, tokens, "forward_backward", "peak_bytes")
                yield Cell(f"{name}, peak memory", f"T = {tokens:,}", found, shown=size)
    elif what == "model":
        for name in ("full", "llp", "window", "linear", "latte", "elita"):
            for which in ("step", "prefill"):
                for tokens, least in MODELS.items():
                    found = partial(_value, name, tokens, which, "over_transformers")
                    yield Cell(f"{name}, {PASSES[which]}", f"T = {tokens:,}", found, None if name == "full" else least)
    else:
        for name, least in STEPS.items():
            for tokens in (64, 4096, 32768):
                found = partial(_value, name, tokens, "token", "over_transformers", form="recorded")
                yield Cell(name, f"after {tokens:,}", found, least if tokens == 64 else None)
            found = partial(_value, name, 64, "token", "over_transformers", form="compiled")
            yield Cell(name, "compiled, after 64", found, COMPILED if least else None)
            yield Cell(name, "after 32,768 / after 64", partial(_flat, name), FLAT)
            yield Cell(name, "/ by hand, after 64", partial(_by_hand, name), BY_HAND)
        for tokens in (64, 4096, 32768):
            found = partial(_value, "qwen3_5", tokens, "token", "over_transformers", form="recorded")
            yield Cell("imported Qwen3.5, / transformers' own", f"after {tokens:,}", found, QWEN)


def kept(report: Report) -> dict[str, Any]:
    """Return what a table of runs keeps of one: date, commit, machine, command and the values by `Cell.key`."""
    made = {name: report.provenance[name] for name in ("date", "commit")}
    found = {cell.key: cell.found(report) for cell in cells(report.what)}
    return {**made, "machine": described(report.provenance["machine"]), "command": report.command, "found": found}


def keep_runs(file: Path, made: list[dict[str, Any]]) -> None:
    """Write runs to `file`, in place of those of the same machine, before those of others."""
    there = pages.read(file) if file.is_file() else []
    pages.keep(file, [*made, *(run for run in there if run["machine"] != made[0]["machine"])])


def runs(what: str) -> str:
    """Return a table for each machine: the values of its runs, each aim met or missed by their median."""
    file = pages.RESULTS / f"cpu_{what}_runs.json"
    if not file.is_file():
        return _waiting(f"cpu_{what}")
    machines: dict[str, list[dict[str, Any]]] = {}
    for run in pages.read(file):
        machines.setdefault(run["machine"], []).append(run)
    return "\n\n".join(runs_of(what, made) for made in machines.values())


def runs_of(what: str, made: list[dict[str, Any]]) -> str:
    """Return the table of one machine's runs, and what they were."""
    judged = list[bool]()
    grid: dict[str, dict[str, str]] = {}
    for cell in cells(what):
        if not any(cell.key in run["found"] for run in made):
            continue  # a mechanism that is younger than the runs
        values = [value for run in made if (value := run["found"].get(cell.key)) is not None]
        shown = [cell.shown(value) for value in values]
        text = ", ".join(shown if len(set(shown)) > 1 else shown[:1]) or "-"
        if cell.least is not None and values:
            judged.append(median(values) >= cell.least)
            text += f" ({cell.least:.3g}: {'met' if judged[-1] else '**missed**'})"
        grid.setdefault(cell.row, {})[cell.column] = text
    columns = list(dict.fromkeys(column for row in grid.values() for column in row))
    table = pages.table(["", *columns], [[name, *(row.get(c, "") for c in columns)] for name, row in grid.items()])
    origins = "; ".join(dict.fromkeys(f"{run['date']}, commit {run['commit']}, {run['machine']}" for run in made))
    how = f"By the median of {len(made)} runs" if len(made) > 1 else "In one run"
    verdict = f"{how} {sum(judged)} of {len(judged)} aims, in brackets, are met."
    return f"{table}\n\n{verdict} `{made[-1]['command']}`: {origins}."


def gpu_aims() -> str:
    """Return the table of GPU aims, forward + backward: met, missed (with the reason) or not measured."""
    if not list(pages.RESULTS.glob("gpu_*.json")):
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
    """Return links to the pictures that `main` has drawn."""
    if loaded(stem) is None:
        return _waiting(stem)
    files = [(name, file.name) for name in names for file in sorted(pages.IMAGES.glob(f"{stem}_{name}*.png"))]
    return "\n\n".join(f"![{PICTURES[stem, name]}](images/{file})" for name, file in files)


def _waiting(stem: str) -> str:
    return f"Not measured yet: `{COMMANDS.get(stem, 'make gpu')}`."


def _row(report: Report | None, name: str, tokens: int, which: str, **more: Any) -> dict[str, Any] | None:
    """Return the first measured row with these values."""
    for row in report.rows if report is not None else ():
        wanted = {"name": name, "tokens": tokens, "pass": which, "status": "ok", **more}
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    return None


def _value(name: str, tokens: int, which: str, key: str, report: Report, **more: Any) -> Found:
    row = _row(report, name, tokens, which, **more)
    return None if row is None else row.get(key)


def _quotient(one: dict[str, Any] | None, other: dict[str, Any] | None) -> Found:
    """Return how many times faster `one` is than `other`."""
    return None if one is None or other is None else other["median_s"] / one["median_s"]


def _lean(name: str, tokens: int, report: Report) -> Found:
    row = _row(report, name, tokens, "forward_backward", **SIZES.get(name, {}))
    return None if row is None or not row["peak_bytes"] else row["io_bytes"] / row["peak_bytes"]


def _over(ours: str, theirs: str, tokens: int, which: str, report: Report | None) -> Found:
    return _quotient(_row(report, ours, tokens, which), _row(report, theirs, tokens, which))


def _flat(name: str, report: Report) -> Found:
    short, long = (_row(report, name, tokens, "token", form="recorded") for tokens in (64, 32768))
    return _quotient(long, short)


def _by_hand(name: str, report: Report) -> Found:
    ours, floor = _row(report, name, 64, "token", form="recorded"), _row(report, f"by hand: {name}", 64, "token")
    return _quotient(ours, floor)


def _faster(stem: str, ours: str, theirs: str, which: str = "forward_backward") -> Found:
    """Return how many times faster `ours` is than `theirs` on a GPU at 16,384 tokens."""
    return _over(ours, theirs, 16384, which, loaded(f"gpu_{stem}"))


def _of_copy(name: str) -> Found:
    """Return the bytes per second over those of a copy in the same run."""
    report = loaded("gpu_ops")
    row = _row(report, name, 16384, "forward_backward")
    if report is None or row is None or "copy_bytes_per_s" not in report.ceilings:
        return None
    return row["bytes_per_s"] / report.ceilings["copy_bytes_per_s"]


def _right() -> Found:
    """Return the share of the kernels' checks that were right."""
    file = pages.RESULTS / "gpu_checks.json"
    rows = pages.read(file).get("rows") if file.is_file() else None
    return sum(row["status"] == "ok" for row in rows) / len(rows) if rows else None


class Aim(NamedTuple):
    """A ratio to reach."""

    text: str
    at: str
    least: float
    """The smallest ratio that meets the aim."""
    found: Found


def _gpu_aims() -> Iterator[Aim]:
    at = "T = 16,384"
    yield Aim("kernels' checks that are right: all", "every dtype", 1, _right())
    yield Aim("latte over the `chunk_gla` route: 2", at, 2, _faster("fla", "latte", "fla, chunk_gla"))
    yield Aim("latte over flash SDPA: 10", at, 10, _faster("ops", "latte", "sdpa"))
    yield Aim("llp over FlexAttention with its mask: 1.2", at, 1.2, _faster("flex", "llp", "flex, llp"))
    yield Aim("llp over flash SDPA: 15", at, 15, _faster("ops", "llp", "sdpa"))
    for name, theirs in (("linear", "chunk_linear_attn"), ("elita", "chunk_simple_gla")):
        yield Aim(f"{name} over `{theirs}`: 1.2", at, 1.2, _faster("fla", name, f"fla, {theirs}"))
        yield Aim(f"{name}'s bytes a second over a copy's: 0.6", at, 0.6, _of_copy(name))
    for name, theirs in GPU_SCANS.items():
        library = "mamba-ssm" if name == "mamba2" else "fla"
        found = _faster("scans", name, f"{library}, {name}")
        yield Aim(f"{SCANS[name]} within 1.3 times of `{theirs}`: 0.77", at, 1 / 1.3, found)
    for name in ("llp", "latte", "linear", "elita"):
        text = f"training a decoder of {name} over flash SDPA: 2"
        yield Aim(text, "4 x 16,384", 2, _faster("model", name, "sdpa", "step"))


BLOCKS: dict[str, Callable[[], str]] = {
    "cpu-ops-pictures": partial(pictures, "cpu_ops", "time", "memory"),
    "cpu-latents": partial(pictures, "cpu_ops", "latents"),
    "cpu-model-pictures": partial(pictures, "cpu_model", "time", "memory"),
    "cpu-decode-pictures": partial(pictures, "cpu_decode", "time", "state"),
    "five-mechanisms": five_mechanisms,
    "gpu-aims": gpu_aims,
}
for _what in ("ops", "layers", "model", "decode"):
    BLOCKS[f"cpu-{_what}-runs"] = partial(runs, _what)
for _stem in (*COMMANDS, *(f"gpu_{what}" for what in ("ops", "flex", "fla", "scans", "model", "decode"))):
    BLOCKS[_stem.replace("_", "-")] = partial(tables, _stem)

if __name__ == "__main__":
    main()
