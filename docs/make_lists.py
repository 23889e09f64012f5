"""Write again what lists all mechanisms: tables of README.md and of this folder, pictures, signatures, protocols.

`make lists`, after a mechanism was added or its options or costs changed.
"""

import re
import shlex
import subprocess
import sys

import pages

from subquad import attention

WRITTEN = re.compile(r"(<!-- (\w+): written by `(.*?)` -->\n\n).*?(\n\n<!-- /\2 -->)", re.DOTALL)
PICTURES = ("weights", "reach", "cost")


def ways_to_learn_order() -> dict[str, list[str]]:
    """Return how a bare layer learns the order of tokens, and the mechanisms that do so."""
    kinds = [(name, attention.mechanism(name)) for name in attention.names()]
    return {
        "`rope=True` rotates its queries and keys by their positions": [n for n, kind in kinds if kind.rotates],
        "by itself: decays, gates, the delta rule, a short convolution, or weights learned for each position": [
            n for n, kind in kinds if kind.sees_order
        ],
        "not at all: add positions to `x`": [n for n, kind in kinds if not (kind.rotates or kind.sees_order)],
    }


def order_table() -> str:
    """Return `ways_to_learn_order` in Markdown."""
    lines = [[way, ", ".join(f"`{name}`" for name in names)] for way, names in ways_to_learn_order().items()]
    return pages.table(["how it learns the order", "mechanisms"], lines, names=2)


BLOCKS = {"order": order_table}


def output(command: str) -> str:
    """Return what a command prints, run from the root by this interpreter."""
    program, *options = shlex.split(command)
    words = ["-m", "subquad", *options] if program == "subquad" else options
    done = subprocess.run([sys.executable, *words], cwd=pages.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def main() -> None:
    """Write all of them."""
    for page in (pages.ROOT / "README.md", *sorted(pages.DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        made = WRITTEN.sub(lambda found: found[1] + output(found[3]).strip() + found[4], text)
        if made != text:
            page.write_text(made, encoding="utf-8")
    pages.rewrite("layer.md", BLOCKS)
    (pages.ROOT / "tests" / "public_api.txt").write_text(output("python tests/test_public_api.py"), encoding="utf-8")
    output("python -m tests.test_protocols")
    for picture in PICTURES:
        output(f"subquad show {picture} --out docs/images/{picture}.png")


if __name__ == "__main__":
    main()
