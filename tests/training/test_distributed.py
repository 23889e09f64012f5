"""Several processes train as one does: the same windows, losses and weights, however the work is shared out."""

import fcntl
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subquad.testing import assert_same_maths
from subquad.training.reading import RunOrder
from tests.training.cases import KINDS, STACKS
from tests.training.helpers import python, records, steps_of

pytestmark = [pytest.mark.timeout(1200), pytest.mark.together]  # the first test waits for all processes


def run_cases(factory, name):
    """Return the folder in which `cases.py` leaves what it finds; processes of pytest-xdist run it once together."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"cases-{name}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "stderr").exists():
            folder.mkdir()
            result = python(Path(__file__).with_name("cases.py"), folder, name, timeout=1100)
            (folder / "stderr").write_text(result.stderr)
            assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run_cases(tmp_path_factory, "quick")


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    return run_cases(tmp_path_factory, "curves")


def told(folder, name):
    file = folder / f"{name}.json"
    assert file.is_file(), (folder / "stderr").read_text()
    return json.loads(file.read_text())


def assert_same_run(one, other):
    for key in ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy", "skipped"):
        curve, twin = ([float(line[key]) for line in records(run) if key in line] for run in (one, other))
        assert len(curve) == len(twin)
        assert_same_maths(*torch.tensor([twin, curve], dtype=torch.float64), f"{key} of {other.name}")
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert_same_maths(others[name], tensor, f"{name} of {other.name}")


def test_the_processes_end_well(quick):
    assert told(quick, "quick") == [[0], [0, 0]], (quick / "stderr").read_text()
    assert told(quick, "resharding") == [[0] * 2, [0] * 4, [0], [0] * 2], (quick / "stderr").read_text()


@pytest.mark.parametrize(("kind", "name"), [("ddp", "llp"), ("ddp", "packed"), ("fsdp", "packed")])
def test_several_processes_train_and_evaluate_as_one(quick, kind, name):
    """By `ddp` each with all of the model, by `fsdp` with shards; packed windows hold different numbers of labels."""
    assert_same_run(quick / f"one {name}", quick / f"{kind} {name}")


def test_a_run_is_resumed_by_other_processes_sharded_or_not(quick):
    assert_same_run(quick / "whole", quick / "moves")
    kept = sorted(path.name for path in (quick / "moves" / "checkpoints").glob("*/optimizer*"))
    assert kept == ["optimizer", "optimizer.pt"], "those of two processes, and of one"


def test_a_sharded_model_computes_in_bfloat16_and_keeps_float32(quick):
    assert [told(quick, f"half {rank}") for rank in range(2)] == [["torch.bfloat16"]] * 2
    folder = quick / "half" / "checkpoints" / "checkpoint-2"
    kept = [load_file(file) for file in (folder / "model.safetensors", *folder.glob("optimizer/*.safetensors"))]
    assert len(kept) > 1
    assert {tensor.dtype for file in kept for tensor in file.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["order", "order sharded"])
def test_each_process_sees_its_part_of_one_order_and_accumulation_exchanges_no_more_gradients(quick, kind):
    told_by = [told(quick, f"{kind} {rank}") for rank in range(2)]
    seen = [each["seen"] for each in told_by]
    assert {len(part) for each in seen for _, part in each} == {1}
    order = [window for batches in zip(*seen, strict=True) for _, part in batches for window in part]
    assert order == list(RunOrder(count_windows(quick), 0, 3 * 4))
    assert [step for step, _ in seen[0]] == [step for step in range(3) for _ in range(2)]
    once_a_step = 3 * 3 if kind == "order sharded" else 3  # of a sharded model for each of two blocks and for the rest
    assert [each["gradients"] for each in told_by] == [once_a_step] * 2


def count_windows(folder):
    record = next(record for record in records(folder / "order") if "epochs" in record)
    return round(record["step"] * 4 / record["epochs"])


def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_all_or_ends_the_run_in_all(quick):
    for name in ("two skips", "shards skip"):
        assert_same_run(quick / "one skips", quick / name)
    skipped = [(line["step"], line.get("skipped")) for line in records(quick / "two skips")]
    assert skipped == [(1, None), (2, None), (4, 1), (5, 1), (6, 1)]
    texts = [told(quick, f"stops {rank}") for rank in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("NonFiniteError: the loss is nan at step 3 in process 1, in the batch of windows [")


@pytest.mark.parametrize("kind", ["full", "full sharded"])
def test_a_save_that_fails_in_one_process_fails_in_all_and_leaves_nothing(quick, kind):
    first, second = (told(quick, f"{kind} {rank}") for rank in range(2))
    assert first.startswith("SaveError: the checkpoint of step 4 could not be written to ")
    assert "No space left on device. It was deleted" in first
    assert "newest checkpoint: checkpoint-2" in first
    assert "in process 0: [Errno 28] No space left on device" in second
    assert steps_of(quick / kind / "checkpoints") == [2]


def test_processes_draw_random_numbers_of_their_own_and_all_refuse_a_checkpoint_of_other_steps(quick):
    folder = quick / "full" / "checkpoints" / "checkpoint-2"
    states = [load_file(folder / f"rng_state_{rank}.safetensors")["torch"] for rank in range(2)]
    assert not torch.equal(*states)
    first, second = (told(quick, f"fewer {rank}") for rank in range(2))
    assert first == second
    assert "a step had 4 windows (processes 2 x batch.size 2 x batch.accumulation 1), has 2 (2 x 1 x 1)" in first
    assert "for 2 processes set batch.size=1 and batch.accumulation=2" in first


def test_neighbours_share_windows(quick):
    first, second = (told(quick, f"context {rank}") for rank in range(2))
    assert first == second
    assert [window for _, part in first["seen"] for window in part] == list(RunOrder(count_windows(quick), 0, 16))
    assert first["tokens"] == 4 * 4 * 32
    assert_same_run(quick / "one llp", quick / "context")


@pytest.mark.parametrize(
    ("how", "named"), [("dies", "has ended or does not answer"), ("hangs", "hangs in the end of step 1")]
)
def test_a_process_that_is_lost_is_named_by_the_others(quick, how, named):
    assert told(quick, f"{how} 0").startswith(f"LostProcessError: process 1 {named}")
    assert told(quick, f"{how} 2").startswith("LostProcessError: ")


def test_processes_that_are_started_again_meet_at_the_store_of_before(quick):
    assert told(quick, "restarted") == [[0, 0]] * 3, (quick / "stderr").read_text()
    for number in range(3):
        assert [told(quick, f"restarted {number} {rank}") for rank in range(2)] == [number] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_are_the_same_by_one_two_and_four_processes(curves, kind):
    assert told(curves, f"{kind} mixed"), (curves / "stderr").read_text()
    assert records(curves / "one mixed")[-1]["step"] == 50
    assert_same_run(curves / "one mixed", curves / f"{kind} mixed")


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("kind", ["ddp 2", "fsdp 2"])
def test_other_models_are_the_same_by_one_and_two_processes(curves, kind, name):
    assert told(curves, f"{kind} {' '.join(STACKS)}"), (curves / "stderr").read_text()
    assert_same_run(curves / f"one {name}", curves / f"{kind} {name}")
