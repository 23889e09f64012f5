import bz2
import gzip
import logging
import lzma
import re
import sys
import tarfile
import types
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.sources import BadTextError, cut, hold_out, open_source


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read(path, **options):
    return [(d.name, d.text.decode()) for d in open_source(str(path), **options).documents()]


def test_a_folder_is_read_below_and_sorted(tmp_path):
    write(tmp_path, b_txt="two", a__z_txt="one", c_md="three")
    write(tmp_path / ".git", x="hidden")
    (tmp_path / ".hidden").write_bytes(b"\0")
    assert read(tmp_path) == [("a/z.txt", "one"), ("b.txt", "two"), ("c.md", "three")]


def test_text_is_kept_as_it_is(tmp_path):
    text = "﻿a\r\nb\tç \U0001f389\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (document,) = open_source(str(tmp_path / "a.txt")).documents()
    assert document == ("a.txt", text.encode(), b"a.txt")


def test_a_glob_reads_what_it_matches_and_names_it_from_the_shared_folder(tmp_path):
    write(tmp_path, x__a_txt="1", y__b_txt="2", y__c_md="3")
    assert read(tmp_path / "**/*.txt") == [("x/a.txt", "1"), ("y/b.txt", "2")]
    assert read(tmp_path / "y/*") == [("b.txt", "2"), ("c.md", "3")]


def test_a_glob_that_matches_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the glob '.*\*\.txt' matches no file"):
        open_source(str(tmp_path / "*.txt"))


def test_a_missing_path_is_answered_with_its_neighbours(tmp_path):
    write(tmp_path, input_txt="text")
    asked, near = str(tmp_path / "inptu.txt"), str(tmp_path / "input.txt")
    with pytest.raises(FileNotFoundError, match=f"no file or folder {asked!r}; did you mean {re.escape(repr(near))}"):
        open_source(asked)
    with pytest.raises(FileNotFoundError, match="did you mean 'stdlib'"):
        open_source("stdlb")
    (tmp_path / ".secret").touch()
    with pytest.raises(FileNotFoundError, match=r"valid: ") as error:
        open_source(str(tmp_path / "secret"))
    assert near in str(error.value)
    assert ".secret" not in str(error.value)


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress), (".bz2", bz2.compress)])
def test_compressed_text_is_unpacked(tmp_path, suffix, pack):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack(b"some text"))
    assert read(path) == [(f"a.txt{suffix}", "some text")]
    path.write_bytes(pack(b"some text" * 99)[:-9])
    with pytest.raises(BadTextError, match=f"{re.escape(str(path))} is damaged and does not unpack"):
        read(path)


def test_an_archive_has_a_document_for_each_file(tmp_path):
    write(tmp_path / "in", b_txt="two", a_txt="one", bad_bin=b"x\0")
    with tarfile.open(tmp_path / "some.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "in/b.txt", "deep/b.txt")
        archive.add(tmp_path / "in/a.txt", "deep/a.txt")
    assert read(tmp_path / "some.tar.xz") == [("some.tar.xz/deep/a.txt", "one"), ("some.tar.xz/deep/b.txt", "two")]
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.add(tmp_path / "in/bad.bin", "bad.bin")
    with pytest.raises(BadTextError, match=r"bad\.tar: bad\.tar/bad\.bin is not text: it has a NUL at byte 1"):
        read(tmp_path / "bad.tar")
    with tarfile.open(tmp_path / "bad.tar", "a") as archive:
        archive.add(tmp_path / "in/a.txt", "good.txt")
    assert read(tmp_path / "bad.tar", skip_bad_files=True) == [("bad.tar/good.txt", "one")]
    (tmp_path / "bad.zip").write_bytes(b"no archive")
    with pytest.raises(BadTextError, match=r"bad\.zip is damaged and does not unpack"):
        read(tmp_path / "bad.zip")
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as packed:
        packed.writestr("a.txt", "one")
    good = (tmp_path / "good.zip").read_bytes()
    central = good.index(b"PK\x01\x02")
    for offset, value, why in ((8, 1, "password"), (10, 99, "compression")):  # its flags, its method
        changed = bytearray(good)
        changed[central + offset] = changed[offset - 2] = value
        (tmp_path / "odd.zip").write_bytes(changed)
        with pytest.raises(BadTextError, match=rf"odd\.zip is damaged and does not unpack: .*{why}"):
            read(tmp_path / "odd.zip")
    (tmp_path / "bad.tar").write_bytes(b"no archive")
    with pytest.raises(BadTextError, match=r"bad\.tar is damaged and does not unpack"):
        read(tmp_path / "bad.tar")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\0bad", "it has a NUL at byte 4"),
        (b"caf\xe9 au lait", "byte 3 is 0xe9, which is not valid UTF-8"),
        (b"cut \xf0\x9f\x8e", "byte 4 is 0xf0, which is not valid UTF-8"),
    ],
)
def test_rubbish_is_named_with_its_place(tmp_path, content, message):
    write(tmp_path, a_txt="fine", b_bin=content)
    with pytest.raises(BadTextError, match=f"{re.escape(str(tmp_path / 'b.bin'))} is not text: {message}"):
        read(tmp_path)


def test_bad_files_are_skipped_only_when_asked_and_each_is_logged(tmp_path, caplog):
    write(tmp_path, a_txt="fine", b_bin=b"\xff", c_xz=b"no xz", d_txt="fine too")
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, skip_bad_files=True) == [("a.txt", "fine"), ("d.txt", "fine too")]
    assert [r.message.split(" is ")[0] for r in caplog.records] == [
        f"skipped: {tmp_path / 'b.bin'}",
        f"skipped: {tmp_path / 'c.xz'}",
    ]


