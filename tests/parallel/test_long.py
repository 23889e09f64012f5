"""A million tokens on two processes; `SUBQUAD_LONG=65536` tries fewer. Run with `-s` for seconds and memory."""

import os

import pytest

from tests.parallel.processes import run_processes

TOKENS = int(os.environ.get("SUBQUAD_LONG", 1 << 20))
DIM = 32


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llp", "latte", "linear", "elita"])
def test_a_prompt_and_a_step_of_a_million_tokens(name, tmp_path):
    case = {name: [2, "tests.parallel.long", "a_prompt_and_a_step", name, TOKENS, DIM]}
    errors = run_processes(2, case, tmp_path, 3500)
    print(*(file.read_text().strip() for file in sorted(tmp_path.glob("*.out"))), sep="\n")
    assert errors[name] == ""
