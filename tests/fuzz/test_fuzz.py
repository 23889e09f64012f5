"""Damaged inputs of every reader: each is read or refused by an error that names the file, and nothing else happens."""

import os

import pytest

from tests.fuzz import run
from tests.fuzz.targets import TARGETS, Target

MINUTES = float(os.environ.get("SUBQUAD_FUZZ_MINUTES", "10"))


@pytest.fixture
def tried(request, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    return run.Tried(request.param, tmp_path)


def whole(tried):
    """An input that changes nothing."""
    return run.Input(0, tried.files[0], (tried.valid / tried.files[0]).read_bytes())


@pytest.mark.parametrize("tried", [name for name, target in TARGETS.items() if target.quick], indirect=True)
def test_what_is_valid_is_read_and_damage_is_refused(tried):
    assert tried.attempt(whole(tried)) == ("read", None)
    inputs = [*run.kept(tried.name), *map(tried.input, range(tried.target.quick))]
    faults = [(now.number, now.file, fault) for now in inputs if (fault := tried.attempt(now).fault) is not None]
    assert faults == []


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 1_800)
def test_every_reader_for_ten_minutes(capsys):
    with capsys.disabled():
        assert run.summary(list(TARGETS), 60 * MINUTES) == []


def test_an_input_is_the_same_each_time(tmp_path):
    first, second = (run.Tried("shard", tmp_path / name) for name in ("a", "b"))
    assert [first.input(n) for n in range(20)] == [second.input(n) for n in range(20)]
    assert len({first.input(n).content for n in range(20)}) > 15


def test_kept_inputs_belong_to_targets():
    names = {folder.name for folder in run.FOUND.iterdir() if folder.is_dir()}
    assert names <= set(TARGETS)
    for name in names:
        for now in run.kept(name):
            assert now.file
            assert len(now.content) <= run.KEPT


def raises(error):
    def read(folder):
        raise error

    return read


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (raises(KeyError("a.txt")), "KeyError"),
        (raises(MemoryError("a.txt")), "MemoryError"),
        (raises(RecursionError("a.txt")), "RecursionError"),
        (raises(SystemExit("a.txt")), "SystemExit"),
        (raises(ValueError("it is damaged")), "names no file"),
        (raises(ValueError("a.txt is damaged")), None),
        (raises(FileNotFoundError("a.txt is not there")), None),
    ],
    ids=lambda value: str(value) if not callable(value) else "",
)
def test_the_fuzzer_tells_faults_from_refusals(read, fault, tmp_path, monkeypatch):
    monkeypatch.setitem(TARGETS, "planted", Target(lambda folder: (folder / "a.txt").write_bytes(b"x"), read))
    tried = run.Tried("planted", tmp_path)
    found = tried.attempt(whole(tried)).fault
    assert (found is None) if fault is None else fault in found


PLANTED = """
import os, time
from pathlib import Path
from tests.fuzz import run
from tests.fuzz.targets import TARGETS, Target

def read(folder):
    if (folder / "a.txt").read_bytes() != b"0123456789":
        FAULT

run.FOUND, run.PEAK = Path(__file__).with_name("found"), 1 << 26
TARGETS["planted"] = Target(lambda folder: (folder / "a.txt").write_bytes(b"0123456789"), read)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("os.abort()", "dies with status -6"),
        ("time.sleep(99)", "hangs: no answer in 2 s"),
        ("bytearray(1 << 34)", "MemoryError"),
        ("bytearray(b'x') * (1 << 28)", "bytes of memory"),
    ],
)
def test_a_child_that_dies_hangs_or_swells_is_seen(fault, told, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED.replace("FAULT", fault))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(run, "SECONDS", 2.0)
    monkeypatch.setattr(run, "FOUND", tmp_path / "found")
    monkeypatch.setitem(
        TARGETS, "planted", Target(lambda folder: (folder / "a.txt").write_bytes(b"0"), raises(KeyError))
    )
    _, faults = run.run("planted", 20.0, module="planted")
    assert any(told in found for found in faults), faults
    assert list((tmp_path / "found" / "planted").iterdir())
