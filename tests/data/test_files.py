"""Files and folders appear whole or not at all."""

import os
import sys

import pytest

from subquad.data.files import cache_folder
from subquad.disk import aside, locked


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "new" / "file"
    with aside(place) as temporary:
        temporary.write_text("whole")
        assert not place.exists()
    with pytest.raises(SystemExit, match="4"), aside(place) as temporary:
        sys.exit(temporary.write_text("half"))
    assert place.read_text() == "whole"
    assert names(place.parent) == ["file"]


def test_the_first_of_two_folders_stays_and_folders_and_files_do_not_replace_each_other(tmp_path):
    file, place = tmp_path / "file", tmp_path / "folder"
    file.write_text("a file")
    with aside(place) as outer, aside(place) as inner:
        for folder, text in ((outer, "outer"), (inner, "inner")):
            folder.mkdir()
            (folder / "file").write_text(text)
    with pytest.raises(OSError, match=r"Not a directory|Is a directory|File exists"), aside(file) as made:
        made.mkdir()
    with pytest.raises(OSError, match=r"Is a directory|denied"), aside(place) as made:
        made.write_text("a file")
    assert (file.read_text(), (place / "file").read_text()) == ("a file", "inner")
    assert names(tmp_path) == ["file", "folder"]


def test_a_lock_keeps_others_out_and_leaves_no_file(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        with locked(tmp_path), pytest.raises(BlockingIOError, match="unavailable"):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
    assert names(tmp_path) == []


def test_the_cache_is_where_one_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SUBQUAD_CACHE", raising=False)
    assert cache_folder(None) == tmp_path / ".cache" / "subquad"
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "a"))
    assert cache_folder(None) == tmp_path / "a"
    assert cache_folder("~/there") == tmp_path / "there"
