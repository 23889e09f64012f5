"""Several processes train as one does: the same windows, losses and weights, however the work is shared out."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from subquad.testing import assert_exact, assert_same_maths
from subquad.training.reading import RunOrder
from tests.training.cases import KINDS, MECHANISMS, MIXED, STACKS
from tests.training.metrics import records

pytestmark = pytest.mark.timeout(1200)  # the first test waits for all processes
CASES = Path(__file__).with_name("cases.py")


def run_cases(factory: pytest.TempPathFactory, name: str, timeout: int) -> Path:
    """The folder in which `cases.py` has left what the cases did; processes of pytest-xdist do them once together."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"cases-{name}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "stderr").exists():
            folder.mkdir()
            result = subprocess.run(
                [sys.executable, str(CASES), str(folder), name],
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            (folder / "stderr").write_text(result.stderr)
            assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `cases.py` has left what the quick cases did."""
    return run_cases(tmp_path_factory, "quick", 1100)


def told(folder: Path, name: str) -> Any:
    file = folder / f"{name}.json"
    assert file.is_file(), (folder / "stderr").read_text()
    return json.loads(file.read_text())


def numbers(run: Path) -> dict[str, torch.Tensor]:
    """All losses and measures of a run, by name and in order."""
    found: dict[str, list[float]] = {}
    for record in records(run):
        for key in ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy", "skipped"):
            if key in record:
                found.setdefault(key, []).append(float(record[key]))
    return {key: torch.tensor(values, dtype=torch.float64) for key, values in found.items()}


def assert_same_run(one: Path, other: Path) -> None:
    curves, others = numbers(one), numbers(other)
    assert curves.keys() == others.keys()
    for key, values in curves.items():
        assert_same_maths(others[key], values, f"{key} of {other.name}")
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert_same_maths(others[name], tensor, f"{name} of {other.name}")


def test_the_processes_end_well(quick: Path) -> None:
    assert told(quick, "quick") == [[0], [0, 0]], (quick / "stderr").read_text()
    assert told(quick, "resharding") == [[0] * 2, [0] * 4, [0], [0] * 2], (quick / "stderr").read_text()


def test_two_processes_evaluate_as_one(quick: Path) -> None:
    assert_same_run(quick / "one llp", quick / "ddp llp")


def test_packed_documents_count_their_labels_over_all_processes(quick: Path) -> None:
    assert_same_run(quick / "one packed", quick / "ddp packed")


@pytest.mark.parametrize("name", ["llp", "latte", "full", "performer", "probe", "packed"])
def test_a_sharded_model_trains_as_a_whole_one(quick: Path, name: str) -> None:
    assert_same_run(quick / f"one {name}", quick / f"fsdp {name}")


def test_a_run_goes_on_with_other_processes_sharded_or_not(quick: Path) -> None:
    assert_same_run(quick / "whole", quick / "moves")
    kept = sorted(path.name for path in (quick / "moves" / "checkpoints").glob("*/optimizer*"))
    assert kept == ["optimizer.pt", "optimizer.pt"], "those of one process, and of two that shard nothing"


def test_a_sharded_model_computes_in_bfloat16_and_keeps_float32(quick: Path) -> None:
    assert [told(quick, f"half {rank}") for rank in range(2)] == [["torch.bfloat16"]] * 2
    folder = quick / "half" / "checkpoints" / "checkpoint-2"
    kept = [load_file(file) for file in (folder / "model.safetensors", *folder.glob("optimizer/*.safetensors"))]
    assert len(kept) > 1
    assert {tensor.dtype for file in kept for tensor in file.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "size", "parts"), [("wide", 2, 1), ("deep", 1, 2), ("wide sharded", 2, 1), ("deep sharded", 1, 2)]
)
def test_each_process_sees_its_part_of_one_order(quick: Path, name: str, size: int, parts: int) -> None:
    seen = [told(quick, f"order {name} {rank}") for rank in range(2)]
    windows = {len(part) for each in seen for _, part in each}
    assert windows == {size}
    order = [window for batches in zip(*seen, strict=True) for _, part in batches for window in part]
    assert order == list(RunOrder(count_windows(quick), 0, 3 * 4))
    assert [step for step, _ in seen[0]] == [step for step in range(3) for _ in range(parts)]


def count_windows(folder: Path) -> int:
    record = next(record for record in records(folder / "order wide") if "epochs" in record)
    return round(record["step"] * 4 / record["epochs"])


def test_accumulation_exchanges_nothing_more(quick: Path) -> None:
    for rank in range(2):
        wide, deep = (told(quick, f"counts {name} {rank}") for name in ("wide", "deep"))
        assert wide == deep
        assert wide == {"gradients": 3}, "once a step"
        wide, deep = (told(quick, f"counts {name} sharded {rank}") for name in ("wide", "deep"))
        assert wide == deep
        assert wide == {"gradients": 3 * 3}, "for each of two blocks and for the rest, once a step"


def test_a_step_that_is_not_finite_in_one_process_is_left_out_by_all(quick: Path) -> None:
    for name in ("two skips", "shards skip"):
        assert_same_run(quick / "one skips", quick / name)
    assert numbers(quick / "two skips")["step"].tolist() == [1, 2, 4, 5, 6]
    assert numbers(quick / "two skips")["skipped"].tolist() == [1, 1, 1]


def test_or_it_ends_the_run_in_all_of_them(quick: Path) -> None:
    texts = [told(quick, f"stops {rank}") for rank in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("NonFiniteError: the loss is nan at step 3 in process 1, in the batch of windows [")


@pytest.mark.parametrize(("kind", "folder"), [("full", "full"), ("full sharded", "full s")])
def test_a_save_that_fails_in_one_process_fails_in_all_and_leaves_nothing(quick: Path, kind: str, folder: str) -> None:
    first, second = (told(quick, f"{kind} {rank}") for rank in range(2))
    assert first.startswith("SaveError: the checkpoint of step 4 could not be written to ")
    assert "No space left on device. Nothing of it is left" in first
    assert "newest checkpoint: checkpoint-2" in first
    assert "in process 0: [Errno 28] No space left on device" in second
    assert [path.name for path in (quick / folder / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_a_checkpoint_of_other_steps_is_refused_by_all(quick: Path) -> None:
    first, second = (told(quick, f"fewer {rank}") for rank in range(2))
    assert first == second
    assert "a step had 4 windows (processes 2 x batch.size 2 x batch.accumulation 1), has 2 (2 x 1 x 1)" in first
    assert "with 2 processes give batch.size=1 and batch.accumulation=2" in first


def test_processes_draw_random_numbers_of_their_own(quick: Path) -> None:
    folder = quick / "full" / "checkpoints" / "checkpoint-2"
    states = [load_file(folder / f"rng_state_{rank}.safetensors")["torch"] for rank in range(2)]
    assert not torch.equal(*states)


def test_neighbours_share_windows(quick: Path) -> None:
    first, second = (told(quick, f"context {rank}") for rank in range(2))
    assert first == second
    assert [window for _, part in first["seen"] for window in part] == list(RunOrder(count_windows(quick), 0, 24))
    assert first["tokens"] == 6 * 4 * 32
    assert_same_run(quick / "one llp", quick / "context")


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_process_that_is_lost_is_named_by_the_others(quick: Path, how: str) -> None:
    named = {"dies": "process 1 has ended or does not answer", "hangs": "process 1 does not come on from"}
    assert told(quick, f"{how} 0").startswith(f"LostProcessError: {named[how]}")
    assert told(quick, f"{how} 2").startswith("LostProcessError: ")


def test_processes_that_are_started_again_meet_at_the_store_of_before(quick: Path) -> None:
    assert told(quick, "restarted") == [[0, 0]] * 3, (quick / "stderr").read_text()
    for number in range(3):
        assert [told(quick, f"restarted {number} {rank}") for rank in range(2)] == [number] * 2


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty steps of a model with a layer of each mechanism in several ways."""
    return run_cases(tmp_path_factory, "curves", 1100)


@pytest.mark.slow
def test_all_processes_of_the_curves_end_well(curves: Path) -> None:
    worlds = (1, *(KINDS[kind][0] for kind in MIXED), 1, 2, 2, 4)
    assert told(curves, "curves") == [[0] * world for world in worlds], (curves / "stderr").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED)
