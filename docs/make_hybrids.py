"""Write the table in docs/hybrids.md, what `tests/hf/hybrids.py` finds: `python docs/make_hybrids.py`."""

import logging
from collections.abc import Iterable

import pages
import transformers

from tests.hf.hybrids import LAWS, rows


def table(found: Iterable[list[str]]) -> str:
    """Return the rows as a table in Markdown, and the version of transformers."""
    lines = pages.table(["model", "code", *LAWS], list(found), names=2)
    return f"{lines}\n\nMeasured with transformers {transformers.__version__} on a CPU."


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    pages.rewrite("hybrids.md", {"laws": lambda: table(rows())})
