"""Reports of benchmarks: rows with settings, machine and versions, as text tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from subquad.parsing import check_keys, read_json

What = Literal["ops", "layers", "model", "decode", "precision", "precision_speed"]
Row = dict[str, Any]


def described(machine: Mapping[str, Any]) -> str:
    """Describe the machine of a provenance record in a few words."""
    return machine.get("gpu") or f"{machine.get('cpu', 'a CPU')}, PyTorch threads: {machine.get('threads', '?')}"


class Grid(NamedTuple):
    """A text table with the first column left-aligned and the others right-aligned."""

    title: str
    headers: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rules = [":---", *("---:" for _ in self.headers[1:])]
        rows = [f"| {' | '.join(line)} |" for line in (self.headers, rules, *self.lines)]
        return "\n".join([f"*{self.title}*", "", *rows])


@dataclass(frozen=True)
class Report:
    """Result of one run of a benchmark, such as `measure_ops`."""

    what: What
    settings: dict[str, Any]
    rows: list[Row]
    provenance: dict[str, Any] = field(default_factory=dict)
    """Date, machine, versions, commit."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Bytes/s of a copy and FLOP/s of a matrix product in the same run."""
    peers: list[dict[str, str]] = field(default_factory=list)
    """Requested other libraries, with the command that installs missing ones."""
    command: str = ""

    @property
    def stem(self) -> str:
        """Return the files' name without suffix, such as `cpu_ops` or `gpu_decode`."""
        return f"{'gpu' if self.settings['device'].startswith('cuda') else 'cpu'}_{self.what}"

    @property
    def failures(self) -> list[Row]:
        """Return the rows of this library that failed for another reason than lack of memory or time."""
        return [row for row in self.rows if row["status"] == "failed" and row["kind"] != "peer"]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Make a report from the values of `to_dict`."""
        return cls(**values)

    @classmethod
    def load(cls, file: str | Path) -> Report:
        """Read the JSON written by `save`. Raises `ValueError` if the file isn't a report."""
        values = read_json(file)
        check_keys(values, {"what": str, "settings": dict, "rows": list}, str(file))
        check_keys(values["settings"], {"device": str}, f"{file}, settings")
        for row in values["rows"]:
            check_keys(row, {"status": str, "kind": str}, f"{file}, rows")
        try:
            return cls.from_dict(values)
        except TypeError as error:
            raise ValueError(f"{file} is not a benchmark report: {error}") from error

    def grids(self) -> list[Grid]:
        """Return the tables."""
        made: dict[str, Callable[[Report], list[Grid]]] = {
            "ops": _ops,
            "layers": _ops,
            "model": _model,
            "decode": _decode,
            "precision": _precision,
            "precision_speed": _precision_speed,
        }
        return made[self.what](self)

    def table(self) -> str:
        """Return the tables and notes in Markdown."""
        return "\n\n".join([*(grid.markdown() for grid in self.grids()), *notes(self)])

    def save(self, folder: str | Path) -> Path:
        """Write JSON into a folder, which is created if missing, and return the file."""
        file = Path(folder) / f"{self.stem}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed, so that an interrupted run leaves the previous file intact.
        aside = file.with_suffix(".json.tmp")
        aside.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return aside.replace(file)


def notes(report: Report) -> list[str]:
    """Return the notes below the tables: the machine's peak rates, missing peers, failures."""
    rates = {"copy_bytes_per_s": ("a copy", "GB/s"), "matmul_flops_per_s": ("a matrix product", "GFLOP/s")}
    found = [(*rates[name], rate / 1e9) for name, rate in report.ceilings.items() if name in rates]
    parts = [f"{what} {rate:,.0f} {unit}" for what, unit, rate in found]
    lines = [f"In the same run: {', '.join(parts)}."] if parts else []
    for peer in report.peers:
        if peer["status"] != "installed":
            lines.append(f"{peer['name']}: {peer['status']}" + (f" ({peer['install']})" if "install" in peer else ""))
    failed = dict.fromkeys(
        (row["label"], row["status"], row["message"]) for row in report.rows if row["status"] != "ok"
    )
    lines += [f"{label}: {status}: {message}" for label, status, message in failed]
    return lines


def setting(report: Report) -> str:
    """Describe the sizes, the dtype and the machine in one line."""
    s, machine = report.settings, report.provenance.get("machine", {})
    sizes = f"batch {s['batch']}" if s.get("batch_tokens") is None else f"{s['batch_tokens']:,} tokens a batch"
    if report.what == "ops":
        sizes += f", {s['heads']} heads of {s['channels']} channels"
    elif report.what == "layers":
        sizes += f", layers of width {s['dim']}, {s['heads']} heads"
    else:
        sizes += f", {s['layers']} layers, width {s['dim']}, {s['heads']} heads"
    return f"{sizes}, {s['dtype']}, {described(machine)}"


TIMES = ("ms", "p20", "p80")


def times(row: Row) -> tuple[str, str, str]:
    """Return the median and the 20th and 80th percentile in ms, or the status if there is no time."""
    if row["status"] != "ok":
        return str(row["status"]), "-", "-"
    return _ms(row["median_s"]), _ms(row["p20_s"]), _ms(row["p80_s"])


def ratio(row: Row, key: str = "times_faster") -> str:
    """Return a ratio, by default the speed relative to the base."""
    value = row.get(key)
    return "-" if value is None else f"{value:.2f}"


