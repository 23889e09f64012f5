"""Write again what the pages show of results: the blocks of a page, and whole files of tables.

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`; the prose around it is written by hand. Each `make_*.py`
of this folder has a function for each block, which makes its Markdown from committed JSON.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", DOCS / "images"
BLOCK = re.compile(r"<!-- (?P<name>[a-z-]+) -->\n.*?<!-- /(?P=name) -->", re.DOTALL)
Blocks = Mapping[str, Callable[[], str]]


def rewritten(text: str, blocks: Blocks) -> str:
    """Return the page with every block made anew. Raises `KeyError` for a block that nothing makes."""
    return BLOCK.sub(lambda m: f"<!-- {m['name']} -->\n{blocks[m['name']]()}\n<!-- /{m['name']} -->", text)


def rewrite(page: str, blocks: Blocks) -> None:
    """Write the blocks of a page of this folder again."""
    file = DOCS / page
    file.write_text(rewritten(file.read_text(encoding="utf-8"), blocks), encoding="utf-8")


def raw(title: str, script: str, *parts: str) -> str:
    """Return a file of tables that a script of this folder writes whole."""
    return "\n\n".join([f"<!-- written by `python docs/{script}` -->\n# {title}", *parts]) + "\n"


def result(name: str) -> Any:
    """Return what a JSON file of `benchmarks/results` holds."""
    return read(RESULTS / f"{name}.json")


def read(file: Path) -> Any:
    """Return what a JSON file holds."""
    return json.loads(file.read_text(encoding="utf-8"))


def table(headers: Sequence[str], lines: Iterable[Sequence[str]], *, names: int = 1) -> str:
    """Return a table in Markdown whose first `names` columns are names, at the left, and the others numbers."""
    rules = [":---"] * names + ["---:"] * (len(headers) - names)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headers, rules, *lines))


def versions(found: Mapping[str, str]) -> str:
    """Return names and versions of packages in one line."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def span(values: Iterable[float]) -> str:
    """Return the least and the largest of some ratios."""
    found = sorted(values)
    shown = [f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" for value in (found[0], found[-1])] if found else ["-"]
    return " to ".join(dict.fromkeys(shown))
