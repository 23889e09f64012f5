"""Processes that read: what they read is the same, and one that dies or hangs is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from subquad.data import TokenSet, windows_of
from subquad.testing import assert_exact
from subquad.training import TrainConfig, train
from subquad.training.errors import ReadError
from subquad.training.reading import NumberedWindows, naming
from tests.data.sets import make_set


class Spoiled:
    """Windows of which one ends its process, or keeps it waiting."""

    def __init__(self, windows: Any, bad: int, spoil: Callable[[], None]) -> None:
        self.windows, self.bad, self.spoil = windows, bad, spoil
        self.tokens, self.place = windows.tokens, windows.place

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            self.spoil()
        return self.windows[index]


def die() -> None:
    os._exit(1)


def hang() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("spoil", "seconds", "said"), [(die, 60, "died"), (hang, 5, r"did not answer for 5 s \(data.worker_timeout\)")]
)
def test_a_lost_process_is_named_with_what_it_read(
    tmp_path: Path, spoil: Callable[[], None], seconds: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # or it waits for the hung one
    make_set(tmp_path / "set", [[20], [30]])
    windows = NumberedWindows(Spoiled(windows_of(TokenSet(tmp_path / "set"), 5), 6, spoil), 1)  # type: ignore[arg-type]
    loader = DataLoader(windows, batch_size=1, sampler=[6, 0], num_workers=1, timeout=seconds)
    with (
        pytest.raises(
            ReadError,
            match=rf"reads the data {said}: worker 0 was reading window 6 \(number 2 of .*00001\.tokens\)",
        ),
        naming(windows, seconds),
    ):
        list(loader)


def test_other_errors_are_as_they_are() -> None:
    windows = NumberedWindows([{"input_ids": torch.tensor([1])}], 1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"^something else$"), naming(windows, 1):
        raise RuntimeError("something else")
    for lost in (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), ConnectionResetError("reset")):
        with pytest.raises(ReadError, match="died: none was at a window"), naming(windows, 1):
            raise lost
    with pytest.raises(ConnectionResetError, match="reset"), naming(NumberedWindows([]), 1):  # type: ignore[arg-type]
        raise ConnectionResetError("reset")
    assert windows.where(0) == "window 0"


def weights(config: TrainConfig) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in train(config).model.parameters()])


def test_processes_that_read_change_no_bit(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    short = {"run.steps": 2, "run.eval_every": 0, "schedule.warmup": 1}
    alone = weights(make_config(short))
    ahead = weights(make_config({**short, "run.folder": str(tmp_path / "ahead"), "data.workers": 1}))
    assert_exact(ahead, alone)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("workers", -1, "workers must be at least 0, got -1"),
        ("worker_timeout", 0.0, "worker_timeout must be a positive number of seconds, got 0.0"),
    ],
)
def test_numbers_out_of_range(make_config: Callable[..., TrainConfig], name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config({f"data.{name}": value})
