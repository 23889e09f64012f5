"""Plain and packed files are read alike; damage is named."""

import io
from pathlib import Path

import numpy as np
import pytest

from subquad.data.packed import DAMAGE, PACKED, find_packed, load_arrays, open_stream, read_packed
from subquad.data.sources import open_source
from subquad.data.texts import BadTextError
from tests.data.pictures import PACK

CONTENT = b"one\ntwo\n" * 100


def documents(file):
    return [(document.name, document.text) for document in open_source(str(file)).documents()]


@pytest.mark.parametrize("suffix", PACK)
def test_plain_and_packed_files_are_the_same(suffix, tmp_path):
    file = tmp_path / f"text.txt{suffix}"
    file.write_bytes(PACK[suffix](CONTENT))
    assert find_packed(tmp_path, "other.txt", "text.txt") == file
    assert find_packed(tmp_path, "other.txt") is None
    assert read_packed(file) == CONTENT
    assert documents(file) == [(file.name, CONTENT)]
    with open_stream(file) as stream:
        assert stream.readline() == b"one\n"
    (tmp_path / "text.txt").write_bytes(b"plain")
    assert find_packed(tmp_path, "text.txt") == tmp_path / "text.txt", "the plain file comes first"
    assert set(PACKED) == set(PACK) - {""}


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"no" + raw[2:]], ids=["cut", "overwritten"])
def test_a_damaged_file_is_named(suffix, damage, tmp_path):
    file = tmp_path / f"text.txt{suffix}"
    file.write_bytes(damage(PACK[suffix](CONTENT)))
    for read, error in ((read_packed, ValueError), (documents, BadTextError)):
        with pytest.raises(error, match=rf"text\.txt\{suffix} is damaged and does not unpack: "):
            read(file)
    with pytest.raises(DAMAGE), open_stream(file) as stream:
        stream.read()


@pytest.mark.parametrize(("place", "value", "why"), [(8, 1, "password"), (10, 99, "compression")])
def test_an_archive_that_cannot_be_unpacked_is_named(place, value, why, tmp_path):
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(3))
    raw = bytearray(stream.getvalue())
    central = raw.index(b"PK\x01\x02")
    raw[central + place] = raw[place - 2] = value  # flags or method, in both headers of the member
    with pytest.raises(ValueError, match=rf"a\.npz is not a readable npz file: .*{why}"):
        load_arrays(bytes(raw), Path("a.npz"))
    (tmp_path / "a.zip").write_bytes(raw)
    with pytest.raises(BadTextError, match=rf"a\.zip is damaged and does not unpack: .*{why}"):
        documents(tmp_path / "a.zip")
