"""Run units in one or several processes, and keep the rows of each."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Self

import torch

from experiments.harness.noise import Row
from experiments.harness.rates import with_choice
from experiments.harness.source import library_hash
from experiments.harness.train import InterruptedRunError, search_unit, train_unit
from experiments.harness.units import BEGUN, DONE, ON_A_GPU, Unit, function, kept
from subquad.disk import write_atomically
from subquad.evaluation.provenance import provenance

SPENT = "spent.txt"
"""Core-seconds of all starts of a unit, also of interrupted ones (but not of a killed process)."""
logger = logging.getLogger(__name__)
Finished = tuple[Unit, dict[str, Any]]


class Runner:
    """Run units in a pool of `processes` processes; with one, and timed units in any case, in this process."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.pool = _pool(processes)
        self.waiting: dict[str, Future[dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def announce(self, units: Sequence[Unit]) -> None:
        """Queue those of the units that are not done."""
        for unit in units:
            if self.pool is not None and not unit.timed and unit.folder not in self.waiting and kept(unit) is None:
                try:
                    self.waiting[unit.folder] = self.pool.submit(work, unit)
                except BrokenProcessPool:  # a process was killed, and the pool accepts nothing more
                    self.pool = _pool(self.processes)
                    assert self.pool is not None
                    self.waiting[unit.folder] = self.pool.submit(work, unit)

    def run(self, units: Sequence[Unit], told: Callable[[str], None]) -> Iterator[Finished]:
        """Yield each unit with a dictionary that has `rows`, or `failed` with a message; units done before come first.

        `told` receives a line of progress for each unit that ran.
        """
        todo = []
        for unit in units:
            found = None if unit.folder in self.waiting else kept(unit)
            if found is None:
                todo.append(unit)
            else:
                yield unit, found
        done = len(units) - len(todo)
        for unit, found in self._each(todo):
            done += 1
            how = f"failed: {found['failed']}" if "failed" in found else f"{found['seconds']:.0f} s"
            told(f"{Path(unit.experiment).name}, {done} of {len(units)}: {unit.name}, {how}")
            yield unit, found

    def _each(self, units: Sequence[Unit]) -> Iterator[Finished]:
        self.announce(units)
        here = [unit for unit in units if self.pool is None or unit.timed]
        waiting = {self.waiting.pop(unit.folder): unit for unit in units if unit not in here}
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                yield waiting.pop(future), _found(future)
        for unit in here:
            yield unit, work(unit)


def _pool(processes: int) -> ProcessPoolExecutor | None:
    if processes == 1:
        return None
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)


def _found(future: Future[dict[str, Any]]) -> dict[str, Any]:
    """Return a unit's outcome; a killed process counts as a failure."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        return {"failed": f"a process was killed, perhaps for lack of memory: {error}"}


def _begin() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


def work(unit: Unit) -> dict[str, Any]:
    """Run a unit and save its rows. A failed unit saves its traceback instead, and runs again the next time."""
    folder = Path(unit.folder)
    _clear(folder, unit)
    spent, library = folder / SPENT, library_hash()
    before, begin, worked = torch.get_num_threads(), time.perf_counter(), time.process_time()
    torch.set_num_threads(unit.threads)
    try:
        rows = _rows(unit)
    except InterruptedRunError as error:
        raise KeyboardInterrupt from error
    except Exception as error:
        (folder / "failed.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        torch.set_num_threads(before)
        earlier = float(spent.read_text(encoding="utf-8")) if spent.is_file() else 0.0
        core_seconds = earlier + time.process_time() - worked
        spent.write_text(f"{core_seconds:.1f}\n", encoding="utf-8")
    found = {
        "identity": unit.identity,
        "library": library,
        "seconds": time.perf_counter() - begin,
        "core_seconds": core_seconds,
        "provenance": provenance(unit.device, ("transformers",)),
        "rows": rows,
    }
    write_atomically(folder / DONE, (json.dumps(found, indent=1) + "\n").encode())
    return found


def _rows(unit: Unit) -> list[Row]:
    if unit.kind in ("train", "search"):
        return train_unit(unit) if unit.kind == "train" else search_unit(unit)
    run = function(Path(unit.experiment), "run")
    if run is None:
        raise ValueError(f"{unit.experiment}: kind: measure needs a function run(unit) in experiment.py")
    unit, told = with_choice(unit)
    found = run(unit)
    return [{**row, **told} for row in (found if isinstance(found, list) else [found])]


def _clear(folder: Path, unit: Unit) -> None:
    """Create the unit's folder, and empty it unless it holds the same training."""
    begun = folder / BEGUN
    same = begun.is_file() and begun.read_text(encoding="utf-8").strip() == unit.training
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(begun, f"{unit.training}\n".encode())


def default_processes(alone: bool, scale: str) -> int:
    """Return the number of cores, or 1 if times are measured (`alone`) or the scale runs on a GPU."""
    return 1 if alone or (scale in ON_A_GPU and torch.cuda.is_available()) else os.cpu_count() or 1
