"""Commands that train take no more threads than there are cores that others leave free, and keep to their number."""

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad import memory
from subquad.cli import main, threads
from subquad.cli.threads import kept_threads, with_threads
from subquad.training import RunConfig, TrainConfig


def busy_after(monkeypatch: pytest.MonkeyPatch, seconds: list[dict[int, float] | None]) -> None:
    """The busy seconds of the cores, at one look after another; nobody waits between them."""
    monkeypatch.setattr(memory, "_busy_seconds", lambda: seconds.pop(0))
    monkeypatch.setattr(memory.time, "sleep", lambda _: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@pytest.mark.parametrize(
    ("busy", "threads"),
    [
        ([0.0, 0.0, 0.0, 0.0], 4),
        ([0.2, 0.0, 0.0, 0.0], 3),
        ([0.1, 0.1, 0.0, 0.0], 3),  # one process that moves between two cores
        ([0.02, 0.02, 0.02, 0.02], 4),
        ([0.2, 0.2, 0.2, 0.2], 1),
    ],
)
def test_a_core_that_is_busy_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, busy: list[float], threads: int
) -> None:
    busy_after(monkeypatch, [dict.fromkeys(range(4), 7.0), {core: 7 + more for core, more in enumerate(busy)}])
    assert memory.free_threads(0.2) == threads


def test_where_the_system_says_nothing_the_number_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_after(monkeypatch, [None])
    assert memory.free_threads() == 4


def test_more_cores_than_threads_leave_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    busy_after(monkeypatch, [dict.fromkeys(range(8), 0.0), {**dict.fromkeys(range(8), 0.0), 3: 0.2}])
    assert memory.free_threads(0.2) == 4


def spin() -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="the cores' times are read from /proc/stat")
def test_a_process_that_computes_is_seen() -> None:
    before = memory._busy_seconds()
    assert before is not None
    assert set(before) == os.sched_getaffinity(0)
    process = multiprocessing.get_context("fork").Process(target=spin)
    process.start()
    time.sleep(1)
    process.kill()
    process.join()
    after = memory._busy_seconds()
    assert after is not None
    assert sum(after.values()) - sum(before.values()) > 0.4


def make(folder: Path, **run: Any) -> RunConfig:
    return RunConfig(folder=str(folder), device="cpu", steps=100, **run)


def test_a_new_run_says_how_many_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    with caplog.at_level(logging.WARNING):
        assert with_threads(make(tmp_path / "new")).threads == 1
    assert "run.threads is 1: other processes keep the other cores busy" in caplog.text
    assert with_threads(make(tmp_path / "new", threads=3)).threads == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert with_threads(make(tmp_path / "new")).threads is None


@pytest.mark.parametrize("kept", [2, None])
def test_a_run_that_goes_on_keeps_the_number_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int | None
) -> None:
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    TrainConfig(run=make(tmp_path, threads=kept)).to_file(tmp_path / "config.yaml")
    assert with_threads(make(tmp_path)).threads == kept


@pytest.mark.parametrize("kept", [2, None])
def test_a_conversion_that_goes_on_keeps_its_number_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int | None
) -> None:
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    file = tmp_path / "conversion.json"
    assert kept_threads(None, "cpu", file, "threads") == 1
    file.write_text(json.dumps({"threads": kept}))
    assert kept_threads(None, "cpu", file, "threads") == kept


def test_the_command_keeps_freed_memory_and_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    arguments = [
        *("--task", "probe", "--model.dim", "8", "--model.num_layers", "1", "--model.num_heads", "1"),
        *(
            "--model.attention",
            "linear",
            "--model.position",
            "none",
            "--probe.name",
            "copy",
            "--probe.symbols",
            "4",
            "--probe.examples",
            "8",
        ),
        *("--probe.held_out", "2", "--batch.length", "10", "--batch.size", "2", "--schedule.warmup", "0"),
        *("--run.steps", "1", "--run.device", "cpu", "--run.folder", str(tmp_path / "run")),
    ]
    assert main(["train", *arguments]) == 0
    assert kept == [True]
    assert TrainConfig.from_file(tmp_path / "run" / "config.yaml").run.threads == 1