def test_an_empty_file_is_an_error_alone_and_no_document_among_others(tmp_path):
    write(tmp_path, a_txt="", b_txt="text")
    with pytest.raises(BadTextError, match=r"a\.txt is empty: there is no text to read"):
        read(tmp_path / "a.txt")
    assert read(tmp_path) == [("b.txt", "text")]


def test_the_standard_library_is_source_without_tests():
    source = open_source("stdlib")
    assert {"argparse.py", "json/decoder.py"} <= set(source.names)
    parts = {part for name in source.names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in source.names)
    assert sum(len(d.text) for d in source.documents()) > 5_000_000


def test_a_folder_named_stdlib_is_reached_by_its_path(tmp_path, monkeypatch):
    write(tmp_path, stdlib__a_txt="mine")
    monkeypatch.chdir(tmp_path)
    assert read("./stdlib") == [("a.txt", "mine")]


def test_the_fingerprint_sees_names_and_contents_but_not_the_place(tmp_path):
    write(tmp_path / "one", a_txt="x", b_txt="y")
    write(tmp_path / "two", a_txt="x", b_txt="y")
    one, two = (open_source(str(tmp_path / name)).fingerprint() for name in ("one", "two"))
    assert one == two
    write(tmp_path / "two", b_txt="z")
    assert open_source(str(tmp_path / "two")).fingerprint() != one
    (tmp_path / "one/b.txt").rename(tmp_path / "one/c.txt")
    assert open_source(str(tmp_path / "one")).fingerprint() != one


class Rows(list):
    column_names = ("text", "label")

    def __getitem__(self, column):
        return [row[column] for row in self]


@pytest.fixture
def fake_datasets(monkeypatch):
    calls = []
    module = types.ModuleType("datasets")

    def load_dataset(*args, **kwargs):
        calls.append((*args, kwargs["split"]))
        return Rows({"text": text, "label": "l"} for text in ["first", "", None, "fourth", "NUL\0"])

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_a_dataset_is_asked_for_by_name_config_split_and_column(fake_datasets):
    assert read("hf:owner/name", skip_bad_files=True) == [("row 0", "first"), ("row 3", "fourth")]
    assert read("hf:owner/name:config:test:label")[0] == ("row 0", "l")
    with pytest.raises(BadTextError, match=r"hf:owner/name::validation, row 4 is not text: it has a NUL at byte 3"):
        read("hf:owner/name::validation")
    assert fake_datasets == [
        ("owner/name", None, "train"),
        ("owner/name", "config", "test"),
        ("owner/name", None, "validation"),
    ]
    assert open_source("hf:a").fingerprint() != open_source("hf:a:::label").fingerprint()
    assert [d.key for d in open_source("hf:a", skip_bad_files=True).documents()] == [b"first", b"fourth"]


def test_a_dataset_that_is_asked_for_wrongly(fake_datasets):
    with pytest.raises(ValueError, match=r"'hf:a:::txt' has no column 'txt'; did you mean 'text'\? valid: label, text"):
        open_source("hf:a:::txt")
    for asked in ("hf:", "hf:a:b:c:d:e"):
        with pytest.raises(ValueError, match=r"a dataset is hf:NAME\[:CONFIG\[:SPLIT\[:COLUMN\]\]\], got 'hf:"):
            open_source(asked)


def test_a_dataset_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs the package datasets.*pip install 'subquad\[datasets\]'"):
        open_source("hf:owner/name")


KEYS = [f"{i}.txt".encode() for i in range(1000)]


def test_the_split_is_the_same_on_every_machine():
    assert [i for i, out in enumerate(hold_out(KEYS[:100], 0.05)) if out] == [1, 24, 25, 36, 48, 67, 93, 96]


def test_the_fraction_is_about_kept():
    assert 0.08 < sum(hold_out(KEYS, 0.1)) / 1000 < 0.12


def test_other_documents_do_not_move_one():
    whole = dict(zip(KEYS, hold_out(KEYS, 0.1), strict=True))
    half = dict(zip(KEYS[::-2], hold_out(KEYS[::-2], 0.1), strict=True))
    assert half.items() <= whole.items()


def test_another_seed_holds_out_others():
    assert hold_out(KEYS, 0.1, 1) != hold_out(KEYS, 0.1)


@given(st.lists(st.binary(), min_size=2, unique=True), st.floats(0.001, 0.999))
def test_each_side_has_a_document(keys, fraction):
    assert set(hold_out(keys, fraction)) == {False, True}


def test_one_document_cannot_be_split_by_document():
    with pytest.raises(ValueError, match="a split by document needs at least two documents, got 1"):
        hold_out([b"a"], 0.5)


def test_a_single_text_is_cut_where_its_last_part_begins():
    assert cut(b"0123456789", 0.1) == 9
    assert cut(b"0123456789", 0.25) == 7


@given(st.text(min_size=4), st.floats(0.01, 0.99))
def test_a_cut_never_falls_inside_a_character(text, fraction):
    data = text.encode()
    try:
        place = cut(data, fraction)
    except ValueError:
        return
    assert data[:place].decode() + data[place:].decode() == text
    assert 0 <= place - int(len(data) * (1 - fraction)) <= 3


@pytest.mark.parametrize("text", [b"a", "漢".encode(), b"ab"])
def test_a_text_that_is_too_short_to_cut(text):
    with pytest.raises(ValueError, match=rf"a document of {len(text)} bytes is too short to hold out 0\.9 of it"):
        cut(text, 0.9)
