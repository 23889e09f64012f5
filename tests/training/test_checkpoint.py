"""Checkpoint folders: complete or absent, damage is seen, the last good one survives."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch

from subquad.training import checkpoint
from subquad.training.errors import CheckpointError, FormatVersionError, reading
from tests.data.sets import flip
from tests.fuzz.run import FOUND
from tests.training.helpers import steps_of

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.safetensors", "trainer_state.json")


def make(root, step, settings=None):
    """Publish a small checkpoint with rubbish in its files."""
    folder = checkpoint.aside(root, step)
    for file in (*FILES, "shards/0.bin"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(f"{file} of {step}".encode())
    target = root / checkpoint.name_of(step)
    checkpoint.publish(folder, target, step=step, settings=settings or {})
    return target


def test_a_published_checkpoint_is_complete_and_listed(tmp_path):
    assert checkpoint.newest_complete(tmp_path) is None
    assert checkpoint.newest_complete(tmp_path / "absent") is None
    make(tmp_path, 9)
    target = make(tmp_path, 10)
    assert checkpoint.verify(target)["step"] == 10
    assert set(checkpoint.verify(target)["files"]) == {*FILES, "shards/0.bin"}
    assert [step for step, _ in checkpoint.listing(tmp_path)] == steps_of(tmp_path) == [9, 10]
    assert checkpoint.newest_complete(tmp_path) == target


@pytest.mark.parametrize("part", checkpoint.REQUIRED)
def test_nothing_is_published_without_every_part(tmp_path, part):
    folder = checkpoint.aside(tmp_path, 1)
    folder.mkdir()
    for name in FILES:
        if not name.startswith(part):
            (folder / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"has no {part} file"):
        checkpoint.publish(folder, tmp_path / "checkpoint-1", step=1, settings={})
    assert checkpoint.listing(tmp_path) == []


def cut(file):
    file.write_bytes(file.read_bytes()[:3])


DAMAGES = [
    ("optimizer.pt", cut, "has 3 bytes, its manifest says"),
    ("model.safetensors", lambda file: flip(file, 3), "does not match its checksum"),
    ("scheduler.pt", Path.unlink, r"lacks the file scheduler\.pt"),
    ("more.bin", Path.touch, r"has files that its manifest does not list: more\.bin"),
    ("manifest.json", Path.unlink, r"has no manifest\.json"),
    ("manifest.json", cut, "is damaged"),
    ("manifest.json", lambda file: file.write_text("[1, 2]"), "is not a manifest"),
]


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGES)
def test_damage_is_skipped_with_its_reason_but_never_silently_restarted(tmp_path, caplog, file, damage, reason):
    damage(make(tmp_path, 2) / file)
    with pytest.raises(CheckpointError, match=f"no checkpoint in .* is complete: .*{reason}"):
        checkpoint.newest_complete(tmp_path)
    good = make(tmp_path, 1)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_complete(tmp_path) == good
    assert "skipped checkpoint-2" in caplog.text
    make(tmp_path, 2)
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "checkpoint-2", "saving the step again replaces it"
    assert steps_of(tmp_path) == [1, 2]


def test_another_format_version_is_refused_by_name(tmp_path):
    make(tmp_path, 1)
    manifest = make(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    message = "checkpoint-2 has checkpoint format version 0; this release reads version 1"
    with pytest.raises(FormatVersionError, match=message):
        checkpoint.newest_complete(tmp_path)


def test_every_file_is_synced_before_the_rename(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def note(event, call, *args):
        events.append(event)
        call(*args)

    monkeypatch.setattr(os, "fsync", lambda file: note(Path(os.readlink(f"/proc/self/fd/{file}")).name, fsync, file))
    monkeypatch.setattr(os, "replace", lambda *names: note(f"rename to {Path(names[1]).name}", replace, *names))
    make(tmp_path, 1)
    rename = events.index("rename to checkpoint-1")
    assert {*FILES, "0.bin", "shards", ".saving-checkpoint-1", "manifest.json"} <= set(events[:rename])
    assert tmp_path.name in events[rename:]


@pytest.mark.parametrize(("file", "damage"), [damage[:2] for damage in DAMAGES if damage[1] in (cut, Path.unlink)])
def test_rotation_never_deletes_the_last_good_one(tmp_path, file, damage):
    make(tmp_path, 1)
    make(tmp_path, 2)
    for step in (3, 4):
        damage(make(tmp_path, step) / file)
    checkpoint.rotate(tmp_path, keep=1, best_step=None)
    assert steps_of(tmp_path) == [2, 3, 4]
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "checkpoint-2"


def test_a_checkpoint_that_was_half_deleted_is_not_restored(tmp_path):
    make(tmp_path, 2)
    (tmp_path / ".trash-checkpoint-1").mkdir()
    checkpoint.sweep(tmp_path)
    assert steps_of(tmp_path) == [2]


@pytest.mark.parametrize(("settings", "message"), [
    ({"batch": {"length": 8, "size": 2, "accumulation": "2"}}, "'accumulation' must be a int, got '2'"),
    ({"processes": None}, "'processes' must be a int, got None"),
    ({"data.files": ["a.txt"]}, r"'data\.files' must be a dict, got \['a\.txt'\]"),
])  # fmt: skip
def test_settings_of_another_type_are_damage(tmp_path, settings, message):
    with pytest.raises(CheckpointError, match=f"is damaged: {message}"):
        checkpoint.verify(make(tmp_path, 1, settings))


def test_an_archive_that_was_cut_is_damage_and_an_error_of_the_disk_is_none(tmp_path):
    (cut,) = (FOUND / "resume").glob("*optimizer.pt")
    with pytest.raises(CheckpointError, match=r"there cannot be read: OSError\(22"), reading("there"):
        torch.load(cut, weights_only=True)
    with pytest.raises(OSError, match="Input/output error"), reading("there"):
        raise OSError(errno.EIO, "Input/output error")


BATCH = {"length": 32, "size": 4, "accumulation": 2}
MADE = {"seed": 1, "model": {"dim": 8, "options": {"llp": {"segment": 4}}}, "batch": BATCH, "processes": 2}


SIXTEEN = r"a step had 16 windows \(processes 2 x batch\.size 4 x batch\.accumulation 2\)"


TEXT = {"data": "d1", "tokenizer": "t1", "data.files": {"a.txt": "1", "b.txt": "2", "c.txt": "3"}}
OTHER = {"data": "d2", "tokenizer": "t2"}
MANY = {f"{i:02}.txt": "4" for i in range(10)}


@pytest.mark.parametrize(("made", "now", "message"), [
    (TEXT, OTHER | {"data.files": {"a.txt": "1", "b.txt": "9", "d.txt": "4"}},
     r"text removed: c\.txt; text added: d\.txt; text changed: b\.txt; restore"),
    (TEXT, OTHER | {"data.files": TEXT["data.files"] | MANY}, r"text added: 00\.txt, .*, 07\.txt and 2 more; restore"),
    (TEXT, OTHER | {"data.files": TEXT["data.files"]}, "data was 'd1', is 'd2'; tokenizer was 't1', is 't2'; restore"),
    ({"data": "d1"}, OTHER | {"data.files": MANY}, "data was 'd1', is 'd2'; tokenizer was null, is 't2'; restore"),
    (TEXT, {"data": "d1", "tokenizer": "t2"}, "settings: tokenizer was 't1', is 't2'; restore"),
])  # fmt: skip
def test_text_that_changed_is_told_by_the_names_of_its_files(made, now, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_settings({"step": 3, "settings": MADE | made}, MADE | now)


def test_a_checkpoint_may_lack_the_names_of_files():
    earlier = {name: value for name, value in TEXT.items() if name != "data.files"}
    checkpoint.check_settings({"step": 3, "settings": MADE | earlier}, MADE | TEXT)
