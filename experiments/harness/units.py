"""Units of work: one arm of an experiment with one seed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from experiments.harness.data import find
from experiments.harness.recipe import Held, Recipe, merged
from experiments.harness.source import without_docstrings
from subquad.config import digest
from subquad.parsing import read_json

CODE = "experiment.py"
DONE, BEGUN = "unit.json", "begun.txt"
ON_A_GPU = ("gpu", "paper")
SINES = "sinusoidal"
"""The `position` of arms that choose the size of their sines."""
MEASURES = ("run", "measure", "search")
"""Functions of `experiment.py` that produce rows; its other functions judge and draw them."""


@dataclass(frozen=True)
class Unit:
    """One arm of an experiment with one seed."""

    experiment: str
    """Path of the experiment's folder."""
    scale: str
    arm: str
    seed: int
    labels: dict[str, Any]
    settings: dict[str, Any]
    """Settings from the recipe, with data paths filled in."""
    folder: str
    """Folder of the unit's files, from which an interrupted unit continues."""
    kind: str
    """train, measure, or search (of a learning rate and a size of sines)."""
    identity: str
    """Hash of everything that affects the rows: settings and measuring code, but no paths."""
    training: str
    """Hash of everything that affects the training; if it is unchanged, the folder's run can be continued."""
    reference: dict[str, Any] | None = None
    """Settings of the arm that sets the budgets."""
    budgets: tuple[str, ...] = ("steps",)
    held: dict[str, Any] | None = None
    rates: tuple[float, ...] = ()
    """Learning rates to choose from first (none: that of the settings)."""
    sizes: tuple[float | None, ...] = ()
    """Sizes of the arm's added sines to choose from before (none: that of the settings)."""
    chosen_on: int | None = None
    """Number of held-out tokens to choose on (None: as many as the result's)."""
    timed: bool = False
    """Run when nothing else runs."""
    threads: int = 1
    reads: str | None = None
    """Experiment whose result it reads."""

    @property
    def name(self) -> str:
        """Return the arm and the seed as text."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def device(self) -> str:
        """Return "cuda" if a GPU is available and the scale is meant for one, else "cpu"."""
        return "cuda" if self.scale in ON_A_GPU and torch.cuda.is_available() else "cpu"


def units_of(
    experiment: Path,
    recipe: Recipe,
    scale: str,
    *,
    work: Path,
    data: Mapping[str, str],
    threads: int = 1,
    timed_threads: int | None = None,
) -> list[Unit]:
    """Return the units of a scale, ordered by seed so that early results cover all arms.

    Timed units have `timed_threads` (None: `threads`). Raises `ValueError` or `FileNotFoundError` for missing data
    or a missing `search`.
    """
    chosen, arms = recipe.scale(scale), recipe.arms_of(scale)
    if chosen.choose.lr and recipe.kind == "measure" and function(experiment, "search") is None:
        raise ValueError(f"scales.{scale}.choose needs a function search(unit) in {CODE}, because kind is measure")

    def plain(name: str) -> dict[str, Any]:
        return merged(recipe.settings, chosen.settings, arms[name].settings, chosen.arm_settings.get(name, {}))

    measuring = measuring_code(experiment)
    paths: dict[str, str] = {}
    reference = None if chosen.reference is None else _with_paths(plain(chosen.reference), data, paths)
    found = []
    seeds = sorted({seed for arm in arms.values() for seed in (chosen.seeds if arm.seeds is None else arm.seeds)})
    for seed in seeds:
        for name, arm in arms.items():
            if seed not in (chosen.seeds if arm.seeds is None else arm.seeds):
                continue
            settings = plain(name)
            rates, sizes = (chosen.choose.lr, chosen.choose.position_scale) if arm.chooses else ([], [])
            if settings.get("model", {}).get("position") != SINES:
                sizes = []
            timed = (recipe.alone or arm.timed) and scale != "smoke"
            trained = [name, seed, settings, chosen.budgets, chosen.reference and plain(chosen.reference)]
            trained += [rates, chosen.held.to_dict()] if rates else []
            trained += [sizes] if sizes else []
            trained += [chosen.choose.tokens] if chosen.choose.tokens else []
            found.append(
                Unit(
                    experiment=str(experiment),
                    scale=scale,
                    arm=name,
                    seed=seed,
                    labels=arm.labels,
                    settings=_with_paths(settings, data, paths),
                    folder=str(work / experiment.name / scale / f"{name.replace(' ', '-')}-{seed}"),
                    kind=recipe.kind,
                    reads=recipe.reads,
                    identity=digest([trained, chosen.held.to_dict(), measuring]),
                    training=digest(trained),
                    reference=reference,
                    budgets=tuple(chosen.budgets),
                    held=chosen.held.to_dict(),
                    rates=tuple(rates),
                    sizes=tuple(sizes),
                    chosen_on=chosen.choose.tokens,
                    timed=timed,
                    threads=timed_threads or threads if timed else threads,
                )
            )
    return found


def _with_paths(values: Any, data: Mapping[str, str], paths: dict[str, str]) -> Any:
    """Replace each `@NAME/...` in `values` by its path; `paths` caches the paths found."""
    if isinstance(values, dict):
        return {key: _with_paths(value, data, paths) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_paths(value, data, paths) for value in values]
    if isinstance(values, str) and values.startswith("@"):
        if values not in paths:
            paths[values] = find(values, data)
        return paths[values]
    return values


def code(experiment: Path) -> ModuleType | None:
    """Import the experiment's `experiment.py`, or return None if it has none."""
    file = experiment / CODE
    if not file.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"experiments_{experiment.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measuring_code(experiment: Path) -> str:
    """Return the source of `MEASURES` and what they use in `experiment.py`, without docstrings and comments."""
    file = experiment / CODE
    if not file.is_file():
        return ""
    top: dict[str, ast.stmt] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        top |= dict.fromkeys(names, node)
    used: dict[str, ast.stmt] = {}
    waiting = [name for name in MEASURES if name in top]
    while waiting:
        name = waiting.pop()
        if name not in used:
            used[name] = top[name]
            waiting += [n.id for n in ast.walk(top[name]) if isinstance(n, ast.Name) and n.id in top]
    return "\n".join(ast.unparse(without_docstrings(used[name])) for name in sorted(used))


def function(experiment: Path, name: str) -> Callable[..., Any] | None:
    """Return the function called `name` of `experiment.py`, or None."""
    found = getattr(code(experiment), name, None)
    return found if callable(found) else None


def kept(unit: Unit) -> dict[str, Any] | None:
    """Return the saved outcome of the unit if its identity is unchanged, else None; None if it reads a result."""
    file = Path(unit.folder) / DONE
    if unit.reads or not file.is_file():
        return None
    try:
        found = read_json(file)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("identity") == unit.identity else None


def held_of(unit: Unit) -> Held:
    """Return how the unit's language model is measured."""
    return Held.from_dict(unit.held or {})
