"""Write again what lists all mechanisms: tables of README.md and of this folder, pictures, signatures, protocols.

`make lists`, after a mechanism was added or its options or costs changed.
"""

import re
import shlex
import subprocess
import sys

from pages import DOCS, ROOT

BLOCK = re.compile(r"(<!-- (\w+): written by `(.*?)` -->\n\n).*?(\n\n<!-- /\2 -->)", re.DOTALL)
PICTURES = ("weights", "reach", "cost")


def output(command: str) -> str:
    """Return what a command prints, run from the root by this interpreter."""
    program, *options = shlex.split(command)
    words = ["-m", "subquad", *options] if program == "subquad" else options
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def main() -> None:
    """Write all of them."""
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        made = BLOCK.sub(lambda found: found[1] + output(found[3]).strip() + found[4], text)
        if made != text:
            page.write_text(made, encoding="utf-8")
    (ROOT / "tests" / "public_api.txt").write_text(output("python tests/test_public_api.py"), encoding="utf-8")
    output("python -m tests.test_protocols")
    for picture in PICTURES:
        output(f"subquad show {picture} --out docs/images/{picture}.png")


if __name__ == "__main__":
    main()
