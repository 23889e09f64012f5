"""An experiment's result: `result.json`, and the tables in its README.md."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.catalogue import told as told_of_data
from experiments.harness.claims import Expected, Verdict, by_size, verdicts
from experiments.harness.noise import Row, number, select
from experiments.harness.recipe import SCALES, Recipe
from experiments.harness.runner import Finished
from experiments.harness.source import library_hash
from experiments.harness.units import Unit
from experiments.harness.weight import weigh
from subquad.config import digest
from subquad.disk import write_atomically
from subquad.parsing import check_keys, read_json

FILE, PLOT, README = "result.json", "plot.png", "README.md"
BEGIN, END = "<!-- begin: written by python -m experiments -->", "<!-- end -->"
COLUMNS, OPEN = 10, 24
"""Columns of a table, and lines of one that is not folded."""
CHOSEN = ("position_scale", "position_scale_tried", "lr", "lr_tried")
"""Columns of what an arm chose, which tables show beside those of the recipe."""
STALE = "**Measured with an earlier version of the library, and perhaps of the recipe**"
_KINDS = {
    **dict.fromkeys(("units", "done", "processes"), int),
    **dict.fromkeys(("dates", "commits", "machines", "rows"), list),
    "identity": str,
    "versions": dict,
}


def identity_of(units: Iterable[Unit]) -> str:
    """Return a hash that changes if any unit of a scale changes."""
    return digest(sorted([unit.arm, unit.seed, unit.identity] for unit in units))


def collected(
    units: Sequence[Unit], finished: Sequence[Finished], processes: int, searched: float = 0.0
) -> dict[str, Any]:
    """Return the result of one scale: the rows of its units and their provenance.

    `searched` is the core-seconds of the searches before them.
    """
    good = sorted(((units.index(unit), found) for unit, found in finished if "rows" in found), key=lambda item: item[0])
    sources = [found["provenance"] for _, found in good]
    libraries = Counter(found.get("library", "unknown") for _, found in good)
    machines = list({json.dumps(source["machine"]): source["machine"] for source in sources}.values())
    return {
        "identity": identity_of(units),
        "units": len(units),
        "done": len(good),
        "processes": processes,
        "core_seconds": round(searched + sum(found.get("core_seconds") or found["seconds"] for _, found in good), 1),
        "libraries": dict(sorted(libraries.items())),
        "dates": sorted({source["date"] for source in sources}),
        "commits": sorted({source["commit"] for source in sources}),
        "machines": machines,
        "versions": sources[-1]["versions"] if sources else {},
        "rows": [
            _rounded({"arm": units[place].arm, "seed": units[place].seed, **units[place].labels, **row})
            for place, found in good
            for row in found["rows"]
        ],
    }


def _rounded(value: Any) -> Any:
    """Round numbers to six digits, since more would be noise in the diff of a result."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def read_result(folder: Path) -> dict[str, Any]:
    """Return the scales in `result.json`, or {} without that file. Raises `ValueError` with the name of a bad file."""
    file = folder / FILE
    if not file.is_file():
        return {}
    values = read_json(file)
    check_keys(values, {"scales": dict}, str(file))
    for scale in values["scales"].values():
        check_keys(scale, _KINDS, str(file))
        for row in scale["rows"]:
            check_keys(row, {"arm": str, "seed": int}, f"{file}, a row")
        if not all(isinstance(word, str) for word in [*scale["dates"], *scale["commits"]]):
            raise ValueError(f"{file} is damaged: dates and commits must be strings")
        if not all(isinstance(machine, dict) for machine in scale["machines"]):
            raise ValueError(f"{file} is damaged: each machine must be a mapping")
    return dict(values["scales"])


def write_result(folder: Path, scale: str, values: dict[str, Any]) -> None:
    """Write one scale into `result.json` and keep the others; a partial result never replaces a complete one."""
    before = read_result(folder).get(scale)
    if before is not None and before["done"] == before["units"] and values["done"] < values["units"]:
        return
    scales = {**read_result(folder), scale: values}
    shown = {"experiment": folder.name, "scales": {name: scales[name] for name in SCALES if name in scales}}
    lines = json.dumps(shown, indent=1, ensure_ascii=False)
    write_atomically(folder / FILE, (_flat(lines) + "\n").encode())


def _flat(text: str) -> str:
    """Put each innermost object on one line: indented fully, hundreds of rows are unreadable."""
    return re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"\s*\n\s*", " ", found[0]), text)


def telling(scales: dict[str, Any]) -> str | None:
    """Return the scale to show: the largest complete one, else the largest with rows, else None."""
    return next(iter(by_size(scales)), None)


