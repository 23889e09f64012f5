"""Draw docs/images/weights.png: the weights of each mechanism on the same random input.

python docs/make_images.py [FILE]
"""

import sys
from pathlib import Path

from subquad.cli import main

if __name__ == "__main__":
    default = Path(__file__).parent / "images" / "weights.png"
    sys.exit(main(["show", "weights", "--out", sys.argv[1] if len(sys.argv) > 1 else str(default)]))
