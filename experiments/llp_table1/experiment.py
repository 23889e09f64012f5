"""Rows for configuration C, which in the paper is B trained 2.5 times as long, and here B's run twice as long."""

from __future__ import annotations

from experiments.harness.train import budget_steps
from experiments.harness.units import Unit
from subquad.training import RunResult


def measure(result: RunResult, unit: Unit) -> list[dict[str, object]]:
    """Return the run's row, and a second one if it also stands for C."""
    if len(unit.budgets) == 1:
        return [{"budget": "steps"}]
    longer = result.config.run.steps == budget_steps(unit)["tokens"]
    return [{}, {"config": "C", "budget": "steps"}] if unit.labels["config"] == "B" and longer else [{}]
