"""Checkpoints on disk: whole or not there, damage is seen, the last good one survives."""

import json
import logging
import os
from pathlib import Path

import pytest

from subquad.training import checkpoint
from subquad.training.errors import CheckpointError, FormatVersionError

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.safetensors", "trainer_state.json")


def make(root: Path, step: int, settings: dict[str, object] | None = None) -> Path:
    """Publish a small checkpoint with rubbish in its files."""
    folder = checkpoint.aside(root, step)
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(f"{name} of {step}".encode())
    (folder / "shards").mkdir()
    (folder / "shards" / "0.bin").write_bytes(b"nested")
    target = root / checkpoint.name_of(step)
    checkpoint.publish(folder, target, step=step, settings=settings or {})
    return target


def test_a_published_checkpoint_is_complete_and_listed(tmp_path: Path) -> None:
    make(tmp_path, 9)
    target = make(tmp_path, 10)
    assert checkpoint.verify(target)["step"] == 10
    assert set(checkpoint.verify(target)["files"]) == {*FILES, "shards/0.bin"}
    assert [step for step, _ in checkpoint.listing(tmp_path)] == [9, 10]
    assert checkpoint.newest_complete(tmp_path) == target
    assert not list(tmp_path.glob(".*"))


def test_no_folder_and_no_checkpoint_mean_none(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path / "absent") is None
    assert checkpoint.newest_complete(tmp_path) is None
    assert checkpoint.listing(tmp_path / "absent") == []


@pytest.mark.parametrize("part", checkpoint.REQUIRED)
def test_nothing_is_published_without_every_part(tmp_path: Path, part: str) -> None:
    folder = checkpoint.aside(tmp_path, 1)
    folder.mkdir()
    for name in FILES:
        if not name.startswith(part):
            (folder / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"holds no {part} file"):
        checkpoint.publish(folder, tmp_path / "checkpoint-1", step=1, settings={})
    assert checkpoint.listing(tmp_path) == []


def truncate(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"opt")


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[3] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def delete(folder: Path) -> None:
    (folder / "scheduler.pt").unlink()


def unlist(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def strange_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[1, 2]")


DAMAGES = [
    (truncate, "has 3 bytes, its manifest says"),
    (flip, "does not match its checksum"),
    (delete, "lacks its file scheduler.pt"),
    (unlist, "has no manifest.json"),
    (cut_manifest, "is damaged"),
    (strange_manifest, "is not a manifest"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, reason: str
) -> None:
    good, bad = make(tmp_path, 1), make(tmp_path, 2)
    damage(bad)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_complete(tmp_path) == good
    assert "skipped checkpoint-2" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_starting_anew_over_damaged_checkpoints_is_never_silent(tmp_path: Path, damage, reason: str) -> None:
    damage(make(tmp_path, 1))
    with pytest.raises(CheckpointError, match=f"no checkpoint in .* is complete: .*{reason}"):
        checkpoint.newest_complete(tmp_path)


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, 1)
    manifest = make(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    with pytest.raises(
        FormatVersionError, match="checkpoint-2 has checkpoint format version 0; this release reads version 1"
    ):
        checkpoint.newest_complete(tmp_path)


def test_a_crash_at_the_rename_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = make(tmp_path, 1)
    replace = os.replace

    def crash(source: Path, target: Path) -> None:
        if Path(target).name == "checkpoint-2":
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        make(tmp_path, 2)
    monkeypatch.undo()
    assert checkpoint.newest_complete(tmp_path) == good
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_every_file_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def log_fsync(handle: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def log_replace(source: Path, target: Path) -> None:
        events.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "replace", log_replace)
    make(tmp_path, 1)
    rename = events.index("rename to checkpoint-1")
    assert {*FILES, "0.bin", "shards", ".saving-checkpoint-1", "manifest.json.tmp"} <= set(events[:rename])
    assert tmp_path.name in events[rename:]


def test_publishing_a_step_again_replaces_it(tmp_path: Path) -> None:
    flip(make(tmp_path, 1))
    assert checkpoint.newest_complete(make(tmp_path, 1).parent) == tmp_path / "checkpoint-1"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    checkpoint.rotate(tmp_path, keep=2, best_step=2)
    assert [step for step, _ in checkpoint.listing(tmp_path)] == [2, 4, 5]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("damage", [truncate, delete, unlist, cut_manifest])
def test_rotation_never_deletes_the_last_good_one(tmp_path: Path, damage) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2)
    for step in (3, 4):
        damage(make(tmp_path, step))
    checkpoint.rotate(tmp_path, keep=1, best_step=None)
    assert [step for step, _ in checkpoint.listing(tmp_path)] == [2, 3, 4]
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "checkpoint-2"


def test_settings_of_another_type_are_damage(tmp_path: Path) -> None:
    batch = {"length": 8, "size": 2, "accumulation": "2"}
    with pytest.raises(CheckpointError, match="is damaged: 'accumulation' must be a int, got '2'"):
        checkpoint.verify(make(tmp_path, 1, {"batch": batch}))
    with pytest.raises(CheckpointError, match="is damaged: 'processes' must be a int, got None"):
        checkpoint.verify(make(tmp_path, 2, {"processes": None}))


def test_other_settings_are_refused_with_what_changed(tmp_path: Path) -> None:
    manifest = checkpoint.verify(make(tmp_path, 1, {"run.seed": 1, "data": "a"}))
    checkpoint.check_settings(manifest, {"run.seed": 1, "data": "a"})
    with pytest.raises(CheckpointError, match="step 1 was made by other settings: data was 'a', is 'b'; restore them"):
        checkpoint.check_settings(manifest, {"run.seed": 1, "data": "b"})
    with pytest.raises(CheckpointError, match="made by other settings: data was 'a', is None; restore them"):
        checkpoint.check_settings(manifest, {"run.seed": 1})
    with pytest.raises(CheckpointError, match="made by other settings: causal was None, is True; restore them"):
        checkpoint.check_settings(manifest, {"run.seed": 1, "data": "a", "causal": True})
    nested = {"model": {"dim": 8, "options": {"llp": {"segment": 4}}, "loops": 1}}
    manifest = checkpoint.verify(make(tmp_path, 2, nested))
    with pytest.raises(CheckpointError, match=r"settings: model\.options\.llp\.segment was 4, is 6; restore them"):
        checkpoint.check_settings(manifest, {"model": {**nested["model"], "options": {"llp": {"segment": 6}}}})
    many = {f"option_{i}": i for i in range(10)}
    with pytest.raises(CheckpointError, match=r"option_6 was 6, is None; and 3 more; restore them"):
        checkpoint.check_settings(checkpoint.verify(make(tmp_path, 3, many)), {"another": 1})


def test_sweep_removes_only_leftovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 1)
    checkpoint.aside(tmp_path, 2).mkdir()
    (tmp_path / ".trash-checkpoint-0").mkdir()
    with caplog.at_level(logging.WARNING):
        checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert "its save was interrupted" in caplog.text
    checkpoint.sweep(tmp_path / "absent")
