"""`python -m experiments`: run an experiment, compare it with its paper, and write the result, page and plot."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.padding import Padding
from rich.text import Text

from experiments.harness import catalogue, result
from experiments.harness.claims import judged, read_expected
from experiments.harness.data import check_data, compared, is_little
from experiments.harness.fetch import fetch
from experiments.harness.findings import findings
from experiments.harness.plots import draw
from experiments.harness.rates import searches_of
from experiments.harness.recipe import FILE, SCALES, Recipe, read_recipe
from experiments.harness.runner import Runner, default_processes
from experiments.harness.train import budget_steps, train_config
from experiments.harness.units import Unit, units_of
from subquad.cli import guarded
from subquad.cli.arguments import Parser, check_output
from subquad.cli.rich_table import console
from subquad.cli.tables import print_table
from subquad.config import suggest
from subquad.training.tasks import check

NAME = "python -m experiments"
HOME = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    return guarded(run, sys.argv[1:] if arguments is None else arguments)


def run(arguments: Sequence[str]) -> int:
    """Do what `arguments` ask for; return 1 if a unit failed, else 0."""
    parser = make_parser()
    chosen = parser.parse_args(arguments)
    with parser.checking():
        root = HOME if chosen.folder is None else Path(chosen.folder)
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {root}")
        names = _names(root, chosen)
        data = _data(chosen.data)
        check_output("findings", chosen.findings)
        check_output("data_page", chosen.data_page)
        for name in chosen.fetch:
            fetch(name, _tell)
    if chosen.fetch:
        return 0
    for file, text in ((chosen.findings, lambda: _findings(root)), (chosen.data_page, catalogue.page)):
        if file:
            Path(file).write_text(text(), encoding="utf-8")
            sys.stdout.write(f"wrote {file}\n")
            return 0
    if not names:
        _list(root, chosen.stale)
        return 0
    with parser.checking():
        planned = [_planned(root / name, chosen, data) for name in names]
    begin = time.perf_counter()
    failed = 0
    if chosen.report:
        for plan in planned:
            _compare(plan, plan.folder, result.telling(result.read_result(plan.folder)))
    else:
        failed = _run_all(planned, chosen.scale)
    if len(planned) > 1:
        sys.stdout.write(f"{len(planned)} experiments, {time.perf_counter() - begin:.0f} s\n")
    return 1 if failed else 0


def make_parser() -> Parser:
    """Return the parser of the command's options."""
    description = (
        "Run an experiment from the folder experiments/, compare its figures with its paper's, and update its "
        "result.json, plot.png and the tables in its README.md. Scale smoke starts afresh in the work folder and "
        "changes none of these files. After an interruption, the same command continues. Without NAME, list the "
        "experiments."
    )
    parser = Parser(description=description, prog=NAME, usage=f"{NAME} [NAME] [options]")
    add = parser.add_argument
    add("name", nargs="?", type=str | None, default=None, help="The experiment (a folder's name).")
    parser.add_argument("--all", action="store_true", help="Run every experiment that has the scale.")
    add("--scale", type=str, default="cpu", help="smoke (seconds, no data), cpu, gpu or paper (the paper's setting).")
    data = "Paths of data sets, as NAME=PATH or NAME/PART=PATH; hf:... names one on the Hugging Face hub."
    add("--data", nargs="+", type=str, default=[], help=data)
    add("--folder", type=str | None, default=None, help="Folder of the experiments (default: this package).")
    add("--work", type=str, default="runs/reproduce", help="Folder of the runs, which a later command continues.")
    add(
        "--processes",
        type=int | None,
        default=None,
        help="Units to run at once (default: one per core); timed ones run alone.",
    )
    add("--threads", type=int | None, default=None, help="Threads per unit (default: cores / processes; smoke: 1).")
    parser.add_argument("--report", action="store_true", help="Run nothing: rewrite page and plot from result.json.")
    parser.add_argument("--stale", action="store_true", help="List the results measured with an earlier library.")
    add("--findings", type=str | None, default=None, help="Run nothing: write the page of all results to this file.")
    fetched = ", ".join(name for name, one in catalogue.DATA.items() if one.fetched)
    add(
        "--fetch",
        nargs="+",
        type=str,
        default=[],
        help=f"Run nothing: fetch these data sets and check them: {fetched}.",
    )
    add("--data_page", type=str | None, default=None, help="Run nothing: write the page of the data to this file.")
    return parser


