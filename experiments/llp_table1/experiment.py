"""Name the budget of scales that have one alone."""

from experiments.harness.noise import Row
from experiments.harness.units import Unit
from subquad.training import RunResult


def measure(result: RunResult, unit: Unit) -> Row:
    """Return the only budget, equal steps; rows of several budgets name theirs."""
    return {"budget": "steps"} if len(unit.budgets) == 1 else {}
