"""Run the LoRA experiment on MNIST over its seeds in several processes, saving each result at once."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.memory import peak_bytes
from experiments.lora_mnist import arms
from experiments.lora_mnist.config import ARMS, SETS, MnistConfig
from subquad.config import digest
from subquad.disk import write_atomically
from subquad.evaluation.provenance import provenance
from subquad.parsing import check_keys, read_json

TUNE_RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TUNE_ADAPTED = ("rotated", "inverted")
TUNE_SCRATCH = ("plain", "inverted")
"""Sets on which --tune measures: quantised images hardly change a base, and without a base rotated ones equal plain
ones."""
TUNE_SEED = 10_000
TIMED_STEPS = 200


@dataclass
class Results:
    """The results so far, kept in a file."""

    config: MnistConfig
    file: Path
    values: dict[str, Any]

    @classmethod
    def open(cls, config: MnistConfig, file: str, fingerprint: str) -> Results:
        """Read `file` if it exists. Raises `ValueError` if it has results of other settings."""
        path, identity = Path(file), digest([config.science(), fingerprint])
        shown = config.replace(path=None).to_dict()
        values: dict[str, Any] = {"identity": identity, "config": shown, "seeds": {}, "seconds": {}}
        if path.is_file():
            found = read_json(path)
            check_keys(found, {"identity": str, "seeds": dict, "seconds": dict}, file)
            for seed, known in found["seeds"].items():
                check_keys(known, {"accuracy": dict}, f"{file}, seed {seed}")
            if found["identity"] != identity:
                raise ValueError(f"{file} has results of other settings or images; use another --out, or delete it")
            values = {**found, "config": shown}
        return cls(config, path, values)

    def add(self, seed: int, values: dict[str, Any]) -> None:
        """Add results of a seed and save the file."""
        entry = self.values["seeds"].setdefault(str(seed), {"accuracy": {}})
        entry["accuracy"].update(values.pop("accuracy", {}))
        entry.update(values)
        self.save()

    def save(self) -> None:
        """Write the file atomically."""
        write_atomically(self.file, (json.dumps(self.values, indent=1) + "\n").encode())

    def missing(self, seed: int) -> list[str]:
        """Return the names of a seed's trainings that are not done yet."""
        known = self.values["seeds"].get(str(seed), {"accuracy": {}})["accuracy"]
        return [cell.name for cell in arms.cells(self.config) if cell.name not in known]


def run(config: MnistConfig, out: str, digits: arms.Digits) -> Results:
    """Run the missing trainings, and save each result in the file `out` at once."""
    results, begin = Results.open(config, out, digits.fingerprint), time.perf_counter()
    results.values["provenance"] = provenance("cpu", ("peft",))
    if "steps" not in results.values:
        results.values["steps"] = measure_steps(config, digits)
        results.save()
    todo = [(seed, names) for seed in range(config.seeds) if (names := results.missing(seed))]
    if todo:
        shares = _shares(todo, config.processes)
        done, total = 0, sum(len(names) for _, names in todo)
        seconds = results.values["seconds"]
        before = seconds.get("wall", 0.0)
        for seed, values in _in_processes(partial(_work, config), shares, config.processes):
            done += len(values["accuracy"].keys() - {f"base/{k}/{s}" for k in ("stopped", "trained") for s in SETS})
            seconds.update(processes=config.processes, wall=before + time.perf_counter() - begin)
            results.add(seed, values)
            sys.stderr.write(f"\r{done} of {total} trainings, {time.perf_counter() - begin:.0f} s")
        sys.stderr.write("\n")
    return results


def _shares(todo: Sequence[tuple[int, list[str]]], processes: int) -> list[tuple[int, list[str]]]:
    """Split each seed's trainings into parts if the processes cannot share the seeds evenly."""
    parts = 1 if len(todo) % processes == 0 else processes
    return [(seed, names[part::parts]) for seed, names in todo for part in range(parts) if names[part::parts]]


def _in_processes(work: Callable[[Any], Any], items: Sequence[Any], processes: int) -> Iterator[Any]:
    """Yield the pieces that `work` returns for each item in order; in this process if one process or item is enough."""
    if processes == 1 or len(items) == 1:
        for item in items:
            yield from work(item)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for pieces in pool.map(work, items):
            yield from pieces


