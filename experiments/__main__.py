"""`python -m experiments`."""

from experiments.harness.command import main

if __name__ == "__main__":
    raise SystemExit(main())
