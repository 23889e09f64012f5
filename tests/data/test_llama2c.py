"""llama2.c's tokenizers: the tokens are those of merging one pair at a time."""

import random
import struct
from itertools import pairwise

import pytest
from tokenizers import Tokenizer

from subquad.data import load_tokenizer
from subquad.data.llama2c import MOST_BYTES, _read, read_llama2c_tokenizer
from subquad.data.special_tokens import separator_id
from subquad.data.tokenizers import encode_prompt, encode_text
from tests.fuzz.targets import LLAMA2C_PIECES, write_llama2c_tokenizer


def merged(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """A space, then characters or bytes; then, again and again, the first of the best pairs."""
    ids = {piece: id for id, piece in enumerate(pieces)}
    tokens: list[int] = []
    for char in f" {text}" if text else "":
        tokens += [ids[char]] if char in ids else [byte + 3 for byte in char.encode()]
    while True:
        pairs = [(pieces[a] + pieces[b], i) for i, (a, b) in enumerate(pairwise(tokens))]
        known = [(-scores[ids[pair]], i, ids[pair]) for pair, i in pairs if pair in ids]
        if not known:
            return tokens
        _, i, id = min(known)
        tokens[i : i + 2] = [id]


@pytest.mark.parametrize(("pieces", "alphabet"), [
    (LLAMA2C_PIECES, "abcé x🙂"),
    ([" ", "a", "aa", "aaa", "aaaa", " a", " aa", "b", "ab", "ba", "aab"], "aaaaaab "),
    (None, "Once upon a time, there was a little girl named Lily.\nShe loved to play é"),
], ids=["usual", "overlapping", "TinyStories"])  # fmt: skip
def test_the_tokens_are_those_of_merging_one_pair_at_a_time(pieces, alphabet, tmp_path, request):
    file = tmp_path / "a.bin"
    if pieces is None:
        file = request.getfixturevalue("data_folder") / "stories260K" / "tok512.bin"
    else:
        write_llama2c_tokenizer(file, pieces)
    tokenizer = Tokenizer.from_str(read_llama2c_tokenizer(file).to_str())  # as saved
    pieces, scores = _read(file.read_bytes(), file)
    draw = random.Random(0)
    for text in ["", " ", "  a", "a\n", *("".join(draw.choices(alphabet, k=draw.randrange(1, 40))) for _ in range(99))]:
        found = encode_text(tokenizer, text)
        assert found == merged(text, pieces, scores), repr(text)
        assert tokenizer.decode([1, *found]) == text
        assert tokenizer.encode(text).ids == [1, *found]


def test_it_is_saved_as_any_tokenizer_and_begins_prompts(tmp_path):
    write_llama2c_tokenizer(tmp_path / "a.bin")
    read_llama2c_tokenizer(tmp_path / "a.bin").save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert separator_id(tokenizer) == 1
    assert encode_prompt(tokenizer, "abc") == [1, *encode_text(tokenizer, "abc")]
    assert encode_prompt(tokenizer, "") == [1]
    assert encode_prompt(tokenizer, "<s>abc") == encode_text(tokenizer, "<s>abc")
    assert encode_prompt(load_tokenizer("bytes"), "abc") == [97, 98, 99]


def at(place, form, value):
    """A change that writes a packed number into the file."""
    packed = struct.pack(form, value)
    return lambda raw: raw[:place] + packed + raw[place + len(packed) :]


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: raw[:3], "has 3 bytes, too few"),
    (lambda raw: raw[:-1], r"token \d+, at byte \d+, has a length of 2"),
    (lambda raw: raw + b"\0" * 5, "is cut short"),
    (at(8, "<i", -1), "token 0, at byte 4, has a length of -1"),
    (at(8, "<i", 2**31 - 1), "has a length of 2147483647"),
    (at(4, "<f", float("nan")), "has the score nan"),
    (at(0, "<i", 1025), "its longest token has 1025 bytes; at most 1024"),
    (at(12, "B", 255), "is not UTF-8"),
    (lambda raw: raw.replace(b"<0x41>", b"<0x42>"), "token 68 must be <0x41>"),
    (lambda raw: raw + struct.pack("<fi", -99.0, 2) + b"ab", "holds the token 'ab' twice"),
    (lambda raw: raw + struct.pack("<fi", -5.0, 2) + b"ba", "'ab' and 'ba' have the same score, -5.0"),
    (lambda raw: bytes(MOST_BYTES + 1), "is larger than 67,108,864 bytes"),
    (None, "no file"),
])  # fmt: skip
def test_a_damaged_file_is_refused(change, message, tmp_path):
    file = tmp_path / "a.bin"
    if change is not None:
        write_llama2c_tokenizer(file)
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        read_llama2c_tokenizer(file)
    assert str(file) in str(caught.value)
