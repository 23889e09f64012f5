"""Sources of text: which documents they hold, in which order, and which of them are held out."""

import logging
import re
import sys
import tarfile
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.config import read_mapping
from subquad.data.images import load_images
from subquad.data.lra.read_text import hub_parts
from subquad.data.sources import cut, hold_out, open_source
from subquad.data.texts import BadTextError
from subquad.recipes import recipe_path


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read(path, **options):
    return [(d.name, d.text.decode()) for d in open_source(str(path), **options).documents()]


def test_folders_and_globs_are_read_sorted_and_names_are_relative(tmp_path, monkeypatch):
    write(tmp_path / "a", b_txt="two", a__z_txt="one", c_md="three")
    write(tmp_path / "a" / ".git", x="hidden")
    (tmp_path / "a" / ".hidden").write_bytes(b"\0")
    assert read(tmp_path / "a") == [("a/z.txt", "one"), ("b.txt", "two"), ("c.md", "three")]
    assert read(tmp_path / "a/**/*.txt") == [("a/z.txt", "one"), ("b.txt", "two")]
    assert read(tmp_path / "a/a/*") == [("z.txt", "one")]
    text = "a\r\nb\tç \U0001f389\n\n"
    write(tmp_path, stdlib__a_txt=text)
    monkeypatch.chdir(tmp_path)
    assert [*open_source("./stdlib").documents()] == [("a.txt", text.encode(), b"a.txt")], "text is kept unchanged"


def test_links_to_folders_are_followed_and_nothing_is_read_twice(tmp_path):
    write(tmp_path, real__a_txt="one", real__deep__b_txt="two", corpus__mine__c_txt="three", corpus__d_txt="four")
    corpus = tmp_path / "corpus"
    (corpus / "again").symlink_to(corpus / "mine")  # would come first by its name
    (corpus / "circle").symlink_to(corpus)
    (corpus / "link").symlink_to(tmp_path / "real")
    (corpus / "same").symlink_to(tmp_path / "real" / "deep")
    (corpus / "b.txt").symlink_to(corpus / "d.txt")
    expected = [("d.txt", "four"), ("link/a.txt", "one"), ("link/deep/b.txt", "two"), ("mine/c.txt", "three")]
    assert read(corpus) == expected
    (tmp_path / "top").symlink_to(corpus)
    assert read(tmp_path / "top") == expected
    assert sorted(text for _, text in read(corpus / "**" / "*.txt")) == ["four", "one", "three", "two"]
    (tmp_path / "real" / "back").symlink_to(corpus)
    assert read(corpus) == expected, "a circle by way of two links"


def test_a_missing_path_is_answered_with_its_neighbours(tmp_path):
    write(tmp_path, input_txt="text")
    asked, near = str(tmp_path / "inptu.txt"), str(tmp_path / "input.txt")
    with pytest.raises(FileNotFoundError, match=f"no file or folder {asked!r}; did you mean {re.escape(repr(near))}"):
        open_source(asked)
    with pytest.raises(FileNotFoundError, match="did you mean 'stdlib'"):
        open_source("stdlb")
    with pytest.raises(FileNotFoundError, match=r"the glob '.*\*\.md' matches no file"):
        open_source(str(tmp_path / "*.md"))
    (tmp_path / ".secret").touch()
    with pytest.raises(FileNotFoundError, match=r"valid: ") as error:
        open_source(str(tmp_path / "secret"))
    assert near in str(error.value)
    assert ".secret" not in str(error.value)


