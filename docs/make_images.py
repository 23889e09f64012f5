"""Draw docs/images/weights.png: the weights of each mechanism on the same random input.

python docs/make_images.py [FILE]
"""

import sys
from pathlib import Path

from subquad.cli import main

FILE = Path(__file__).parent / "images" / "weights.png"


def draw(file: str | Path = FILE) -> int:
    """Draw the picture to `file`; the exit status of the command that does it."""
    return main(["show", "weights", "--out", str(file)])


if __name__ == "__main__":
    sys.exit(draw(*sys.argv[1:2]))
