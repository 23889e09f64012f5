"""llama2.c's tokenizers: the tokens are those of its own way, merge by merge."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from subquad.data import load_tokenizer
from subquad.data.llama2c import read_llama2c_tokenizer
from subquad.data.tokenizers import encode_prompt, encode_text, separator_id
from tests.fuzz.targets import LLAMA2C_PIECES, write_llama2c_tokenizer


def pieces_of(file: Path) -> tuple[list[str], list[float]]:
    raw, at, pieces, scores = file.read_bytes(), 4, [], []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        pieces.append(raw[at + 8 : at + 8 + length].decode())
        scores.append(score)
        at += 8 + length
    return pieces, scores


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


def check(file: Path, alphabet: str) -> None:
    tokenizer = Tokenizer.from_str(read_llama2c_tokenizer(file).to_str())  # as saved
    pieces, scores = pieces_of(file)
    draw = random.Random(0)
    texts = ["", " ", "  a", "a\n", *("".join(draw.choices(alphabet, k=draw.randrange(1, 40))) for _ in range(300))]
    for text in texts:
        found = encode_text(tokenizer, text)
        assert found == merged(text, pieces, scores), repr(text)
        assert tokenizer.decode([1, *found]) == text
        assert tokenizer.encode(text).ids == [1, *found]


def test_the_tokens_are_those_of_merging_one_pair_at_a_time(tmp_path: Path) -> None:
    write_llama2c_tokenizer(tmp_path / "a.bin")
    check(tmp_path / "a.bin", "abcé x🙂")
    write_llama2c_tokenizer(tmp_path / "b.bin", [" ", "a", "aa", "aaa", "aaaa", " a", " aa", "b", "ab", "ba", "aab"])
    check(tmp_path / "b.bin", "aaaaaab ")


def test_tinystories_tokens_are_those_of_merging_one_pair_at_a_time(data_folder: Path) -> None:
    file = data_folder / "stories260K" / "tok512.bin"
    check(file, "Once upon a time, there was a little girl named Lily.\nShe loved to play é")


def test_it_is_saved_as_any_tokenizer_and_begins_prompts(tmp_path: Path) -> None:
    write_llama2c_tokenizer(tmp_path / "a.bin")
    read_llama2c_tokenizer(tmp_path / "a.bin").save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert separator_id(tokenizer) == 1
    assert encode_prompt(tokenizer, "abc") == [1, *encode_text(tokenizer, "abc")]
    assert encode_prompt(tokenizer, "") == [1]
    assert encode_prompt(tokenizer, "<s>abc") == encode_text(tokenizer, "<s>abc")
    assert encode_prompt(load_tokenizer("bytes"), "abc") == [97, 98, 99]


def damaged(raw: bytes, at: int, value: bytes) -> bytes:
    return raw[:at] + value + raw[at + len(value) :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:3], "has 3 bytes, too few"),
        (lambda raw: raw[:-1], r"token \d+, at byte \d+, has a length of 2"),
        (lambda raw: raw + b"\0" * 5, "is cut short"),
        (lambda raw: damaged(raw, 8, struct.pack("<i", -1)), "token 0, at byte 4, has a length of -1"),
        (lambda raw: damaged(raw, 8, struct.pack("<i", 2**31 - 1)), "has a length of 2147483647"),
        (lambda raw: damaged(raw, 4, struct.pack("<f", float("nan"))), "has the score nan"),
        (lambda raw: damaged(raw, 0, struct.pack("<i", 1025)), "its longest token has 1025 bytes; at most 1024"),
        (lambda raw: damaged(raw, 12, b"\xff"), "is not UTF-8"),
        (lambda raw: raw.replace(b"<0x41>", b"<0x42>"), "token 68 must be <0x41>"),
    ],
)
def test_a_damaged_file_is_refused(change, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    write_llama2c_tokenizer(file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        read_llama2c_tokenizer(file)
    assert str(file) in str(caught.value)


def test_a_vocabulary_that_does_not_say_what_comes_first_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    write_llama2c_tokenizer(file, [*LLAMA2C_PIECES, "ab"])
    with pytest.raises(ValueError, match="holds the token 'ab' twice"):
        read_llama2c_tokenizer(file)
    write_llama2c_tokenizer(file, scores=[0.0] * (259 + len(LLAMA2C_PIECES)))
    with pytest.raises(ValueError, match=r"'ab' and ' a' have the same score, 0\.0"):
        read_llama2c_tokenizer(file)
    with pytest.raises(FileNotFoundError, match="no file"):
        read_llama2c_tokenizer(tmp_path / "b.bin")


def test_a_file_of_no_tokenizers_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama2c_tokenizer(tmp_path / "a.bin")
    monkeypatch.setattr("subquad.data.llama2c.MOST_BYTES", 100)
    with pytest.raises(ValueError, match="is larger than 100 bytes"):
        read_llama2c_tokenizer(tmp_path / "a.bin")