def test_an_archive_has_a_document_for_each_file(tmp_path):
    write(tmp_path / "in", b_txt="two", a_txt="one", bad_bin=b"x\0")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as packed:
        packed.writestr("deep/b.txt", "two")
        packed.writestr("a.txt", "one")
    assert read(tmp_path / "some.zip") == [("some.zip/a.txt", "one"), ("some.zip/deep/b.txt", "two")]
    for place in (tmp_path / "some.tar.xz", tmp_path / "urlsf_subset00-1_data.xz"):  # as OpenWebText's are named
        with tarfile.open(place, "w:xz") as archive:
            for name in ("b.txt", "a.txt"):
                archive.add(tmp_path / "in" / name, f"deep/{name}")
        assert read(place) == [(f"{place.name}/deep/a.txt", "one"), (f"{place.name}/deep/b.txt", "two")]
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.add(tmp_path / "in/bad.bin", "bad.bin")
        archive.add(tmp_path / "in/a.txt", "good.txt")
    with pytest.raises(BadTextError, match=r"bad\.tar: bad\.tar/bad\.bin is not text: it has a NUL at byte 1"):
        read(tmp_path / "bad.tar")
    assert read(tmp_path / "bad.tar", skip_bad_files=True) == [("bad.tar/good.txt", "one")]


def test_bad_files_are_named_with_the_place_or_skipped_and_logged(tmp_path, caplog):
    for content, message in (
        (b"good\0bad", "it has a NUL at byte 4"),
        (b"caf\xe9 au lait", "byte 3 is 0xe9, which is not valid UTF-8"),
        (b"cut \xf0\x9f\x8e", "byte 4 is 0xf0, which is not valid UTF-8"),
    ):
        write(tmp_path, a_txt="fine", b_bin=content)
        with pytest.raises(BadTextError, match=f"{re.escape(str(tmp_path / 'b.bin'))} is not text: {message}"):
            read(tmp_path)
    write(tmp_path, a_txt="fine", b_bin=b"\xff", c_xz=b"no xz", d_txt="fine too", e_txt="")
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, skip_bad_files=True) == [("a.txt", "fine"), ("d.txt", "fine too")]
    skipped = [f"skipped: {tmp_path / name}" for name in ("b.bin", "c.xz")]
    assert [record.message.split(" is ")[0] for record in caplog.records] == skipped
    with pytest.raises(BadTextError, match=r"e\.txt is empty: there is no text to read"):
        read(tmp_path / "e.txt")


def test_the_standard_library_is_source_without_tests():
    source = open_source("stdlib")
    assert {"argparse.py", "json/decoder.py"} <= set(source.names)
    parts = {part for name in source.names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in source.names)
    assert sum(file.stat().st_size for file in source.files.values()) > 5_000_000


def test_the_fingerprint_sees_names_and_contents_but_not_the_place(tmp_path):
    def fingerprint(folder, **files):
        write(tmp_path / folder, a_txt="x", **files)
        return open_source(str(tmp_path / folder)).fingerprint()

    assert fingerprint("one", b_txt="y") == fingerprint("two", b_txt="y")
    assert len({fingerprint("one", b_txt="y"), fingerprint("three", b_txt="z"), fingerprint("four", c_txt="y")}) == 3