def _tokens_per_s(row: Row) -> str:
    return "-" if row.get("tokens_per_s") is None else f"{row['tokens_per_s']:,.0f}"


def size(nbytes: float | None) -> str:
    """Format bytes with a unit."""
    if nbytes is None:
        return "-"
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:,.0f} {units[0]}" if units[0] == "B" or value >= 100 else f"{value:.1f} {units[0]}"


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _rate(row: Row, key: str) -> str:
    value = row.get(key)
    return "-" if value is None else f"{value / 1e9:,.1f}"


def _ops(report: Report) -> list[Grid]:
    headers = ("", "tokens", *TIMES, "times faster", "peak memory", "/ in + out", "GFLOP/s", "GB/s")
    tables = []
    for which in dict.fromkeys(row["pass"] for row in report.rows):
        lines = []
        for row, first in _grouped([row for row in report.rows if row["pass"] == which]):
            peak, io = row.get("peak_bytes"), row.get("io_bytes")
            lines.append(
                (
                    row["label"] if first else "",
                    f"{row['tokens']:,}",
                    *times(row),
                    ratio(row),
                    size(peak),
                    "-" if peak is None or not io else f"{peak / io:.1f}",
                    _rate(row, "flops_per_s"),
                    _rate(row, "bytes_per_s"),
                )
            )
        title = {"forward": "Forward", "backward": "Backward", "forward_backward": "Forward + backward"}[which]
        tables.append(Grid(f"{title}: {setting(report)}", headers, lines))
    return tables


def _model(report: Report) -> list[Grid]:
    headers = ("", "tokens", "batch", *TIMES, "tokens/s", "times sdpa", "times Llama", "peak memory")
    more = ("prefill tokens/s", "times Llama")
    prefill = {(row["name"], row["tokens"]): row for row in report.rows if row["pass"] == "prefill"}
    lines = []
    for row, first in _grouped([row for row in report.rows if row["pass"] == "step"]):
        read = prefill.get((row["name"], row["tokens"]))
        lines.append(
            (
                row["label"] if first else "",
                f"{row['tokens']:,}",
                f"{row['batch']}",
                *times(row),
                _tokens_per_s(row),
                ratio(row),
                ratio(row, "over_transformers"),
                size(row.get("peak_bytes")),
                *(("-", "-") if read is None else (_tokens_per_s(read), ratio(read, "over_transformers"))),
            )
        )
    return [Grid(f"A training step and prefill: {setting(report)}", headers + more, lines)]


def _decode(report: Report) -> list[Grid]:
    headers = (
        "",
        "context",
        *TIMES,
        "tokens/s",
        "times transformers",
        "/ shortest",
        "events",
        "state",
        "prefill tokens/s",
    )
    lines = []
    for row, first in _grouped(report.rows):
        speed = row.get("prefill_tokens_per_s")
        lines.append(
            (
                row["label"] if first else "",
                f"{row['tokens']:,}",
                *times(row),
                _tokens_per_s(row),
                ratio(row, "over_transformers"),
                ratio(row, "of_shortest"),
                f"{row['events']:,}" if row.get("events") else "-",
                size(row.get("state_bytes")),
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
    return [Grid(f"One decoded token: {setting(report)}", headers, lines)]


def _precision(report: Report) -> list[Grid]:
    s, lengths = report.settings, sorted(report.settings["contexts"])
    sizes = f"{s['layers']} layers, width {s['dim']}, {s['heads']} heads, {s['steps']} training steps"
    titles = {"state": "State stored in fewer bits", "weights": "Weights in fewer bits"}
    headers = ("KL in nats after", "stored as", *(f"{n:,}" for n in lengths), "max error", "median", "bits/byte added")
    grids = []
    for part, title in titles.items():
        rows = [row for row in report.rows if row.get("part") == part]
        lines, last = [], ""
        for name, stored in dict.fromkeys((row["name"], row["stored"]) for row in rows):
            found = {row["tokens"]: row for row in rows if (row["name"], row["stored"]) == (name, stored)}
            end = found[lengths[-1]]
            added = f"{end['bits_per_byte'] - end['bits_per_byte_float32']:+.4f}"
            errors = (short(found[n]["kl"]) for n in lengths)
            ends = (short(end["max_relative"]), short(end["median_relative"]), added)
            lines.append((name if name != last else "", stored, *errors, *ends))
            last = name
        grids.append(Grid(f"{title}: {sizes}, {described(report.provenance.get('machine', {}))}", headers, lines))
    return grids


def short(value: float) -> str:
    """Format an error with one digit; rounding below zero is zero."""
    return f"{max(0.0, value):.0e}".replace("e-0", "e-")


def _precision_speed(report: Report) -> list[Grid]:
    headers = ("", "stored as", *TIMES, "tokens/s", "times float32", "weights")
    lines = []
    for row, first in _grouped(report.rows):
        faster, held = ratio(row, "times_float32"), size(row.get("weight_bytes"))
        lines.append((row["label"] if first else "", row["stored"], *times(row), _tokens_per_s(row), faster, held))
    machine = described(report.provenance.get("machine", {}))
    return [Grid(f"One decoded token: batch {report.settings['batch']}, {machine}", headers, lines)]


def _grouped(rows: Sequence[Row]) -> Iterable[tuple[Row, bool]]:
    """Yield rows grouped by label in order of first appearance, and whether each is the first of its label."""
    for label in dict.fromkeys(row["label"] for row in rows):
        for n, row in enumerate(row for row in rows if row["label"] == label):
            yield row, n == 0
