"""Reproductions of the papers' claims: one folder per experiment; `harness` runs and judges them."""
