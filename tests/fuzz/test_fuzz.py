"""Damaged inputs for every reader: each is read, or refused by an error that names the file."""

import os

import pytest

from tests.fuzz import run
from tests.fuzz.targets import TARGETS, Target

MINUTES = float(os.environ.get("SUBQUAD_FUZZ_MINUTES", "10"))


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.quick])
def test_valid_inputs_are_read_and_damaged_ones_refused(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    tried = run.Tried(name, tmp_path)
    assert tried.attempt(tried.whole()) == ("read", None)
    inputs = [*run.kept(name), *map(tried.input, range(tried.target.quick))]
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
    kept = {folder.name: run.kept(folder.name) for folder in run.FOUND.iterdir() if folder.is_dir()}
    assert set(kept) <= set(TARGETS)
    for now in (now for inputs in kept.values() for now in inputs):
        assert now.file
        assert len(now.content) <= run.KEPT


@pytest.mark.parametrize(("error", "fault"), [
    (KeyError("a.txt"), "KeyError"),
    (SystemExit("a.txt"), "SystemExit"),
    (ValueError("it is damaged"), "names no file"),
    (ValueError("a.txt is damaged"), None),
    (FileNotFoundError("a.txt is not there"), None),
], ids=repr)  # fmt: skip
def test_the_fuzzer_tells_faults_from_refusals(error, fault, tmp_path, monkeypatch):
    def read(folder):
        raise error

    monkeypatch.setitem(TARGETS, "planted", Target(lambda folder: (folder / "a.txt").write_bytes(b"x"), read))
    tried = run.Tried("planted", tmp_path)
    found = tried.attempt(tried.whole()).fault
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
@pytest.mark.parametrize(("fault", "told"), [
    ("os.abort()", "dies with status -6"),
    ("time.sleep(99)", "hangs: no answer in 2 s"),
    ("bytearray(1 << 34)", "MemoryError"),
    ("bytearray(b'x') * (1 << 28)", "bytes of memory"),
])  # fmt: skip
def test_a_child_that_dies_hangs_or_swells_is_seen(fault, told, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED.replace("FAULT", fault))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(run, "SECONDS", 2.0)
    monkeypatch.setattr(run, "FOUND", tmp_path / "found")
    monkeypatch.setitem(TARGETS, "planted", Target(lambda folder: (folder / "a.txt").write_bytes(b"0"), print))
    _, faults = run.run("planted", 20.0, module="planted")
    assert any(told in found for found in faults), faults
    assert list((tmp_path / "found" / "planted").iterdir())
