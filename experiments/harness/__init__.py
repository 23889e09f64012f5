"""Run a recipe's units, keep their rows, and compare them with the paper's figures."""
