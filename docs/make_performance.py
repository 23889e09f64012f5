"""Write the tables of docs/performance.md, the files of tables in benchmarks/results, and the pictures of both.

python docs/make_performance.py    # from benchmarks/results/*.json, which `python -m benchmarks` and `make gpu` write
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import pages

from benchmarks.plots import save
from benchmarks.precision import summary
from benchmarks.report import Report, size

TITLES = {
    "ops": "Operators",
    "layers": "Layers",
    "model": "Training steps and prefill",
    "decode": "Decoding",
    "precision": "Errors of fewer bits",
    "precision_speed": "Decoding with fewer bits",
    "decode_65536": "Decoding after 1,024 and 65,536 tokens, against the step written by hand",
    "flex": "Operators beside FlexAttention",
    "fla": "Operators beside flash-linear-attention",
    "scans": "Gated and delta scans beside flash-linear-attention",
}
DRAWN = ("ops", "model", "decode")
SHOWN = {"time": "Time", "memory": "Peak memory", "state": "Size of the state", "latents": "Time by number of latents"}
LENGTHS = ("1,024", "4,096", "16,384")
LONG = 100_000  # tokens of the table of long texts
CHOSEN = ("elita", "luna", "latte", "linear", "llp", "full")
"""Mechanisms of that table."""
BOTH = ", forward + backward"


def main() -> None:
    """Write the page, the files of tables and the pictures."""
    for stem in (f"{device}_{what}" for device in ("cpu", "gpu") for what in TITLES):
        if (report := loaded(stem)) is not None:
            (pages.RESULTS / f"{stem}.md").write_text(tables(stem, report), encoding="utf-8")
            if stem.partition("_")[2] in DRAWN:
                for stale in set(pages.IMAGES.glob(f"{stem}_*.png")) - set(save(report, pages.IMAGES)):
                    stale.unlink()
    (pages.RESULTS / "five_mechanisms.md").write_text(five_mechanisms(), encoding="utf-8")
    pages.rewrite("performance.md", BLOCKS)
    pages.rewrite("precision.md", PRECISION)


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


def runs(what: str) -> list[dict[str, Any]]:
    """Return the repeats of a benchmark on all machines."""
    file = pages.RESULTS / f"cpu_{what}_runs.json"
    return pages.read(file) if file.is_file() else []


def tables(stem: str, report: Report) -> str:
    """Return a file of tables: the repeats on each machine, the numbers of one report, and its pictures."""
    device, _, what = stem.partition("_")
    parts = list(repeats(what)) if device == "cpu" else []
    made, command = report.provenance, report.command.replace("subquad bench", "python -m benchmarks")  # its old name
    origin = f"`{command}`, {made['date']}, commit {made['commit']}: {pages.versions(made['versions'])}."
    parts += ["## All numbers of one run", report.table(), origin]
    files = sorted(pages.IMAGES.glob(f"{stem}_[a-z]*.png")) if what in DRAWN else []
    parts += [f"![{SHOWN[file.stem.split('_')[2]]} of the rows above](../../docs/images/{file.name})" for file in files]
    return pages.raw(f"{TITLES[what]} on a {device.upper()}", "make_performance.py", *parts)


def repeats(what: str) -> Iterator[str]:
    """Yield a heading, a table and its origin for each machine: a value for each run, in the order of the runs."""
    machines: dict[str, list[dict[str, Any]]] = {}
    for run in runs(what):
        machines.setdefault(run["machine"], []).append(run)
    for machine, made in machines.items():
        grid: dict[str, dict[str, str]] = {}
        for key in dict.fromkeys(key for run in made for key in run["found"]):
            row, column = key.split(" | ")
            found = [run["found"][key] for run in made if run["found"].get(key) is not None]
            shown = [size(value) if row.endswith(", peak memory") else f"{value:.3g}" for value in found]
            grid.setdefault(row, {})[column] = ", ".join(shown if len(set(shown)) > 1 else shown[:1]) or "-"
        columns = list(dict.fromkeys(column for row in grid.values() for column in row))
        yield f"## {f'Each of {len(made)} runs' if len(made) > 1 else 'One run'}: {machine}"
        yield pages.table(["", *columns], [[name, *(row.get(c, "") for c in columns)] for name, row in grid.items()])
        origins = dict.fromkeys(f"{run['date']}, commit {run['commit']}" for run in made)
        yield f"`{made[-1]['command']}`: {'; '.join(origins)}."


def of_runs(what: str, key: str) -> list[float]:
    """Return a value in each run that has it, on all machines."""
    return [run["found"][key] for run in runs(what) if run["found"].get(key) is not None]


def by_length(what: str, row: str, columns: tuple[str, ...] = tuple(f"T = {n}" for n in LENGTHS)) -> list[str]:
    """Return the range of all runs in each column."""
    return [pages.span(of_runs(what, f"{row} | {column}")) for column in columns]


def fastest(what: str) -> list[str]:
    """Return the names of a benchmark whose forward and backward pass was measured, the fastest first."""
    rows = dict.fromkeys(key.partition(" | ")[0] for run in runs(what) for key in run["found"])
    names = [row.removesuffix(BOTH) for row in rows if row.endswith(BOTH)]
    return sorted(names, key=lambda name: -median(of_runs(what, f"{name}{BOTH} | T = 16,384")))


def layers() -> str:
    """Return the speed and the memory of every layer."""
    memory = {
        name: size(of_runs("layers", f"{name}, peak memory | T = 16,384")[0]) for name in ("full", *fastest("layers"))
    }
    lines = [[f"`{name}`", *by_length("layers", f"{name}{BOTH}"), memory[name]] for name in fastest("layers")]
    headers = ["", *(f"{n} tokens" for n in LENGTHS), "memory at 16,384"]
    return pages.table(headers, [["`full`", "1", "1", "1", memory["full"]], *lines])


def operators() -> str:
    """Return the speed of every operator over fused causal attention."""
    lines = ([name, *by_length("ops", f"{name}{BOTH}")] for name in fastest("ops"))
    return pages.table(["", *(f"{n} tokens" for n in LENGTHS)], lines)


def long_texts() -> str:
    """Return the time and memory of a layer for `LONG` tokens, computed from those of shorter texts."""
    rows = pages.result("cpu_layers")["rows"]
    found = {(r["name"], r["tokens"]): r for r in rows if r["pass"] == "forward_backward"}
    lines = []
    for name in CHOSEN:
        near, far = (found[name, tokens] for tokens in (4096, 16384))
        grows = (far["median_s"] / 16384 - near["median_s"] / 4096) / (16384 - 4096) if name == "full" else 0.0
        seconds = LONG * (far["median_s"] / 16384 + grows * (LONG - 16384))
        times = (f"{far['median_s']:.2f} s", f"{seconds:.1f} s")
        lines.append([f"`{name}`", *times, size(far["peak_bytes"] * LONG / 16384)])
    return pages.table(["", "16,384 tokens, measured", f"{LONG:,} tokens, computed", "its memory, computed"], lines)


def models() -> str:
    """Return training and prefill of whole models over those of transformers' Llama."""
    lines = []
    for name in ("elita", "linear", "latte", "llp", "window", "full"):
        rows = (f"{name}, {which}" for which in ("training", "prefill"))
        lines.append([f"`{name}`", *(c for row in rows for c in by_length("model", row, ("T = 2,048", "T = 8,192")))])
    headers = [f"{which}, {n} tokens" for which in ("training", "prefill") for n in ("2,048", "8,192")]
    return pages.table(["", *headers], lines)


