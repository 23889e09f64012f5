"""One sequence over several real processes."""

import pytest

from tests.parallel import cases
from tests.parallel.processes import run_processes

MODULE = "tests.parallel.cases"
TWO = {f"layer {name}": [2, MODULE, "a_layer", name, 11] for name in cases.MECHANISMS}
TWO |= {f"volume {name}": [2, MODULE, "a_volume", name, 11] for name in cases.MECHANISMS}
TWO |= {f"loss {name}": [2, MODULE, "a_loss", name, 6, True] for name in cases.DECODERS}
TWO |= {f"prefill {name}": [2, MODULE, "a_prefill", name, 6] for name in cases.DECODERS}
TWO |= {"unequal parts": [2, MODULE, "unequal_parts"]}
# Log-step prefixes over four ranks, and reaches of several neighbours.
FOUR = {f"layer {name} of four": [4, MODULE, "a_layer", name, 3] for name in ("latte", "window", "full", "longformer")}
FOUR |= {"loss hybrid of four": [4, MODULE, "a_loss", "hybrid with rope", 3, True]}
FOUR |= {"prefill hybrid of four": [4, MODULE, "a_prefill", "hybrid with rope", 3]}
FOUR |= {"two groups of two": [4, MODULE, "two_groups"]}
MANY = {f"layer {name} {n}": [4, MODULE, "a_layer", name, n] for name in cases.MECHANISMS for n in (1, 2, 5, 16)}
MANY |= {f"volume {name} {n}": [4, MODULE, "a_volume", name, n] for name in cases.MECHANISMS for n in (1, 2, 5, 16)}
MANY |= {f"loss {name} {c}": [4, MODULE, "a_loss", name, 5, c] for name in cases.DECODERS for c in (False, True)}
MANY |= {f"prefill {name} {n}": [4, MODULE, "a_prefill", name, n] for name in cases.DECODERS for n in (1, 3, 9)}
MANY |= {"averaged by DDP": [4, MODULE, "averaged_by_ddp"]}


def failures(found):
    """Tracebacks of the cases that went wrong."""
    return "\n".join(f"{name}: {text}" for name, text in found.items() if text)


def test_two_and_four_processes_are_one(tmp_path):
    """One test, since parallel test runners would start the processes anew for others."""
    found = run_processes(4, TWO | FOUR, tmp_path)
    assert set(found) == set(TWO) | set(FOUR)
    assert not failures(found), failures(found)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_four_processes_are_one_at_many_sizes(tmp_path):
    found = run_processes(4, MANY, tmp_path, 900)
    assert not failures(found), failures(found)


@pytest.mark.slow
def test_a_process_that_fails_fails_the_case_with_its_traceback(tmp_path):
    cases_of_both = {"fine": [2, MODULE, "a_layer", "linear", 2], "fails": [2, MODULE, "fails_on_the_second"]}
    found = run_processes(2, cases_of_both | {"after": [2, MODULE, "a_layer", "linear", 2]}, tmp_path)
    assert found["fine"] == ""
    assert "process 1: Traceback" in found["fails"]
    assert "RuntimeError: as it should" in found["fails"]
    assert "process 1 did not run 'after'" in found["after"]


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(tmp_path):
    found = run_processes(2, {"hangs": [2, MODULE, "hangs_on_the_second"]}, tmp_path, 25)
    assert "the processes did not end within 25 seconds" in found["hangs"]
    assert "process 1 did not run 'hangs'" in found["hangs"]