def experiments(root: Path) -> list[str]:
    """Return the names of the experiments in `root`, sorted."""
    return sorted(path.parent.name for path in root.glob(f"*/{FILE}"))


def _names(root: Path, chosen: Any) -> list[str]:
    """Return the names of the chosen experiments. Raises `ValueError` for arguments that exclude each other."""
    if chosen.scale not in SCALES:
        raise ValueError(f"unknown scale {chosen.scale!r}; {suggest(chosen.scale, SCALES)}")
    asked = [
        flag
        for flag, given in (
            ("NAME", chosen.name),
            ("--all", chosen.all),
            ("--stale", chosen.stale),
            ("--findings", chosen.findings),
            ("--fetch", chosen.fetch),
            ("--data_page", chosen.data_page),
        )
        if given
    ]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} exclude each other; give one")
    for name in ("processes", "threads"):
        if chosen[name] is not None and chosen[name] < 1:
            raise ValueError(f"--{name} must be at least 1, got {chosen[name]}")
    known = experiments(root)
    if chosen.all:
        recipes = {name: read_recipe(root / name) for name in known}
        found = [name for name in known if chosen.scale in recipes[name].scales]
        return sorted(found, key=lambda name: recipes[name].reads is not None)
    if chosen.name is None:
        return []
    if chosen.name not in known:
        raise ValueError(f"unknown experiment {chosen.name!r}; {suggest(chosen.name, known)}")
    return [chosen.name]


def _findings(root: Path) -> str:
    return findings(root, [root / name for name in experiments(root)])


def _data(given: Sequence[str]) -> dict[str, str]:
    data = {}
    for text in given:
        name, sign, path = text.partition("=")
        if not (sign and path):
            raise ValueError(f"--data takes NAME=PATH, got {text!r}")
        data[name] = path
    check_data(data)
    return data


class Plan(NamedTuple):
    """An experiment at one scale; `smoke` is the folder for results of the smoke scale."""

    folder: Path
    recipe: Recipe
    units: list[Unit]
    processes: int
    smoke: Path
    data: list[str]
    """What there is to say about the data that it reads."""


def _planned(folder: Path, chosen: Any, data: dict[str, str]) -> Plan:
    """Plan the experiment in `folder` at the chosen scale; errors name it."""
    try:
        return _plan(folder, chosen, data)
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise type(error)(f"{folder.name}: {error}") from error


