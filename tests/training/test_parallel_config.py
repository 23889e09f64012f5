"""Settings of several processes that can't be followed are refused before anything is read."""

from pathlib import Path
from typing import Any

import pytest

from subquad.training import LoraConfig, TrainConfig
from subquad.training.config import ParallelConfig
from subquad.training.errors import CheckpointError
from subquad.training.processes import FOREIGN, Processes, check_parallel, join, leave


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"context": 0}, r"parallel\.context must be at least 1, got 0"),
        ({"timeout": 0.0}, r"parallel\.timeout must be a positive number of seconds, got 0\.0"),
        ({"timeout": float("inf")}, r"parallel\.timeout must be a positive number of seconds, got inf"),
    ],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "probe", "parallel": {"context": 2}}, r"parallel\.context=2 is for task=language, got task=probe"),
        (
            {"batch": {"length": 33}, "parallel": {"context": 2}},
            r"batch\.length=33 must be a multiple of parallel\.cont",
        ),
        (
            {"lora": {"rank": 2, "base": "x"}, "parallel": {"shard": True}},
            r"parallel\.shard=true is not there for LoRA",
        ),
        ({"lora": {"rank": 2, "base": "x"}, "parallel": {"context": 2}}, r"parallel\.context=2 is not there for LoRA"),
        (
            {"data": {"pack": "documents"}, "parallel": {"context": 2}},
            r"parallel\.context=2 takes no packed documents: set data\.pack=stream",
        ),
        (
            {"model": {"dropout": 0.1}, "parallel": {"context": 2}},
            r"parallel\.context=2 takes no dropout.*set model\.dropout=0",
        ),
        (
            {"model": {"attention_dropout": 0.1}, "parallel": {"context": 2}},
            r"other numbers: set model\.attention_dropout=0, got 0\.1",
        ),
        ({"run": {"nonfinite_limit": 0}}, r"run\.nonfinite_limit must be at least 1, got 0"),
        ({"run": {"nonfinite": "hope"}}, r"nonfinite must be one of its choices, got 'hope'"),
    ],
)
def test_what_no_number_of_processes_can_do_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_lora_takes_part_without_sharding() -> None:
    assert TrainConfig(lora=LoraConfig(rank=2, base="x"), parallel=ParallelConfig(timeout=5.0)).parallel.timeout == 5.0


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_switches_of_accelerate_that_would_be_ignored_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_parallel(TrainConfig())
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=f"{name} is set, which subquad train does not follow: unset it"):
        check_parallel(TrainConfig())


@pytest.mark.parametrize(("name", "choice", "instead"), [
    ("ACCELERATE_MIXED_PRECISION", "fp16", r"run\.precision chooses the precision"),
    ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "training is not compiled"),
])  # fmt: skip
def test_a_choice_of_accelerate_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, choice: str, instead: str
) -> None:
    monkeypatch.setenv(name, "no")
    check_parallel(TrainConfig())
    monkeypatch.setenv(name, choice)
    with pytest.raises(ValueError, match=f"{name}={choice} is set, which subquad train does not .* it; {instead}"):
        check_parallel(TrainConfig())


def test_the_context_must_divide_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = TrainConfig(parallel=ParallelConfig(context=4))
    with pytest.raises(ValueError, match=r"parallel\.context=4 must divide the number of processes, got 6"):
        check_parallel(config)


def test_a_stack_does_not_share_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = TrainConfig(parallel=ParallelConfig(context=2))
    config = config.replace(model=config.model.replace(attention="perceiver_ar"))
    with pytest.raises(ValueError, match=r"attention 'perceiver_ar' can't share a window: parallel\.context must be 1"):
        check_parallel(config)


def test_sharding_by_one_process_says_that_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    join(ParallelConfig(shard=True), "cpu")
    assert "parallel.shard has no effect with one process" in caplog.text


def test_ranks_of_data_and_context() -> None:
    places = [(p.data_rank, p.data_ranks, p.first) for p in (Processes(rank, 6, 2) for rank in range(6))]
    assert places == [(rank // 2, 3, rank == 0) for rank in range(6)]


def test_one_process_meets_nobody() -> None:
    assert join(ParallelConfig(context=1), "cpu") == Processes()
    leave()


def test_one_process_raises_what_its_work_raises(tmp_path: Path) -> None:
    processes = Processes()

    def fail() -> None:
        raise CheckpointError("no luck")

    assert processes.by_the_first(lambda: 3) == 3
    with pytest.raises(CheckpointError, match="no luck"):
        processes.by_the_first(fail)
    with pytest.raises(CheckpointError, match="no luck"), processes.together():
        fail()
    with pytest.raises(RuntimeError, match="by itself"), processes.watched():
        raise RuntimeError("by itself")