def _work(config: MnistConfig, item: tuple[int, list[str]]) -> list[tuple[int, dict[str, Any]]]:
    """Return the accuracies of some trainings of one seed and of its bases."""
    torch.set_num_threads(1)
    seed, names = item
    digits = arms.read_digits(config)
    bases, numbers = arms.train_base(config, digits, seed)
    wanted = set(names)
    for cell in arms.cells(config):
        if cell.name in wanted:
            net = arms.train_cell(cell, config, digits, bases, seed)
            numbers["accuracy"][cell.name] = arms.accuracy(net, digits.test[cell.images])
    return [(seed, numbers)]


def measure_steps(config: MnistConfig, digits: arms.Digits) -> dict[str, Any]:
    """Measure time (median, quantiles) and memory of a step, in turns, for all weights and for each rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    split = digits.train["plain"]
    x_BD, y_B = split.x_ND[: config.batch], split.y_N[: config.batch]
    subjects: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for rank in (None, *config.ranks):
        net = arms.fresh_net(0) if rank is None else arms.with_factors(arms.fresh_net(0), rank, 0)
        parameters = [p for p in net.parameters() if p.requires_grad]
        subjects["full" if rank is None else str(rank)] = net, arms.build_optimizer(parameters, 1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(TIMED_STEPS + 10):
        for name, (net, optimizer) in subjects.items():
            begin = time.perf_counter()
            arms.train_step(net, optimizer, x_BD, y_B)
            if turn >= 10:
                seconds[name].append(time.perf_counter() - begin)
    measured = {}
    for name, (net, optimizer) in subjects.items():
        tenths = statistics.quantiles(seconds[name], n=10)
        trains = [p for p in net.parameters() if p.requires_grad]
        states = [t for p in trains for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        optimizer.zero_grad()  # so that the measured step allocates its gradients itself
        measured[name] = {
            "trainable": sum(p.numel() for p in trains),
            "median": statistics.median(seconds[name]),
            "p20": tenths[1],
            "p80": tenths[7],
            "trained_bytes": sum(t.numel() * t.element_size() for t in (*trains, *states)),
            "step_peak_bytes": peak_bytes(partial(arms.train_step, net, optimizer, x_BD, y_B), "cpu"),
        }
    torch.set_num_threads(threads)
    return measured


def tune(config: MnistConfig) -> dict[str, float]:
    """Return for each arm the rate of `TUNE_RATES` with the best mean accuracy on held-out training images.

    The mean is over all ranks and two sets (base: plain images) with the seed `TUNE_SEED`. The arms full and lora start
    from the stopped base, whose stop also depends only on those images.
    """
    rates = dict(config.rates)
    for arm, scores in _in_processes(partial(_tune_one, config), ARMS, config.processes):
        rates[arm] = max(scores, key=scores.__getitem__)
        shown = ", ".join(f"{rate:g}: {score:.2f}" for rate, score in scores.items())
        sys.stderr.write(f"{arm}: {rates[arm]:g} ({shown})\n")
    return rates


def _tune_one(config: MnistConfig, arm: str) -> list[tuple[str, dict[float, float]]]:
    torch.set_num_threads(1)
    digits = arms.held_out(arms.read_digits(config), config.tune_held_out)
    if arm == "base":
        return [(arm, {rate: arms.base_accuracy(config, digits, TUNE_SEED, rate) for rate in TUNE_RATES})]
    adapts = arm in ("full", "lora")
    bases = arms.train_base(config, digits, TUNE_SEED)[0] if adapts else {}
    ranks: list[int | None] = [None] if arm == "full" else [*config.ranks]
    sets, base = (TUNE_ADAPTED, "stopped") if adapts else (TUNE_SCRATCH, "")
    chosen = [arms.Cell(arm, base, images, rank) for images in sets for rank in ranks]
    scores = {}
    for rate in TUNE_RATES:
        nets = [arms.train_cell(cell, config, digits, bases, TUNE_SEED, rate) for cell in chosen]
        found = [arms.accuracy(net, digits.test[cell.images]) for net, cell in zip(nets, chosen, strict=True)]
        scores[rate] = statistics.mean(found)
    return [(arm, scores)]
