"""Text that is decoded token by token, up to a stop string."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from subquad.generation import TextStream
from subquad.generation.stream import StopStrings

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = st.text(st.sampled_from("a äé€😀\ufffd"), max_size=12)
"""Characters of one to four bytes, and the mark of broken ones."""


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Byte-level tokens, and two that hold more than one byte."""
    words = {symbol: i for i, symbol in enumerate(ALPHABET)}
    merges = [("Ġ", "a"), ("Ã", "¤")]  # " a", and the two bytes of "ä"
    words |= {"".join(pair): len(words) + i for i, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(words, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def word_piece() -> Tokenizer:
    """Pieces that decode differently after others."""
    words = ["[UNK]", "play", "##ing", "##s", "he", ",", "now"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def pieces(tokenizer: Tokenizer, tokens: list[int], context: list[int] | None = None) -> list[str]:
    stream = TextStream(tokenizer, context or [])
    return [*(stream.push(token) for token in tokens), stream.finish()]


@given(tokens=st.lists(st.integers(0, 257), max_size=40))
def test_pieces_join_to_the_text_of_all_tokens_whatever_the_bytes(byte_level, tokens):
    assert "".join(pieces(byte_level, tokens)) == byte_level.decode(tokens)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """One token a byte, as in SentencePiece tokenizers, and one mark for each byte of an unfinished character."""
    words = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@given(text=TEXT)
def test_no_piece_holds_half_a_character(byte_level, fallback, text):
    bytes_of_text = [byte + 1 for byte in text.encode()]
    for tokenizer, tokens in ((byte_level, byte_level.encode(text).ids), (fallback, bytes_of_text)):
        shown = pieces(tokenizer, tokens)
        assert "".join(shown) == text
        assert sum(piece.count("\ufffd") for piece in shown) == text.count("\ufffd")


def test_a_character_is_shown_with_its_last_byte_or_at_the_end(byte_level):
    assert pieces(byte_level, byte_level.encode("a€b").ids) == ["a", "", "", "€", "b", ""]
    assert pieces(byte_level, byte_level.encode("€").ids[:2]) == ["", "", "\ufffd"]


def test_the_context_gives_spaces_and_the_beginning_of_a_character(byte_level, word_piece):
    ids = [word_piece.token_to_id(word) for word in ("he", "play", "##s", ",", "now")]
    for known in (0, 1):
        shown = word_piece.decode(ids[:known]) + "".join(pieces(word_piece, ids[known:], ids[:known]))
        assert shown == word_piece.decode(ids)
    tokens = byte_level.encode("x€y").ids
    assert "".join(pieces(byte_level, tokens[2:], tokens[:2])) == "€y"


def test_long_streams_keep_few_tokens(byte_level):
    stream = TextStream(byte_level)
    for token in byte_level.encode("abc " * 500).ids:
        stream.push(token)
    assert len(stream._tokens) < 8


def passed(stops, parts):
    """The text that passes the filter, and the stop string that ended it."""
    watch = StopStrings(stops)
    return "".join([*(watch.push(part) for part in parts), watch.finish()]), watch.stopped


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("ab", max_size=20),
    st.lists(st.integers(0, 20), max_size=8),
)
def test_the_text_ends_before_a_stop_string_wherever_the_pieces_are_cut(stops, text, cuts):
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    got, stopped = passed(stops, [text[a:b] for a, b in itertools.pairwise(places)])
    if not any(stop in text for stop in stops):
        assert (got, stopped) == (text, None)
        return
    assert stopped in stops
    assert text.startswith(got + stopped)
    assert not any(stop in got for stop in stops)


@given(st.text("ab", max_size=20))
def test_the_first_complete_stop_string_wins_where_characters_come_one_at_a_time(text):
    got, stopped = passed(["aab", "ba"], text)
    ends = {stop: text.find(stop) + len(stop) for stop in ("aab", "ba") if stop in text}
    assert stopped == (min(ends, key=lambda stop: ends[stop]) if ends else None)
    assert got == (text if stopped is None else text[: text.find(stopped)])


def test_only_a_possible_beginning_of_a_stop_string_is_held_back():
    watch = StopStrings(["###"])
    assert [watch.push(piece) for piece in ("one #", "# two", " #", "##", "more")] == ["one ", "## two", " ", "", ""]
    assert watch.stopped == "###"
    assert watch.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="a stop string must hold at least one character, got an empty one"):
        StopStrings(["a", ""])