def test_a_dataset_is_asked_for_by_name_config_split_and_column(monkeypatch):
    import datasets

    given = datasets.Dataset.from_dict({"text": ["first", "", None, "fourth", "NUL\0"], "label": ["l"] * 5})
    loaded = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, split: loaded.append((*args, split)) or given)
    assert read("hf:owner/name", skip_bad_files=True) == [("", "first"), ("", "fourth")]
    assert read("hf:owner/name:config:test:label")[0] == ("", "l")
    with pytest.raises(BadTextError, match=r"hf:owner/name::validation, row 4 is not text: it has a NUL at byte 3"):
        read("hf:owner/name::validation")
    assert loaded == [
        ("owner/name", None, "train"), ("owner/name", "config", "test"), ("owner/name", None, "validation")
    ]  # fmt: skip
    assert open_source("hf:a").fingerprint() != open_source("hf:a:::label").fingerprint()
    assert [d.key for d in open_source("hf:a", skip_bad_files=True).documents()] == [b"first", b"fourth"]
    for asked, message in (
        ("hf:a:::txt", r"'hf:a:::txt' has no column 'txt'; did you mean 'text'\? valid: label, text"),
        ("hf:", r"a dataset is hf:NAME\[:CONFIG\[:SPLIT\[:COLUMN\]\]\], got 'hf:'"),
        ("hf:a:b:c:d:e", r"a dataset is hf:NAME\[:CONFIG\[:SPLIT\[:COLUMN\]\]\], got 'hf:a:b:c:d:e'"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(asked)


@pytest.mark.parametrize("reader", [open_source, load_images, hub_parts])
def test_without_a_network_a_dataset_is_one_error_at_once(reader, monkeypatch):
    def unreachable(self, name, *, repo_type, timeout):
        assert (name, repo_type) == ("a/b", "dataset")
        raise OSError("no such host")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", unreachable)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: pytest.fail("it would try again and again"))
    message = r"'hf:a/b' is on the Hugging Face Hub, which can't be reached \(no such host\); HF_HUB_OFFLINE=1 takes"
    with pytest.raises(ConnectionError, match=message):
        reader("hf:a/b")


@pytest.mark.parametrize("reader", [open_source, load_images, hub_parts])
def test_a_dataset_needs_its_extra(reader, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ImportError, match=r"'hf:a/b' needs datasets, which is not installed: .* pip install 'subquad\[datasets\]'"
    ):
        reader("hf:a/b")


WIKITEXT = [f"hf:Salesforce/wikitext:wikitext-103-raw-v1:{split}" for split in ("train", "test")]
RECIPES = {
    "wikitext103-llp": ((12, 6, 768, 2048), WIKITEXT),
    "wikitext103-perceiver-ar": ((6, 6, 768, 2048), WIKITEXT),
    "pg19-llp": ((24, 6, 768, 2048), ["hf:emozilla/pg19::train", "hf:emozilla/pg19::test"]),
    "openwebtext-latte": ((12, 12, 516, 1024), ["hf:Skylion007/openwebtext"]),
    "enwik8-latte": ((12, 12, 516, 2000), []),
    "redpajama-elita": ((8, 8, 312, 100_000), ["hf:togethercomputer/RedPajama-Data-1T-Sample::train"]),
    "shakespeare-perceiver-ar": ((4, 8, 64, 256), []),
}
"""Layers, heads, width and window in the papers' tables, and the datasets of the hub."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_papers_sizes_and_text(name):
    values, (sizes, asked) = read_mapping(recipe_path(name)), RECIPES[name]
    model, data = values["model"], values["data"]
    assert (model["num_layers"], model["num_heads"], model["dim"], values["batch"]["length"]) == sizes
    if name.endswith("latte"):
        assert model["options"]["latte"]["num_latents"] == model["dim"]
        assert (values["optimizer"]["lr"], values["schedule"]["warmup"]) == (6e-4, 2000)
        assert (values["run"]["steps"], values["batch"]["size"]) == (60_000, 8)
    assert [data.get(part) for part in ("path", "held_out_path")][: len(asked)] == asked


def test_documents_are_held_out_by_their_own_hash():
    keys = [f"{i}.txt".encode() for i in range(1000)]
    whole = hold_out(keys, 0.1)
    assert [i for i, out in enumerate(hold_out(keys[:100], 0.05)) if out] == [1, 24, 25, 36, 48, 67, 93, 96]
    assert 0.08 < sum(whole) / 1000 < 0.12
    assert hold_out(keys[::-2], 0.1) == whole[::-2], "other documents do not move one"
    assert hold_out(keys, 0.1, 1) != whole
    with pytest.raises(ValueError, match="a split by document needs at least two documents, got 1"):
        hold_out([b"a"], 0.5)
    for text in (b"a", "漢".encode(), b"ab"):
        with pytest.raises(ValueError, match=rf"document of {len(text)} bytes is too short to hold out 0\.9 of it"):
            cut(text, 0.9)


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=9), min_size=2, max_size=20, unique=True), st.floats(0.001, 0.999))
def test_each_part_has_a_document(keys, fraction):
    assert set(hold_out(keys, fraction)) == {False, True}


@settings(max_examples=50)
@given(st.text("a é€\U0001f389", min_size=4), st.floats(0.01, 0.99))
def test_a_cut_holds_out_the_end_and_splits_no_character(text, fraction):
    data = text.encode()
    try:
        place = cut(data, fraction)
    except ValueError:
        return
    assert data[:place].decode() + data[place:].decode() == text
    assert 0 <= place - int(len(data) * (1 - fraction)) <= 3