def test_fifty_steps_are_the_same_by_one_two_and_four_processes(curves: Path, kind: str) -> None:
    assert len(numbers(curves / "one mixed")["loss"]) == 50
    assert_same_run(curves / "one mixed", curves / f"{kind} mixed")


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("kind", ["ddp 2", "fsdp 2"])
def test_other_models_are_the_same_by_one_and_two_processes(curves: Path, kind: str, name: str) -> None:
    assert_same_run(curves / f"one {name}", curves / f"{kind} {name}")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty steps of each mechanism by itself."""
    folder = run_cases(tmp_path_factory, "more", 1700)
    assert told(folder, "curves") == [[0] * world for world in (1, *(world for world, _ in KINDS.values()))]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_mechanism_is_the_same_by_one_two_and_four_processes(more: Path, kind: str, name: str) -> None:
    assert len(numbers(more / f"one {name}")["loss"]) == 50
    assert_same_run(more / f"one {name}", more / f"{kind} {name}")


@pytest.mark.slow
def test_of_two_times_two_processes_neighbours_see_the_same_windows(curves: Path) -> None:
    seen = [told(curves, f"context {rank}")["seen"] for rank in range(4)]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0] != seen[2]
    weights = load_file(curves / "context" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    assert_exact(torch.tensor(told(curves, "context 0")["tokens"]), torch.tensor(6 * 4 * 32))
