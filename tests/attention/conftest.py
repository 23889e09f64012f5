"""Mark as slow the laws that a contract class does not name in `laws`, and most compilations by inductor."""

import re

import pytest

from subquad.testing import AttentionContract

INDUCTOR = {"TestLatte", "TestLinear", "TestWindow"}
"""Running softmax, scan and block attention: other mechanisms give inductor no other operations."""


def pytest_itemcollected(item: pytest.Item) -> None:
    contract, law = getattr(item, "cls", None), re.match(r"test_law_(\d+)(.*inductor)?", item.name)
    if law is None or not issubclass(contract, AttentionContract):
        return
    if int(law[1]) not in contract.laws or (law[2] and contract.__name__ not in INDUCTOR):
        item.add_marker("slow")