def decoding() -> str:
    """Return decoding over that of transformers' Llama, and the state."""
    contexts = ("after 64", "after 4,096", "after 32,768")
    at = {(r["name"], r["form"], r["tokens"]): r for r in pages.result("cpu_decode")["rows"]}
    full = [f"{at['full', 'recorded', n]['over_transformers']:.1f}" for n in (64, 4096, 32768)]
    lines = [["`full`", *full, "-", size(at["full", "recorded", 32768]["state_bytes"])]]
    for name in ("linear", "latte", "gla", "llp", "elita", "window", "mamba2", "kda", "gated_delta_net"):
        cells = by_length("decode", name, (*contexts, "compiled, after 64"))
        lines.append([f"`{name}`", *cells, size(at[name, "recorded", 32768]["state_bytes"])])
    qwen = [*by_length("decode", "imported Qwen3.5, / transformers' own", contexts), "-"]
    qwen.append(size(at["qwen3_5", "recorded", 32768]["state_bytes"]))
    headers = ["", *contexts, "compiled, after 64", "state after 32,768"]
    return pages.table(headers, [*lines, ["Qwen3.5, imported, over transformers' own", *qwen]])


def peers() -> str:
    """Return the speed of operators over other packages' in the same runs."""
    rows = dict.fromkeys(key.partition(" | ")[0] for key in runs("ops")[0]["found"] if ", / " in key)
    lines = [[*row.split(", / "), *by_length("ops", row)] for row in rows]
    return pages.table(["ours", "over", *(f"{n} tokens" for n in LENGTHS)], lines, names=2)


def five_mechanisms() -> str:
    """Return the file on the five stdlib recipes at equal steps, which benchmarks/compare_stdlib.py trained."""
    found = pages.result("five_mechanisms")
    first = found["rows"][0]
    lines = []
    for row in found["rows"]:
        states = [f"{state['bytes']:,} B" + ("" if state["measured"] else " (computed)") for state in row["states"]]
        speeds = [f"{row[f'{kind}_tokens_per_second']:,.0f}" for kind in ("train", "decode")]
        lines.append([f"`{row['name']}`", f"{row['bits_per_byte']:.3f}", *speeds, *states])
    headers = ["", "held-out bits per byte", "training tokens/s", "decoding tokens/s"]
    headers += [f"state after {state['tokens']:,} tokens" for state in first["states"]]
    read = (
        f"Each model has {first['parameters']:,} parameters and read {first['tokens']:,} tokens in {first['steps']:,} "
        f"steps. gzip -9 needs {first['gzip_bits_per_byte']:.3f} and xz -9e {first['xz_bits_per_byte']:.3f} bits per "
        f"byte for the same {first['held_out_bytes']:,} held-out bytes in one piece. The state is that of one sequence "
        "in float32. Each is one run with one seed: differences of about one percent mean nothing."
    )
    made = f"`{found['command']}`, {found['date']}, commit {found['commit']}, {found['hardware']}"
    origin = f"{made}: {pages.versions(found['versions'])}; files {first['files_hash']}."
    return pages.raw("Five mechanisms at equal steps", "make_performance.py", pages.table(headers, lines), read, origin)


PARTS = (long_texts, layers, operators, models, decoding, peers)
BLOCKS: pages.Blocks = {part.__name__.replace("_", "-"): part for part in PARTS}
PRECISION = {"errors": lambda: summary(Report.load(pages.RESULTS / "cpu_precision.json")).markdown()}

if __name__ == "__main__":
    main()
