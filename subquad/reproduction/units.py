"""Units: what an experiment runs one by one. One arm, one seed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from subquad.config import digest
from subquad.reproduction.data import find
from subquad.reproduction.recipe import Held, Recipe, merged

CODE = "experiment.py"
DONE = "unit.json"
Row = dict[str, Any]


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
    """Differs when anything that the unit computes differs; paths are left out."""
    reference: dict[str, Any] | None = None
    """The settings of the arm that the budgets are counted from."""
    budgets: tuple[str, ...] = ("steps",)
    held: dict[str, Any] | None = None
    threads: int = 1

    @property
    def name(self) -> str:
        """The arm and the seed."""
        return f"{self.arm}, seed {self.seed}"


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

    paths: dict[str, str] = {}
    reference = None if chosen.reference is None else _with_paths(plain(chosen.reference), data, paths)
    found = []
    seeds = sorted({seed for arm in arms.values() for seed in (chosen.seeds if arm.seeds is None else arm.seeds)})
    for seed in seeds:
        for name, arm in arms.items():
            if seed not in (chosen.seeds if arm.seeds is None else arm.seeds):
                continue
            settings = plain(name)
            about = [name, seed, settings, chosen.held.to_dict(), chosen.budgets]
            if chosen.reference is not None:
                about.append(plain(chosen.reference))
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
                    identity=digest(about),
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


def function(experiment: Path, name: str) -> Callable[..., Any] | None:
    """A function of the experiment's own code, where it has one of that name."""
    found = getattr(code(experiment), name, None)
    return found if callable(found) else None


def kept(unit: Unit) -> dict[str, Any] | None:
    """What is known of a unit that was done with these settings; None where there is none."""
    file = Path(unit.folder) / DONE
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("identity") == unit.identity else None


def held_of(unit: Unit) -> Held:
    """How language models are measured."""
    return Held.from_dict(unit.held or {})
