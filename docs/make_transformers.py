"""Write the audit reports of `tests/hf/published.py` in docs/transformers.md: `python docs/make_transformers.py`."""

import logging
from functools import partial

import pages

from subquad.evaluation.audit import AuditReport
from tests.hf.published import reports


def block(report: AuditReport) -> str:
    """Return a report as the command prints it."""
    return f"```\n{str(report).rstrip()}\n```"


def blocks(found: dict[str, AuditReport]) -> pages.Blocks:
    """Return a function for each block of the page."""
    return {name.replace("_", "-"): partial(block, report) for name, report in found.items()}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    pages.rewrite("transformers.md", blocks(reports()))
