"""When a run stops early: signals, the time limit, and the command that goes on."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from subquad.attention import Attention
from subquad.training import checkpoint, train
from subquad.training.loop import Loop, StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_from_there(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    compute, calls = Loop.training_pass, []

    def interrupted(self: Loop, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            os.kill(os.getpid(), number)
        compute(self, *args, **kwargs)

    monkeypatch.setattr(Loop, "training_pass", interrupted)
    result = train(make_config())
    assert result.interrupted
    assert result.steps == 5
    assert f"received {signal.Signals(number).name}: saving after this step" in caplog.text
    assert result.command == f"subquad train --config '{tmp_path}/run/config.yaml'" or "'" not in result.command
    root = tmp_path / "run" / "checkpoints"
    assert checkpoint.newest_complete(root) == root / "checkpoint-5"
    assert not (tmp_path / "run" / "config.json").exists()

    monkeypatch.undo()
    again = train(make_config())
    assert (again.interrupted, again.steps) == (False, 10)
    assert (tmp_path / "run" / "config.json").exists()


def test_a_second_ctrl_c_interrupts_at_once_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_can_train_without_handlers() -> None:
    seen: list[bool] = []

    def run() -> None:
        with StopSignal() as stop:
            seen.append(stop.received)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]


def test_the_time_limit_ends_a_run_with_a_model_and_a_checkpoint(
    make_config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = train(make_config({"run.max_minutes": 1e-9}))
    assert (result.out_of_time, result.interrupted, result.steps) == (True, False, 1)
    assert "stopping at step 1 of 10: run.max_minutes=1e-09" in caplog.text
    assert (tmp_path / "run" / "config.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-1").is_dir()
    assert result.best_step == 1


def test_a_limit_that_is_not_reached_changes_nothing(make_config) -> None:
    result = train(make_config({"run.max_minutes": 60.0, "run.steps": 3}))
    assert (result.out_of_time, result.steps) == (False, 3)


def test_mechanisms_hear_of_every_step_of_the_optimizer_and_of_no_part_of_one(
    make_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, int]] = []
    monkeypatch.setattr(Attention, "after_step", lambda self, step: heard.append((id(self), step)))
    result = train(make_config({"run.steps": 4, "batch.accumulation": 3}))
    layers = [id(block.attention) for block in result.model.model.blocks()]
    assert heard == [(layer, step) for step in (1, 2, 3, 4) for layer in layers]


def test_what_a_mechanism_changes_after_a_step_is_saved_and_goes_on_bit_for_bit(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(self: Attention, step: int) -> None:
        with torch.no_grad():
            self.get_parameter("out.weight").mul_(1 - 0.1 / step)

    def weights(folder: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / folder / "model.safetensors")

    short = {"run.steps": 4, "run.eval_every": 0}
    train(make_config({**short, "run.folder": str(tmp_path / "without")}))
    monkeypatch.setattr(Attention, "after_step", shrink)
    train(make_config({**short, "run.folder": str(tmp_path / "whole")}))
    for steps in (1, 2):
        assert train(make_config({**short, "run.max_minutes": 1e-9})).steps == steps
    assert train(make_config(short)).steps == 4
    for name, weight in weights("whole").items():
        assert torch.equal(weight, weights("run")[name]), name
    shrunk = "model.layers.0.attention.out.weight"
    assert not torch.equal(weights("whole")[shrunk], weights("without")[shrunk])
