"""`python -m experiments.llp_table6`."""

from experiments.llp_table6.command import main

if __name__ == "__main__":
    raise SystemExit(main())
