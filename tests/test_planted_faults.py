"""Faults planted in a copy of the source, one at a time: the test named here fails, and the others of its file pass.

Faults of mechanisms are in test_contract_bites.py, an audit's in evaluation/planted.py, the fuzzer's in fuzz/.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "experiments/harness/train.py"


class Fault(NamedTuple):
    """`before` occurs once in `file` and becomes `after`; of `test_file` the tests `caught_by` fail, and no others."""

    file: str
    before: str
    after: str
    test_file: str
    caught_by: set[str]


MEASURING = "tests/experiments/test_train.py"
BITS, SKIPPED = "test_held_out_text_is_measured_in_bits_a_byte", "test_skipped_tokens_are_not_measured"
FAULTS = {
    "training text is measured in place of held-out text": Fault(
        TRAIN, "result.corpus.held_out,", "result.corpus.train,", MEASURING, {BITS, SKIPPED}
    ),
    "bits are nats": Fault(TRAIN, "nats / math.log(2) /", "nats /", MEASURING, {BITS}),
    "characters are counted for bytes": Fault(TRAIN, "len(text.encode())", "len(text)", MEASURING, {BITS}),
    "skip is ignored": Fault(TRAIN, "skip=held.skip,", "", MEASURING, {SKIPPED}),
    "FLOPs leave out the backward pass": Fault(
        TRAIN,
        " + cost.backward_flops",
        "",
        MEASURING,
        {"test_the_flops_of_a_step_are_counted_forward_and_backward"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    for folder in ("subquad", "benchmarks", "experiments", "examples", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    source = (tmp_path / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.before) == 1, f"{fault.file} holds {fault.before!r} {source.count(fault.before)} times"
    (tmp_path / fault.file).write_text(source.replace(fault.before, fault.after), encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", fault.test_file],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    failed = {re.split(r"[\[ ]", line.partition("::")[2])[0] for line in re.findall(r"^FAILED (.*)", done.stdout, re.M)}
    assert failed == fault.caught_by, done.stdout[-3000:]