def _plan(folder: Path, chosen: Any, data: dict[str, str]) -> Plan:
    recipe, work = read_recipe(folder), Path(chosen.work).absolute()
    smoke = work / folder.name / "smoke"
    recipe.scale(chosen.scale)
    read_expected(folder)
    if chosen.report:
        return Plan(folder, recipe, [], 1, smoke, [])
    processes = chosen.processes or default_processes(recipe.alone, chosen.scale)
    cores = 1 if chosen.scale == "smoke" else os.cpu_count() or 1
    threads, timed = (chosen.threads or max(1, cores // sharing) for sharing in (processes, 1))
    units = units_of(folder, recipe, chosen.scale, work=work, data=data, threads=threads, timed_threads=timed)
    if recipe.kind == "train":
        _check(units)
    return Plan(folder, recipe, units, processes, smoke, compared(catalogue.asked(recipe, chosen.scale), data))


def _check(units: Sequence[Unit]) -> None:
    """Raise `ValueError` or `TypeError` with the unit's name if its settings are not a valid training run."""
    for unit in units:
        try:
            check(train_config(unit))
            budget_steps(unit)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{unit.name}: {error}") from error
        data = unit.settings.get("data", {})
        if data.get("held_out_path") == data.get("path") is not None and not is_little(data["path"]):
            raise ValueError(
                f"{unit.name}: data.held_out_path equals data.path, {data['path']!r}: test text in training"
            )


def _run_all(planned: Sequence[Plan], scale: str) -> int:
    """Run the experiments in turn (at scale smoke they share processes); return the number of failed units."""
    if scale != "smoke":
        failed = 0
        for plan in planned:
            with Runner(plan.processes) as runner:
                failed += _reproduce(plan, plan.folder, runner, scale)
        return failed
    with Runner(max(plan.processes for plan in planned)) as runner:
        for plan in planned:
            shutil.rmtree(plan.smoke, ignore_errors=True)  # kept units would hide that today's code fails
            plan.smoke.mkdir(parents=True)
            runner.announce(searches_of(plan.units) or plan.units)
        return sum(_reproduce(plan, plan.smoke, runner, scale) for plan in planned)


def _reproduce(plan: Plan, home: Path, runner: Runner, scale: str) -> int:
    """Run the units, update the result in `home` after each, compare and print; return the number of failed units."""
    finished, failures, searched = [], [], 0.0
    for sentence in plan.data:
        _tell(f"{plan.folder.name}: data {sentence}")
    for unit, found in runner.run(searches_of(plan.units), _tell):
        searched += found.get("core_seconds", 0.0)
        if "failed" in found:
            failures.append(f"{unit.name}: {found['failed']}; see {unit.folder}/failed.txt")
    for unit, found in runner.run(plan.units, _tell):
        finished.append((unit, found))
        if "failed" in found:
            failures.append(f"{unit.name}: {found['failed']}; see {unit.folder}/failed.txt")
            continue
        result.write_result(home, scale, result.collected(plan.units, finished, plan.processes, searched))
    _compare(plan, home, scale)
    for failure in failures:
        _tell(f"failed: {plan.folder.name}, {failure}")
    return len(failures)


def _compare(plan: Plan, home: Path, scale: str | None) -> None:
    """Draw and print the result in `home`; if that is the experiment's own folder, update its README.md."""
    scales = result.read_result(home)
    rows = scales[scale]["rows"] if scale in scales else []
    if rows:
        draw(plan.folder, plan.recipe, rows, home / result.PLOT)
        _print(plan.folder, plan.recipe, rows, scale)
    if home == plan.folder:
        result.rewrite_readme(home, result.written(home, plan.recipe, read_expected(home)))
        sys.stdout.write(f"wrote {result.README} and {result.PLOT} of {result.FILE} in {home}\n")


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _print(folder: Path, recipe: Recipe, rows: list[dict[str, Any]], scale: str | None) -> None:
    """Print the table of `rows` and the verdicts on the claims."""
    expected = read_expected(folder)
    found = [judged(folder, claim, rows, scale or "") for claim in expected.claims]
    headers, lines = result.cells(recipe, rows)
    if recipe.table:
        print_table(f"{folder.name}, scale {scale}: {expected.title}", headers, lines, markdown=False)
    terminal = console(width=120)
    for verdict in found:
        terminal.print(Text(f"{verdict.claim.says}: ").append(verdict.verdict, style="bold"))
        for who, what in (("theirs", verdict.claim.theirs), ("ours", verdict.ours)):
            if what:
                terminal.print(Padding(Text(f"{who}: {what}"), (0, 0, 0, 4), expand=False))
    if scale == "smoke":
        console().print("Scale smoke only shows that everything runs; its figures say nothing about the claims.")


def _list(root: Path, only_stale: bool) -> None:
    """Print the experiments with their scales and available results, or those measured with an earlier library."""
    lines = []
    for name in experiments(root):
        recipe, scales = read_recipe(root / name), result.read_result(root / name)
        old = [scale for scale, values in scales.items() if result.stale(values)]
        if only_stale and not old:
            continue
        sizes = [f"{scale} ({recipe.scales[scale].minutes:g} min)" for scale in SCALES if scale in recipe.scales]
        results = [f"{scale} (stale)" if scale in old else scale for scale in scales]
        lines.append((name, read_expected(root / name).title, ", ".join(sizes), ", ".join(results) or "none"))
    headers = ("name", "title", "scales", "results")
    print_table("experiments", headers, lines, spare=("scales", "results"), text="title")
    sys.stdout.write(f"{NAME} NAME --scale cpu\n")
