"""One sequence over several real processes."""

import pytest

from tests.parallel import cases, divided
from tests.parallel.processes import run_processes

MODULE = "tests.parallel.cases"
EXCHANGES = ("full", "latte", "llp_printed", "longformer", "luna", "window")
"""Mechanisms that use every exchange: a ring, prefixes, earlier tokens and first tokens."""


def calls(ranks, tokens, layers, decoders):
    """Cases of layers, of what they send, and of decoders."""
    made = {f"{what} {name}": [what, name, tokens] for name in layers for what in ("a_layer", "a_volume")}
    for name in decoders:
        made |= {f"loss {name}": ["a_loss", name, tokens, True], f"prefill {name}": ["a_prefill", name, tokens]}
    return {f"{name}, {ranks} x {tokens}": [ranks, MODULE, *call] for name, call in made.items()}


TWO = calls(2, 11, EXCHANGES, cases.DECODERS) | {"unequal parts": [2, MODULE, "unequal_parts"]}
TWO |= divided.CASES
# Log-step prefixes over four ranks, and reaches of several neighbours.
FOUR = calls(4, 3, EXCHANGES, ["hybrid with rope"]) | {"two groups of two": [4, MODULE, "two_groups"]}
MANY = FOUR | {f"loss {name} without checkpoints": [4, MODULE, "a_loss", name, 5] for name in cases.DECODERS}
MANY["averaged by DDP"] = [4, MODULE, "averaged_by_ddp"]
for size in (1, 2, 5, 16):
    MANY |= calls(4, size, cases.CAUSAL, cases.DECODERS)


def failures(found):
    """Join the tracebacks of failed cases."""
    return "\n".join(f"{name}: {text}" for name, text in found.items() if text)


def test_two_processes_are_one(tmp_path):
    """One test, because each start of the processes takes seconds."""
    found = run_processes(2, TWO, tmp_path)
    assert set(found) == set(TWO)
    assert not failures(found), failures(found)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_four_processes_are_one_at_many_sizes(tmp_path):
    found = run_processes(4, MANY, tmp_path, 900)
    assert not failures(found), failures(found)


@pytest.mark.slow
def test_a_process_that_fails_fails_the_case_with_its_traceback(tmp_path):
    fine, fails = [2, MODULE, "a_layer", "linear", 2], [2, MODULE, "fails_on_the_second"]
    found = run_processes(2, {"fine": fine, "fails": fails, "after": fine}, tmp_path)
    assert found["fine"] == ""
    assert "process 1: Traceback" in found["fails"]
    assert "RuntimeError: as it should" in found["fails"]
    assert "process 1 did not run 'after'" in found["after"]
