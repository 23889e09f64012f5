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


MEASURE, MEASURING = "experiments/harness/measure.py", "tests/experiments/test_measure.py"
BITS, SKIPPED = "test_held_out_text_is_measured_in_bits_a_byte", "test_skipped_tokens_are_not_measured"
BASELINES, BLOCKS = "test_baselines_are_counted_on_the_same_text", "test_blocks_follow_the_text"
FAULTS = {
    "training text is measured in place of held-out text": Fault(
        MEASURE,
        "shard, tokenizer = result.corpus.held_out,",
        "shard, tokenizer = result.corpus.train,",
        MEASURING,
        {BITS, BASELINES, SKIPPED, BLOCKS},
    ),
    "bits are nats": Fault(MEASURE, "nats / math.log(2) / size", "nats / size", MEASURING, {BITS}),
    "characters are counted for bytes": Fault(
        MEASURE, "size, words = len(scored.encode()),", "size, words = len(scored),", MEASURING, {BITS}
    ),
    "skip is ignored": Fault(
        MEASURE,
        " if window.scored > held.skip]",
        "]",
        MEASURING,
        {SKIPPED, "test_what_leaves_nothing_to_score_is_refused"},
    ),
    "FLOPs leave out the backward pass": Fault(
        TRAIN,
        " + cost.backward_flops",
        "",
        "tests/experiments/test_train.py",
        {"test_the_flops_of_a_step_are_counted_forward_and_backward"},
    ),
    "a learning rate is chosen on the text of the result": Fault(
        TRAIN,
        "token_nats(result, tokens[own:end], held)",
        "token_nats(result, tokens[:own], held)",
        "tests/experiments/test_rates.py",
        {"test_an_arm_is_searched_once_and_its_seeds_use_the_best_rate"},
    ),
    "the blocks of two arms are not paired": Fault(
        "experiments/harness/noise.py",
        "[a - b for a, b in zip(*sides, strict=True)]",
        "[a - b for a, b in zip(sides[0], reversed(sides[1]), strict=True)]",
        "tests/experiments/test_noise.py",
        {
            "test_the_error_of_the_text_is_the_limit_of_a_paired_bootstrap_over_blocks",
            "test_the_errors_of_seeds_and_text_add_in_squares",
        },
    ),
    "a gate asks for no more than the baseline": Fault(
        "experiments/harness/claims.py",
        "else ERRORS * one.error",
        "else 0.0",
        "tests/experiments/test_claims.py",
        {"test_a_claim_on_models_needs_a_reference_that_learned_something"},
    ),
    "a timed arm runs beside others": Fault(
        "experiments/harness/runner.py",
        " and not unit.timed and ",
        " and ",
        "tests/experiments/test_runner.py",
        {"test_each_unit_is_submitted_once_and_timed_ones_run_when_nothing_else_does"},
    ),
    "temperature is applied after top-p": Fault(
        "subquad/generation/sampling.py",
        """    p_V = ((logits_V - logits_V[0]) / sampling.temperature)[: sampling.top_k].softmax(-1)
    if sampling.top_p is not None:
        p_V = p_V[p_V.cumsum(-1) - p_V < sampling.top_p]
""",
        """    p_V = (logits_V - logits_V[0])[: sampling.top_k].softmax(-1)
    if sampling.top_p is not None:
        p_V = p_V[p_V.cumsum(-1) - p_V < sampling.top_p]
    p_V = p_V ** (1 / sampling.temperature)
    p_V = p_V / p_V.sum()
""",
        "tests/generation/test_sampling.py",
        {"test_the_nucleus_is_that_of_the_tempered_distribution"},
    ),
    "an old checkpoint is deleted before the new one has its name": Fault(
        "subquad/training/checkpoint.py",
        """        shutil.rmtree(trash, ignore_errors=True)
        os.replace(target, trash)
    os.replace(source, target)
""",
        """        shutil.rmtree(target)
    os.replace(source, target)
""",
        "tests/training/test_saving.py",
        {"test_a_crash_at_any_moment_of_a_save_leaves_a_complete_checkpoint"},
    ),
    "config.json is moved first": Fault(
        "subquad/training/saving.py",
        "key=lambda path: path.name in last)",
        "key=lambda path: path.name not in last)",
        "tests/training/test_saving.py",
        {"test_a_final_model_that_has_its_configuration_has_all_its_files_after_any_crash"},
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
