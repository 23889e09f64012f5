"""What a benchmark found: rows, where and with what, as tables, CSV, JSON and pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from subquad.parsing import check_keys, read_json

What = Literal["ops", "model", "decode"]
Row = dict[str, Any]


class Grid(NamedTuple):
    """A table of text: names left, numbers right."""

    title: str
    headers: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """The table in Markdown."""
        rules = [":---", *("---:" for _ in self.headers[1:])]
        rows = [f"| {' | '.join(line)} |" for line in (self.headers, rules, *self.lines)]
        return "\n".join([f"*{self.title}*", "", *rows])


@dataclass(frozen=True)
class Report:
    """The rows of one run of `measure_ops`, `measure_model` or `measure_decode`."""

    what: What
    settings: dict[str, Any]
    rows: list[Row]
    provenance: dict[str, Any] = field(default_factory=dict)
    """Date, machine, versions, commit."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """What a copy and a matrix product reach in the same run."""
    peers: list[dict[str, str]] = field(default_factory=list)
    """Which other libraries were asked for, and how to install those that are absent."""
    command: str = ""

    @property
    def stem(self) -> str:
        """The files' name: `cpu_ops`, `gpu_decode`."""
        return f"{'gpu' if self.settings['device'].startswith('cuda') else 'cpu'}_{self.what}"

    @property
    def failures(self) -> list[Row]:
        """Rows of ours that failed, and not for want of memory or time."""
        return [row for row in self.rows if row["status"] == "failed" and row["kind"] != "peer"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """What `to_dict` gave."""
        return cls(**values)

    @classmethod
    def load(cls, file: str | Path) -> Report:
        """Read the JSON that `save` wrote."""
        values = read_json(file)
        check_keys(values, {"what": str, "settings": dict, "rows": list}, str(file))
        check_keys(values["settings"], {"device": str}, f"{file}, settings")
        for row in values["rows"]:
            check_keys(row, {"status": str, "kind": str}, f"{file}, rows")
        try:
            return cls.from_dict(values)
        except TypeError as error:
            raise ValueError(f"{file} is no report of a benchmark: {error}") from error

    def grids(self) -> list[Grid]:
        """The tables."""
        from benchmarks.tables import grids

        return grids(self)

    def table(self) -> str:
        """The tables in Markdown, with the peers that are not installed."""
        from benchmarks.tables import notes

        return "\n\n".join([*(grid.markdown() for grid in self.grids()), *notes(self)])

    def save(self, folder: str | Path, *, plots: bool = True) -> list[Path]:
        """Write JSON, CSV and, with `plots`, the pictures into a folder, which is made; returns the files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{self.stem}.json", folder / f"{self.stem}.csv"]
        # Aside first: a run that is stopped leaves the file before whole.
        aside = files[0].with_suffix(".json.tmp")
        aside.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        aside.replace(files[0])
        _write_csv(files[1], self.rows)
        if plots:
            from benchmarks.plots import draw, save

            files += [save(figure, folder / f"{self.stem}_{name}.png") for name, figure in draw(self).items()]
        return files


def _write_csv(file: Path, rows: Sequence[Row]) -> None:
    """A line a row, under every key that any has; what a row has not is empty."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, fieldnames=keys)
        writer.writeheader()
        writer.writerows(rows)