def cells(recipe: Recipe, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headers and lines of the result's table: mean ± standard deviation over rows with equal labels."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    table = [*recipe.table, *(name for name in CHOSEN if name not in recipe.table and any(name in row for row in rows))]
    for row in select(rows, recipe.where):
        groups.setdefault(tuple(row.get(name) for name in recipe.group), []).append(row)
    lines = []
    for key, same in groups.items():
        values = [_cell([row[name] for row in same if row.get(name) is not None]) for name in table]
        lines.append([*(_label(part) for part in key), *values, str(len({row["seed"] for row in same}))])
    return [*recipe.group, *table, "seeds"], lines


def _label(value: Any) -> str:
    return (
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str("" if value is None else value)
    )


def _cell(values: Sequence[Any]) -> str:
    if not values:
        return ""
    if any(isinstance(value, str | bool) for value in values):
        return ", ".join(sorted({str(value) for value in values}))
    if all(value == values[0] for value in values):
        return f"{values[0]:,}" if isinstance(values[0], int) else number(values[0])
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{number(statistics.mean(values))}{spread}"


def written(folder: Path, recipe: Recipe, expected: Expected) -> str:
    """Return the text between the marks of README.md: claims and verdicts, plot, tables, machine."""
    scales = read_result(folder)
    scale = telling(scales)
    rows = scales[scale]["rows"] if scale else []
    lines = ["| claim | theirs | ours | verdict |", "|:---|:---|:---|:---|"]
    found = verdicts(folder, expected, scales)
    lines += [verdict_line(verdict, scale) for verdict in found]
    parts = [told_of_data(recipe), "\n".join(lines)]
    if scale is None:
        return "\n\n".join([*parts, "Only scale `smoke` has been run so far."])
    weight, reason = weigh(found, rows)
    parts.insert(1, f"Weight: **{weight}** ({reason}).")
    parts += [mark] if (mark := stale(scales[scale])) else []
    try:
        headers, table = cells(recipe, rows)
        measured_on = about(scales[scale], scale)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{folder / FILE} has rows that do not fit the table: {error!r}") from error
    if (folder / PLOT).is_file():
        parts.append(f"![{expected.caption or 'the result'}]({PLOT})")
    if recipe.table:
        parts += _tables(headers, table, len(recipe.group))
    return "\n\n".join([*parts, measured_on])


def _tables(headers: Sequence[str], lines: Sequence[Sequence[str]], labels: int) -> list[str]:
    """Return the lines as tables of at most `COLUMNS` columns that repeat the first `labels` ones; fold long ones."""
    places, width = range(labels, len(headers)), COLUMNS - labels
    rules = [":---"] * labels + ["---:"] * len(places)
    count = -(-len(places) // width)
    parts = [[*range(labels), *places[len(places) * i // count : len(places) * (i + 1) // count]] for i in range(count)]
    tables = ["\n".join(line(*(row[i] for i in part)) for row in (headers, rules, *lines)) for part in parts]
    if len(lines) <= OPEN:
        return tables
    return [f"<details><summary>The table, {len(lines)} lines</summary>", *tables, "</details>"]


def stale(values: dict[str, Any]) -> str:
    """Return which units of a scale were measured with another version of the library, or an empty text."""
    old = values["done"] - values.get("libraries", {}).get(library_hash(), 0)
    return f"{STALE}: {old} of {values['done']} units." if old else ""


def core_seconds(values: dict[str, Any]) -> float:
    """Return the seconds of all units times their threads; older results give seconds and processes."""
    if "core_seconds" in values:
        return float(values["core_seconds"])
    cores = max((machine.get("cores", 1) for machine in values["machines"]), default=1)
    return float(values["seconds"] * max(1, cores // values["processes"]))


def verdict_line(verdict: Verdict, scale: str | None) -> str:
    """Return a claim as a line of a table, with its scale if that differs from `scale`."""
    return line(told(verdict), verdict.claim.theirs, ours(verdict, scale), verdict.verdict)


def told(verdict: Verdict) -> str:
    """Return the claim, marked if it is ours."""
    return f"{verdict.claim.says} (ours)" if verdict.claim.ours else verdict.claim.says


def ours(verdict: Verdict, scale: str | None) -> str:
    """Return our figures for a claim, with their scale if it differs from `scale`."""
    return f"{verdict.ours} (scale {verdict.scale})" if verdict.scale not in ("", scale) else verdict.ours


def line(*cells: str) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def about(values: dict[str, Any], scale: str) -> str:
    """Return the machine, versions, times and commits of a scale's rows as a sentence."""
    versions = values["versions"]
    where = " and ".join(dict.fromkeys(_named(machine) for machine in values["machines"]))
    torch = versions.get("torch", "?")
    dates = " to ".join(dict.fromkeys((values["dates"][0], values["dates"][-1])))
    missing = "" if values["done"] == values["units"] else f" ({values['done']} of {values['units']} units)"
    return (
        f"Scale `{scale}`{missing}: {where}; torch {torch}; {core_seconds(values) / 60:,.0f} core-minutes in "
        f"{values['processes']} process{'es' if values['processes'] > 1 else ''}; {dates}; "
        f"commit {', '.join(values['commits'])}."
    )


def _named(machine: dict[str, Any]) -> str:
    return machine.get("gpu") or f"{machine.get('cpu', 'a CPU')}, {machine.get('cores', '?')} cores"


def rewrite_readme(folder: Path, text: str) -> None:
    """Put `text` between the marks of README.md. Raises `ValueError` if the marks are missing."""
    file = folder / README
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    if before.count(BEGIN) != 1 or before.count(END) != 1 or before.index(END) < before.index(BEGIN):
        raise ValueError(f"{file} needs one line {BEGIN!r} and one line {END!r}: the result goes between them")
    head, rest = before.split(BEGIN)
    tail = rest.split(END)[1]
    write_atomically(file, f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}".encode())
