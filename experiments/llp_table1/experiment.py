"""The paper's configuration C is B trained 2.5 times as long: here B's run at equal predicted tokens, twice as long."""

from __future__ import annotations

from experiments.harness.train import budget_steps
from experiments.harness.units import Unit
from subquad.training import RunResult


def measure(result: RunResult, unit: Unit) -> list[dict[str, object]]:
    """Nothing more of the run itself; a second row where it also stands for C."""
    if len(unit.budgets) == 1:
        return [{"budget": "steps"}]
    longer = result.config.run.steps == budget_steps(unit)["tokens"]
    return [{}, {"config": "C", "budget": "steps"}] if unit.labels["config"] == "B" and longer else [{}]
