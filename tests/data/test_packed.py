"""Plain and packed files are read alike."""

import bz2
import gzip
import lzma

import pytest

from subquad.data.packed import DAMAGE, PACKED, find_packed, open_stream, read_packed

PACK = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}
CONTENT = b"one\ntwo\n" * 100


def test_every_suffix_is_tried():
    assert set(PACKED) == set(PACK)


@pytest.mark.parametrize("suffix", ["", *PACK])
def test_plain_and_packed_files_are_the_same(suffix, tmp_path):
    file = tmp_path / f"text.txt{suffix}"
    file.write_bytes(PACK.get(suffix, bytes)(CONTENT))
    assert find_packed(tmp_path, "other.txt", "text.txt") == file
    assert find_packed(tmp_path, "other.txt") is None
    assert read_packed(file) == CONTENT
    with open_stream(file) as stream:
        assert stream.readline() == b"one\n"


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"no" + raw[2:]], ids=["cut", "overwritten"])
def test_a_damaged_file_is_named(suffix, damage, tmp_path):
    file = tmp_path / f"text.txt{suffix}"
    file.write_bytes(damage(PACK[suffix](CONTENT)))
    with pytest.raises(ValueError, match=rf"text\.txt\{suffix} is damaged and does not unpack: "):
        read_packed(file)
    with pytest.raises(DAMAGE), open_stream(file) as stream:
        stream.read()


def test_the_plain_file_comes_first(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"plain")
    (tmp_path / "text.txt.xz").write_bytes(lzma.compress(b"packed"))
    assert find_packed(tmp_path, "text.txt") == tmp_path / "text.txt"
