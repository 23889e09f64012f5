"""Where experiments find their data."""

import lzma
import tarfile
from pathlib import Path

import pytest

from experiments.harness.data import check_data, find
from subquad.data.sources import open_source


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)


def test_a_little_text_is_always_there() -> None:
    assert len(open_source(find("@little", {})).names) > 5


def test_data_is_found_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gutenberg" / "train").mkdir(parents=True)
    (tmp_path / "input.txt.xz").write_bytes(lzma.compress(b"text"))
    place = tmp_path / "gutenberg"
    assert find("@books/train", {"books": str(place)}) == str(place / "train")
    assert find("@books", {"books": str(place)}) == str(place)
    assert find("@books/train", {"books/train": "hf:a:b"}) == "hf:a:b"
    assert find("@mnist", {"mnist": "hf:a"}) == "hf:a"
    with pytest.raises(ValueError, match=r"books=hf:a:b is one text, .* books/train=PATH books/valid=PATH"):
        find("@books/train", {"books": "hf:a:b"})
    with pytest.raises(ValueError, match="is one text, but books has parts"):
        find("@books/train", {"books": str(tmp_path / "input.txt.xz")})
    assert find("@tinyshakespeare/input.txt", {"tinyshakespeare": str(tmp_path)}) == str(tmp_path / "input.txt.xz")
    assert find("@tinyshakespeare/x", {"tinyshakespeare": str(tmp_path / "input.txt.xz")}).endswith("input.txt.xz")
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    assert find("@books/train", {}) == str(place / "train")


def test_an_archive_is_unpacked_once(tmp_path: Path) -> None:
    (tmp_path / "in" / "train").mkdir(parents=True)
    (tmp_path / "in" / "train" / "a.txt").write_text("a book")
    (tmp_path / "data").mkdir()
    archive = tmp_path / "data" / "books.tar.xz"
    with tarfile.open(archive, "w:xz") as opened:
        opened.add(tmp_path / "in", "books")
    found = find("@books/train", {"books": str(tmp_path / "data")})
    assert (Path(found) / "a.txt").read_text() == "a book"
    assert find("@books/train", {"books": str(tmp_path / "data")}) == found
    with pytest.raises(FileNotFoundError, match="has no other; the data set 'books' should be train/, valid/"):
        find("@books/other", {"books": str(tmp_path / "data")})
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"books\.tar\.xz is damaged and does not unpack"):
        find("@books/train", {"books": str(tmp_path / "data")})


def test_what_is_missing_is_said_with_the_way_to_give_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"use --data books=PATH, or set SUBQUAD_DATA .*is not set"):
        find("@books/train", {})
    monkeypatch.setenv("SUBQUAD_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="has no gutenberg/"):
        find("@books/train", {})
    with pytest.raises(ValueError, match="@bokks/train is not a known data set; did you mean 'books'"):
        find("@bokks/train", {})
    with pytest.raises(ValueError, match="unknown data set 'bokks'; did you mean 'books'"):
        check_data({"bokks": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"--data books=.*no such file or folder"):
        check_data({"books": str(tmp_path / "none")})
    with pytest.raises(ValueError, match="unknown data set 'books/tran'; did you mean 'books/train'"):
        check_data({"books/tran": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"--data books/train=.*; expected train/, valid/"):
        check_data({"books/train": str(tmp_path / "none")})
    check_data({"books/valid": str(tmp_path), "mnist": "hf:ylecun/mnist"})
