"""Units: an experiment runs them one by one. One arm, one seed."""

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
from subquad.config import digest
from subquad.parsing import read_json

CODE = "experiment.py"
DONE, BEGUN = "unit.json", "begun.txt"
ON_A_GPU = ("gpu", "paper")
MEASURES = ("run", "measure")
"""The functions of an experiment's code that make rows; what else is in it judges and draws them."""


@dataclass(frozen=True)
class Unit:
    """One arm of an experiment with one seed."""

    experiment: str
    """The experiment's folder."""
    scale: str
    arm: str
    seed: int
    labels: dict[str, Any]
    settings: dict[str, Any]
    """The recipe's, with the paths of the data filled in."""
    folder: str
    """Where the unit keeps what it makes: it is gone on with after an interruption."""
    kind: str
    """What runs it: train or measure."""
    identity: str
    """Differs when anything that the unit computes differs, the code that measures too; paths are left out."""
    training: str
    """Differs when what is trained differs: what is in the folder can be gone on with where it does not."""
    reference: dict[str, Any] | None = None
    """The settings of the arm that the budgets are counted from."""
    budgets: tuple[str, ...] = ("steps",)
    held: dict[str, Any] | None = None
    threads: int = 1

    @property
    def name(self) -> str:
        """The arm and the seed."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def device(self) -> str:
        """The GPU, where there is one and the scale is meant for it; else the CPU."""
        return "cuda" if self.scale in ON_A_GPU and torch.cuda.is_available() else "cpu"


def units_of(
    experiment: Path,
    recipe: Recipe,
    scale: str,
    *,
    work: Path,
    data: Mapping[str, str],
    threads: int = 1,
) -> list[Unit]:
    """The units of a scale, the seeds one after another, so that early results have all arms.

    Raises `ValueError` or `FileNotFoundError` for data that is not there.
    """
    chosen, arms = recipe.scale(scale), recipe.arms_of(scale)

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
            trained = [name, seed, settings, chosen.budgets, chosen.reference and plain(chosen.reference)]
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
                    identity=digest([trained, chosen.held.to_dict(), measuring]),
                    training=digest(trained),
                    reference=reference,
                    budgets=tuple(chosen.budgets),
                    held=chosen.held.to_dict(),
                    threads=threads,
                )
            )
    return found


def _with_paths(values: Any, data: Mapping[str, str], paths: dict[str, str]) -> Any:
    """The values with each `@NAME/...` replaced by the path that it stands for; `paths` keeps those that are known."""
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
    """The experiment's own code, where it has some."""
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
    """The part of the experiment's own code that makes rows: `run`, `measure` and what they use, without docstrings."""
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
    return "\n".join(ast.unparse(_without_docstrings(used[name])) for name in sorted(used))


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return node


def function(experiment: Path, name: str) -> Callable[..., Any] | None:
    """A function of the experiment's own code, where it has one of that name."""
    found = getattr(code(experiment), name, None)
    return found if callable(found) else None


def kept(unit: Unit) -> dict[str, Any] | None:
    """Return the kept rows of a unit that was done with these settings, or None."""
    file = Path(unit.folder) / DONE
    if not file.is_file():
        return None
    try:
        found = read_json(file)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("identity") == unit.identity else None


def held_of(unit: Unit) -> Held:
    """Return the settings of the measurement of language models."""
    return Held.from_dict(unit.held or {})
