"""Commands leave busy cores to others; trainings resume with the number of threads they began with."""

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from subquad import memory
from subquad.cli import main, threads
from subquad.cli.threads import keep_to_idle_cores, kept_threads, one_thread, with_threads
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


@pytest.fixture
def busy(monkeypatch):
    """A machine of which other processes leave one of two cores; return the numbers of threads that are set."""
    chosen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(threads, "free_threads", lambda: 1)
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return chosen


def run(folder, **options):
    return RunConfig(folder=str(folder), device="cpu", steps=100, **options)


def test_a_new_run_logs_its_number_of_threads_and_ends_with_it(tmp_path, monkeypatch, caplog, busy):
    with caplog.at_level(logging.WARNING):
        assert with_threads(run(tmp_path / "new")).threads == 1
    assert "1 of 2 CPU threads are used because other processes keep the other cores busy; run.threads" in caplog.text
    assert with_threads(run(tmp_path / "new", threads=3)).threads == 3
    assert busy == [1, 3]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert with_threads(run(tmp_path / "new")).threads is None
    assert busy == [1, 3]


@pytest.mark.parametrize("arguments", [
    ["eval", "x"],
    ["generate", "x"],
    ["complete", "x"],
    ["serve", "x"],
    ["probe", "x"],
    ["audit", "x"],
    ["train", "--recipe", "tiny"],
    ["convert", "x"],
], ids=lambda arguments: arguments[0])  # fmt: skip
def test_every_command_that_computes_looks_for_idle_cores(tmp_path, monkeypatch, capsys, busy, arguments):
    def looks():
        raise ArithmeticError("it looks")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(threads, "free_threads", looks)
    assert main(arguments) == 1
    assert capsys.readouterr().err == "error: it looks\n"


def test_a_command_that_keeps_no_number_of_threads_warns_of_nothing(caplog, busy):
    with caplog.at_level(logging.INFO):
        keep_to_idle_cores("cpu")
    assert [record.levelname for record in caplog.records if "1 of 2 CPU threads" in record.message] == ["INFO"]
    assert busy == [1]


def test_one_thread_is_for_the_block_alone(busy):
    with pytest.raises(ArithmeticError), one_thread():
        raise ArithmeticError
    assert busy == [1, 2]


def test_a_number_that_the_user_sets_is_kept(monkeypatch, busy):
    keep_to_idle_cores("cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    keep_to_idle_cores("cpu")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    keep_to_idle_cores("auto")
    assert busy == [1, 2]


@pytest.mark.parametrize("kept", [2, None])
def test_a_resumed_run_or_conversion_keeps_its_number_of_threads(tmp_path, busy, kept):
    TrainConfig(run=run(tmp_path, threads=kept)).to_file(tmp_path / "config.yaml")
    assert with_threads(run(tmp_path)).threads == kept
    file = tmp_path / "conversion.json"
    assert kept_threads(None, "cpu", file, "threads") == 1
    file.write_text(json.dumps({"threads": kept}))
    assert kept_threads(None, "cpu", file, "threads") == kept
