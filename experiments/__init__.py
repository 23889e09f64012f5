"""The papers' claims, run again: a folder an experiment, `harness` runs and judges them."""
