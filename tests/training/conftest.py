"""A run small enough for a test: bytes of a short text, several epochs, dropout, accumulation."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from subquad.training import RunResult, TrainConfig, train
from tests.training.configs import config_of, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file; the folder `texts` beside it holds documents of one to three dozen bytes."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def config_in(text: Path) -> Callable[..., TrainConfig]:
    """Make the configuration of a run in a folder, as `make_config` does."""
    return lambda home, *changes, **run: config_of(text, home, *changes, **run)


@pytest.fixture
def make_config(tmp_path: Path, config_in: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """Make a run in `tmp_path` from changes as `{"model.dropout": 0.0}`; keywords are settings of the group `run`."""
    return lambda *changes, **run: config_in(tmp_path, *changes, **run)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, config_in: Callable[..., TrainConfig]) -> RunResult:
    """A finished run of `make_config()`: four steps, with the checkpoints 2 and 4. Don't change its folder."""
    return train(config_in(tmp_path_factory.mktemp("finished")))


@pytest.fixture
def run_at_4(finished: RunResult, tmp_path: Path) -> Path:
    """A copy of the finished run where `make_config` has its run."""
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))
