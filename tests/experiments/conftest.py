"""The folder of the experiments in helpers.py."""

import pytest

from tests.experiments.helpers import CLAIMS, CODE, MEASURE, TRAIN, write


@pytest.fixture
def experiments(tmp_path, monkeypatch):
    """Return a folder with `trained` and `measured`, inside the current folder."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "experiments"
    claim = {"id": "same", "says": "all is counted", "theirs": "4", "kind": "equal", "metric": "steps", "value": 4}
    write(root / "trained", TRAIN, [{**claim, "pairs": [[{"arm": "full"}]]}])
    write(root / "measured", MEASURE, CLAIMS, CODE)
    return root
