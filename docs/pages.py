"""Results, tables in Markdown, and the blocks of a page that the scripts of this folder write again."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", DOCS / "images"
BLOCK = re.compile(r"<!-- (?P<name>[a-z-]+) -->\n.*?<!-- /(?P=name) -->", re.DOTALL)
"""What stands between `<!-- NAME -->` and `<!-- /NAME -->`: the prose around it is written by hand."""


def rewritten(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with every block made anew. Raises `KeyError` for a block that nothing makes."""
    return BLOCK.sub(lambda m: f"<!-- {m['name']} -->\n{blocks[m['name']]()}\n<!-- /{m['name']} -->", text)


def rewrite(page: str, blocks: Mapping[str, Callable[[], str]]) -> None:
    """Write the blocks of a page of this folder again."""
    file = DOCS / page
    file.write_text(rewritten(file.read_text(encoding="utf-8"), blocks), encoding="utf-8")


def read(file: Path) -> Any:
    """Return what a JSON file holds."""
    return json.loads(file.read_text(encoding="utf-8"))


def keep(file: Path, values: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def table(headers: Sequence[str], lines: Sequence[Sequence[str]], *, names: int = 1) -> str:
    """Return a table in Markdown whose first `names` columns are names, at the left, and the others numbers."""
    rules = [":---"] * names + ["---:"] * (len(headers) - names)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headers, rules, *lines))
