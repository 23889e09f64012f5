"""Commands that train leave busy cores to others, and resume with the number of threads they began with."""

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from subquad import memory
from subquad.cli import threads
from subquad.cli.threads import kept_threads, with_threads
from subquad.training import RunConfig, TrainConfig

IDLE = dict.fromkeys(range(4), 7.0)


@pytest.mark.parametrize(("seconds", "left"), [
    ([IDLE, IDLE | {0: 7.2}], 3),
    ([IDLE, IDLE | {0: 7.1, 1: 7.1}], 3),  # one process that moves between two cores
    ([IDLE, dict.fromkeys(range(4), 7.02)], 4),
    ([IDLE, dict.fromkeys(range(4), 7.2)], 1),
    ([None], 4),  # unknown
    ([dict.fromkeys(range(8), 0.0), dict.fromkeys(range(8), 0.0) | {3: 0.2}], 4),  # more cores than threads
])  # fmt: skip
def test_a_busy_core_is_left_to_others(monkeypatch, seconds, left):
    seconds = list(seconds)
    monkeypatch.setattr(memory, "_busy_seconds", lambda: seconds.pop(0))
    monkeypatch.setattr(memory.time, "sleep", lambda _: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert memory.free_threads(0.2) == left


def spin():
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="the cores' times are read from /proc/stat")
def test_a_process_that_computes_is_seen():
    before = memory._busy_seconds()
    assert set(before) == os.sched_getaffinity(0)
    process = multiprocessing.get_context("fork").Process(target=spin)
    process.start()
    time.sleep(0.5)
    process.kill()
    process.join()
    assert sum(memory._busy_seconds().values()) - sum(before.values()) > 0.2


def run(folder, **options):
    return RunConfig(folder=str(folder), device="cpu", steps=100, **options)


def test_a_new_run_logs_its_number_of_threads(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    with caplog.at_level(logging.WARNING):
        assert with_threads(run(tmp_path / "new")).threads == 1
    assert "run.threads is set to 1 because other processes keep the other cores busy" in caplog.text
    assert with_threads(run(tmp_path / "new", threads=3)).threads == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert with_threads(run(tmp_path / "new")).threads is None


@pytest.mark.parametrize("kept", [2, None])
def test_a_resumed_run_or_conversion_keeps_its_number_of_threads(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    TrainConfig(run=run(tmp_path, threads=kept)).to_file(tmp_path / "config.yaml")
    assert with_threads(run(tmp_path)).threads == kept
    file = tmp_path / "conversion.json"
    assert kept_threads(None, "cpu", file, "threads") == 1
    file.write_text(json.dumps({"threads": kept}))
    assert kept_threads(None, "cpu", file, "threads") == kept
