"""Read `recipe.yaml`: an experiment's arms, seeds and scales. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from subquad.config import Config, suggest

SCALES = ("smoke", "cpu", "gpu", "paper")
FILE = "recipe.yaml"
FEWEST_RATES, FEWEST_SIZES = 3, 2
Budget = Literal["steps", "tokens", "flops"]


@dataclass(frozen=True, kw_only=True)
class Arm(Config):
    """One of the variants that an experiment compares."""

    labels: dict[str, Any] = field(default_factory=dict)
    """Columns added to the rows of this arm, for tables, claims and plots."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that override the experiment's."""
    seeds: list[int] | None = None
    """Seeds of this arm (None: the scale's)."""
    timed: bool = False
    """Run this arm when nothing else runs, because its times are measured."""
    chooses: bool = True
    """Choose a learning rate first, if the scale has rates; false for an arm that is only timed."""


@dataclass(frozen=True, kw_only=True)
class Held(Config):
    """Settings for measuring a language model on the held-out text after training."""

    tokens: int | None = None
    """Number of held-out tokens to read (None: all)."""
    length: int | None = None
    """Window length in tokens (None: the training length)."""
    stride: int | None = None
    """Tokens from one window to the next: all arms predict the same tokens, each with at least length - stride + 1
    tokens of context after the first window."""
    skip: int = 0
    """Number of first tokens that are not scored: the first window has less context, and perceiver_ar has fewer
    latents there than in training."""


@dataclass(frozen=True, kw_only=True)
class Choose(Config):
    """Settings that each arm chooses for itself before its seeds run; see `rates.py`."""

    lr: list[float] = field(default_factory=list)
    """Peak learning rates, three or more (none: that of the settings)."""
    position_scale: list[float | None] = field(default_factory=list)
    """Sizes of added sines, two or more, for the arms that have them (none: that of the settings)."""
    tokens: int | None = None
    """Number of held-out tokens to choose on, after those of the result (None: as many as those)."""


@dataclass(frozen=True, kw_only=True)
class Scale(Config):
    """One size at which an experiment runs."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that override the experiment's."""
    arms: dict[str, Arm] | list[str] | None = None
    """Arms to run: names of the experiment's arms, or new ones (None: all of the experiment's)."""
    arm_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings that override those of an arm, by its name."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Seeds; each arm runs once per seed."""
    reference: str | None = None
    """The arm that trains for run.steps; its predicted tokens and FLOPs set the others' budgets. Rows name theirs."""
    budgets: list[Budget] = field(default_factory=lambda: ["steps"])
    """Quantities that are equal for all arms. With several budgets, an arm trains at a constant learning rate up to the
    largest; a fork for each budget lowers the rate over its last fifth."""
    held: Held = field(default_factory=Held)
    """Measurement of language models."""
    choose: Choose = field(default_factory=Choose)
    """Settings that each arm first chooses for itself."""
    minutes: float = 0.0
    """Measured or expected wall time in minutes."""
    note: str = ""
    """Remarks on this scale's machine or cost."""


@dataclass(frozen=True, kw_only=True)
class Panel(Config):
    """One panel of the plot: `y` over `x`, with a series for each value of `by`."""

    y: str
    x: str = "arm"
    by: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    """Draw only rows with these labels; a list of values matches any of them."""
    log: Literal["", "x", "y", "xy"] = ""
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """The contents of an experiment's `recipe.yaml`."""

    kind: Literal["train", "measure"] = "train"
    """train: each unit is a training run with `settings` as its `TrainConfig`; measure: `run(unit)` in
    `experiment.py`."""
    alone: bool = False
    """All arms are timed: one unit at a time, with all threads."""
    reads: str | None = None
    """Experiment whose result `run` reads: with --all it runs before this one, whose units are never kept."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of all units. A value `@NAME/...` is a path in the data set NAME."""
    arms: dict[str, Arm] = field(default_factory=dict)
    """The variants to compare, by name."""
    scales: dict[str, Scale] = field(default_factory=dict)
    """The sizes, by name: smoke, cpu, gpu, paper."""
    group: list[str] = field(default_factory=lambda: ["arm"])
    """Columns that identify a line of the result's table; it averages over seeds."""
    table: list[str] = field(default_factory=list)
    """Measured columns of the result's table."""
    where: dict[str, Any] = field(default_factory=dict)
    """Labels of the rows that the table shows."""
    panels: list[Panel] = field(default_factory=list)
    """The plot's panels, unless `experiment.py` has `draw(figure, rows)`."""

    def __post_init__(self) -> None:
        for name, scale in self.scales.items():
            if name not in SCALES:
                raise ValueError(f"unknown scale {name!r}; {suggest(name, SCALES)}")
            arms = self.arms_of(name)
            if not scale.seeds:
                raise ValueError(f"scales.{name}.seeds must have at least one seed, got []")
            if len(scale.budgets) != len(set(scale.budgets)) or not scale.budgets:
                raise ValueError(f"scales.{name}.budgets must be one or more distinct budgets, got {scale.budgets}")
            for arm in (*scale.arm_settings, *([scale.reference] if scale.reference else [])):
                if arm not in arms:
                    raise ValueError(f"scales.{name} has no arm {arm!r}; {suggest(arm, arms)}")
            _check_choose(f"scales.{name}.choose", scale.choose)
            if set(scale.budgets) != {"steps"} and scale.reference is None:
                raise ValueError(f"scales.{name}.budgets {scale.budgets} need a reference, one of {', '.join(arms)}")

    def arms_of(self, scale: str) -> dict[str, Arm]:
        """Return the arms of a scale. Raises `ValueError` for an unknown arm."""
        chosen = self.scale(scale).arms
        if isinstance(chosen, dict):
            return chosen
        for name in chosen or ():
            if name not in self.arms:
                raise ValueError(f"scales.{scale}.arms: unknown arm {name!r}; {suggest(name, self.arms)}")
        return {name: self.arms[name] for name in chosen} if chosen is not None else dict(self.arms)

    def scale(self, name: str) -> Scale:
        """Return the scale called `name`. Raises `ValueError` with the valid names."""
        if name not in self.scales:
            raise ValueError(f"this experiment has no scale {name!r}; {suggest(name, self.scales)}")
        return self.scales[name]


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; values of later layers override those of earlier ones."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def read_recipe(folder: Path) -> Recipe:
    """Read the recipe in an experiment's folder; errors name the file."""
    return Recipe.from_file(folder / FILE)


def _check_choose(where: str, choose: Choose) -> None:
    """Raise `ValueError` for too few, equal or negative values."""
    for name, fewest, values in (
        ("lr", FEWEST_RATES, choose.lr),
        ("position_scale", FEWEST_SIZES, choose.position_scale),
    ):
        if values and (len(set(values)) < fewest or any(value is not None and value <= 0 for value in values)):
            raise ValueError(f"{where}.{name} must be at least {fewest} different positive numbers, got {values}")
    if choose.position_scale and not choose.lr:
        raise ValueError(f"{where}.position_scale needs lr: a size is chosen at the middle rate")
    if choose.tokens is not None and not (choose.lr and choose.tokens > 0):
        raise ValueError(f"{where}.tokens must be a positive number beside lr, got {choose.tokens}")
