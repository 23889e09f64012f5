"""Where experiments find their data."""

import lzma
import tarfile
from pathlib import Path

import pytest

from experiments.harness.data import check_data, find
from subquad.data.sources import open_source


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)


def test_data_is_found_where_it_is_given(tmp_path, monkeypatch):
    place, text = tmp_path / "gutenberg", tmp_path / "input.txt.xz"
    (place / "train").mkdir(parents=True)
    text.write_bytes(lzma.compress(b"text"))
    assert len(open_source(find("@little", {})).names) > 5  # comes with Python
    for asked, given, found in (
        ("@books/train", {"books": str(place)}, place / "train"),
        ("@books", {"books": str(place)}, place),
        ("@books/train", {"books/train": "hf:a:b"}, "hf:a:b"),
        ("@mnist", {"mnist": "hf:a"}, "hf:a"),
        ("@tinyshakespeare/input.txt", {"tinyshakespeare": str(tmp_path)}, text),
        ("@tinyshakespeare/x", {"tinyshakespeare": str(text)}, text),
    ):
        assert find(asked, given) == str(found)
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    assert find("@books/train", {}) == str(place / "train")


def test_an_archive_is_unpacked_once(tmp_path):
    (tmp_path / "in" / "train").mkdir(parents=True)
    (tmp_path / "in" / "train" / "a.txt").write_text("a book")
    (tmp_path / "data").mkdir()
    archive, given = tmp_path / "data" / "books.tar.xz", {"books": str(tmp_path / "data")}
    with tarfile.open(archive, "w:xz") as opened:
        opened.add(tmp_path / "in", "books")
    found = find("@books/train", given)
    assert (Path(found) / "a.txt").read_text() == "a book"
    assert find("@books/train", given) == found
    with pytest.raises(FileNotFoundError, match="has no other; the data set 'books' should be train/, valid/"):
        find("@books/other", given)


def test_errors_say_how_to_provide_data(tmp_path, monkeypatch):
    folder, none = str(tmp_path), str(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"use --data books=PATH, or set SUBQUAD_DATA .*is not set"):
        find("@books/train", {})
    monkeypatch.setenv("SUBQUAD_DATA", folder)
    with pytest.raises(FileNotFoundError, match="has no gutenberg/"):
        find("@books/train", {})
    with pytest.raises(ValueError, match="@bokks/train is not a known data set; did you mean 'books'"):
        find("@bokks/train", {})
    with pytest.raises(ValueError, match=r"books=hf:a:b is one text, but .* books/train=PATH books/valid=PATH"):
        find("@books/train", {"books": "hf:a:b"})
    for name, path, message in (
        ("bokks", folder, "unknown data set 'bokks'; did you mean 'books'"),
        ("books/tran", folder, "unknown data set 'books/tran'; did you mean 'books/train'"),
        ("books", none, r"--data books=.*no such file or folder"),
        ("books/train", none, r"--data books/train=.*; expected train/, valid/"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            check_data({name: path})
    check_data({"books/valid": folder, "mnist": "hf:ylecun/mnist"})
