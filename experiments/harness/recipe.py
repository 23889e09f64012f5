"""Recipes of experiments: arms, seeds and scales, from `recipe.yaml`. Read without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from subquad.config import Config, suggest

SCALES = ("smoke", "cpu", "gpu", "paper")
FILE = "recipe.yaml"
Budget = Literal["steps", "tokens", "flops"]


@dataclass(frozen=True, kw_only=True)
class Arm(Config):
    """A thing that is compared with the other arms."""

    labels: dict[str, Any] = field(default_factory=dict)
    """What the rows of this arm say of it, for tables, claims and plots."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from the experiment's."""
    seeds: list[int] | None = None
    """Seeds of this arm (None: the scale's)."""


@dataclass(frozen=True, kw_only=True)
class Held(Config):
    """The measurement of a language model on the held-out text after its training."""

    tokens: int | None = None
    """Held-out tokens to read, from the first (None: all)."""
    length: int | None = None
    """Tokens of a window (None: those of training)."""
    stride: int | None = None
    """Tokens from one window to the next: all arms predict the same tokens, each but the first window's with at least
    length - stride + 1 tokens of context."""
    skip: int = 0
    """First tokens whose predictions do not count: those of the first window have less context, and a perceiver_ar's
    fewer latents than it was trained with."""


@dataclass(frozen=True, kw_only=True)
class Scale(Config):
    """One size at which an experiment runs."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings over the experiment's."""
    arms: dict[str, Arm] | list[str] | None = None
    """The arms that run: names of the experiment's, or others (None: all of the experiment's)."""
    arm_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings over those of arms, by the arm's name."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Each arm runs once for each."""
    reference: str | None = None
    """The arm that trains for run.steps; its predicted tokens and FLOPs are the budgets of the others."""
    budgets: list[Budget] = field(default_factory=lambda: ["steps"])
    """What is equal: steps, predicted tokens, FLOPs. With several, each arm trains for the greatest, and what the
    others need is forked off: the learning rate is constant, and falls over the last fifth of each budget."""
    held: Held = field(default_factory=Held)
    """The measurement of language models."""
    minutes: float = 0.0
    """What it took, or is expected to take, of wall time."""
    note: str = ""
    """What a reader should know of this scale's machine or cost."""


@dataclass(frozen=True, kw_only=True)
class Panel(Config):
    """One panel of the plot: `y` over `x`, a line or a group of points for each value of `by`."""

    y: str
    x: str = "arm"
    by: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    """Rows of these labels alone; a list of values is a choice of them."""
    log: Literal["", "x", "y", "xy"] = ""
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """An experiment: `recipe.yaml` in its folder."""

    kind: Literal["train", "measure"] = "train"
    """train: each unit is a training run of `settings`, a `TrainConfig`; measure: `run(unit)` of `experiment.py`."""
    alone: bool = False
    """Whether times are measured: one unit after another, with all threads."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of all units. A value `@NAME/...` is a path in the data set NAME."""
    arms: dict[str, Arm] = field(default_factory=dict)
    """What is compared."""
    scales: dict[str, Scale] = field(default_factory=dict)
    """The sizes, by name: smoke, cpu, gpu, paper."""
    group: list[str] = field(default_factory=lambda: ["arm"])
    """Labels of the rows of the result's table; seeds are put together."""
    table: list[str] = field(default_factory=list)
    """Measured values in the table's columns."""
    where: dict[str, Any] = field(default_factory=dict)
    """Rows of these labels alone in the table."""
    panels: list[Panel] = field(default_factory=list)
    """The plot, where `experiment.py` has no `draw(figure, rows)`."""

    def __post_init__(self) -> None:
        for name, scale in self.scales.items():
            if name not in SCALES:
                raise ValueError(f"unknown scale {name!r}; {suggest(name, SCALES)}")
            arms = self.arms_of(name)
            if not scale.seeds:
                raise ValueError(f"scales.{name}.seeds must name at least one seed, got []")
            if len(scale.budgets) != len(set(scale.budgets)) or not scale.budgets:
                raise ValueError(f"scales.{name}.budgets must name different budgets, got {scale.budgets}")
            for arm in (*scale.arm_settings, *([scale.reference] if scale.reference else [])):
                if arm not in arms:
                    raise ValueError(f"scales.{name} has no arm {arm!r}; {suggest(arm, arms)}")
            if set(scale.budgets) != {"steps"} and scale.reference is None:
                raise ValueError(f"scales.{name}.budgets {scale.budgets} need a reference, one of {', '.join(arms)}")

    def arms_of(self, scale: str) -> dict[str, Arm]:
        """The arms of a scale; `ValueError` for one that the experiment has not."""
        chosen = self.scale(scale).arms
        if isinstance(chosen, dict):
            return chosen
        for name in chosen or ():
            if name not in self.arms:
                raise ValueError(f"scales.{scale}.arms: unknown arm {name!r}; {suggest(name, self.arms)}")
        return {name: self.arms[name] for name in chosen} if chosen is not None else dict(self.arms)

    def scale(self, name: str) -> Scale:
        """The scale of this name; `ValueError` lists those that there are."""
        if name not in self.scales:
            raise ValueError(f"this experiment has no scale {name!r}; {suggest(name, self.scales)}")
        return self.scales[name]


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings, later ones over earlier ones; values that are no mappings replace each other."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def read_recipe(folder: Path) -> Recipe:
    """The recipe in an experiment's folder; errors name the file."""
    return Recipe.from_file(folder / FILE)
