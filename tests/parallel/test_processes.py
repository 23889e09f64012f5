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


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return run_processes(4, {**TWO, **FOUR}, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def of_four_long(tmp_path_factory):
    return run_processes(4, MANY, tmp_path_factory.mktemp("long"), 900)


@pytest.mark.parametrize("case", TWO)
def test_two_processes_are_one(of_four, case):
    assert of_four[case] == "", of_four[case]


@pytest.mark.parametrize("case", FOUR)
def test_four_processes_are_one(of_four, case):
    assert of_four[case] == "", of_four[case]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", MANY)
def test_four_processes_are_one_at_many_sizes(of_four_long, case):
    assert of_four_long[case] == "", of_four_long[case]
