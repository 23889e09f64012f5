import os

import pytest

from subquad.data.files import aside, locked, remove, set_aside, write_json
from subquad.parsing import read_json_mapping


def write_half(place):
    with aside(place) as temporary:
        temporary.write_text("half")
        raise RuntimeError("in the middle")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "new" / "file"
    with aside(place) as temporary:
        temporary.write_text("whole")
        assert not place.exists()
    assert place.read_text() == "whole"
    with pytest.raises(RuntimeError, match="in the middle"):
        write_half(place)
    assert place.read_text() == "whole"
    assert [entry.name for entry in place.parent.iterdir()] == ["file"]


def test_a_folder_appears_whole_and_the_first_one_stays(tmp_path):
    place = tmp_path / "folder"
    with aside(place) as first, aside(place) as second:
        for folder, text in ((first, "first"), (second, "second")):
            folder.mkdir()
            (folder / "file").write_text(text)
    assert (place / "file").read_text() == "second", "the inner one ended first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_folder_cannot_take_a_files_place(tmp_path):
    (tmp_path / "place").write_text("a file")
    with (
        pytest.raises(OSError, match=r"Not a directory|Is a directory|File exists"),
        aside(tmp_path / "place") as folder,
    ):
        folder.mkdir()
    assert [entry.name for entry in tmp_path.iterdir()] == ["place"]


def test_a_file_cannot_take_a_folders_place(tmp_path):
    (tmp_path / "place").mkdir()
    with pytest.raises(OSError, match=r"Is a directory|denied"), aside(tmp_path / "place") as file:
        file.write_text("a file")
    assert (tmp_path / "place").is_dir()


def test_a_lock_keeps_others_out_and_leaves_no_file(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        with locked(tmp_path), pytest.raises(BlockingIOError, match="unavailable"):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_set_aside_whole(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("text")
    away = set_aside(tmp_path / "folder")
    assert (away / "file").read_text() == "text"
    assert [entry.name for entry in tmp_path.iterdir()] == [away.name]


def test_json_is_kept_and_other_content_named(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1, 2]})
    assert read_json_mapping(tmp_path / "a.json") == {"é": [1, 2]}
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not JSON: "):
        read_json_mapping(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match=r"a\.json must hold a mapping, got list"):
        read_json_mapping(tmp_path / "a.json")


def test_nothing_to_remove(tmp_path):
    remove(tmp_path / "gone")
