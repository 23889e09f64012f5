"""`python -m subquad` is the command `subquad`."""

import sys

from subquad.cli import main

if __name__ == "__main__":
    sys.exit(main())
