"""Load tokenizers, encode and decode: bytes, trained ones (`vocabularies`), or any other `tokenizer.json`."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from subquad.config import suggest
from subquad.data.special_tokens import (
    name_special_tokens,
    read_special_tokens,
    separator_id,
    special_tokens,
    usual_end,
)
from subquad.data.token_set import TokenSet
from subquad.data.vocabularies import TRAINED, character_ids, gpt2_files, load_gpt2
from subquad.parsing import parse_json, read_text

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 24
"""Bound on token ids: a model's embedding has a row for each id up to the greatest."""
LOOKED_AT = 1 << 22
"""Number of tokens in which carriage returns are counted."""
# Byte-level pre-tokens hold blanks only at their start, so one always ends between a visible character and a blank.
_CUT = re.compile(rb"[!-~](?=\s)")
_PIECE = 1 << 18


def load_tokenizer(name: str | Path, also: Sequence[str] = ()) -> Tokenizer:
    """Load the tokenizer `bytes`, a `tokenizer.json`, or a folder that holds one or GPT-2's two files.

    Transformers' files beside a `tokenizer.json` name its special tokens (`subquad.data.special_tokens`). Raises
    `ValueError` for an unknown name, listing the valid ones and `also`, and for a file that is not a tokenizer, has no
    token, or has ids of `MOST_TOKENS` or more.
    """
    if name == "bytes":
        return bytes_tokenizer()
    file = Path(name).expanduser()
    if file.is_dir():
        folder, file = file, file / "tokenizer.json"
        if not file.is_file() and (pair := gpt2_files(folder)) is not None:
            tokenizer = load_gpt2(*pair)
            name_special_tokens(tokenizer, read_special_tokens(folder))
            return tokenizer
    if not file.is_file():
        if name in TRAINED:
            raise ValueError(f"the tokenizer {name!r} has to be trained first; valid here: bytes or a tokenizer.json")
        raise ValueError(
            f"unknown tokenizer {str(name)!r}: it is neither a tokenizer.json nor a folder with one or with GPT-2's "
            "encoder.json and vocab.bpe; " + suggest(str(name), ["bytes", *also, "PATH/tokenizer.json"])
        )
    text = read_text(file)
    parse_json(text, str(file))  # checks bounds that the Rust library lacks
    with _named(f"{file} is not a tokenizer.json"):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        vocabulary = tokenizer.get_vocab()
        if not vocabulary or max(vocabulary.values()) >= MOST_TOKENS:
            raise ValueError(f"it must have at least one token, and none above {MOST_TOKENS:,}")
    name_special_tokens(tokenizer, read_special_tokens(file.parent))
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer that `load_tokenizer` reads."""
    return (folder / "tokenizer.json").is_file() or gpt2_files(folder) is not None


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn anything that the Rust library raises, panics included, into a `ValueError` that begins with `what`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer of 256 tokens in which the byte b has the id b.

    Bytes are spelled as in byte-level models: printable Latin-1 as itself, the others by characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of `text`; raise `ValueError` for a character that the tokenizer cannot encode."""
    known = character_ids(tokenizer)
    if known is not None:
        return _characters_to_ids(text, known, "the text").tolist()
    with _named("the tokenizer cannot encode the text"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of `text` after the begin tokens, unless it spells them out itself. Raises as `encode_text`."""
    if tokenizer.post_processor is None:
        return encode_text(tokenizer, text)
    with _named("the tokenizer cannot encode the text"):
        begun = tokenizer.encode("a", add_special_tokens=True)
        first = next((i for i, added in enumerate(begun.special_tokens_mask) if not added), 0)
    start, ids = begun.ids[:first], encode_text(tokenizer, text)
    return ids if ids[:first] == start else start + ids


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return a SHA-256 of everything that defines the tokenizer, with its end token if that isn't one of the usual."""
    end = special_tokens(tokenizer).get("eos_token")
    named = "" if end is None or end == usual_end(tokenizer) else end
    return hashlib.sha256((tokenizer.to_str() + named).encode()).hexdigest()


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return the number of rows that a model's embedding needs: the greatest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: Tokenizer, known: int, advice: str = "is it another model's?") -> None:
    """Raise `ValueError` if the tokenizer has more tokens than the `known` of a model."""
    size = vocab_size(tokenizer)
    if size > known:
        raise ValueError(f"the tokenizer has {size} tokens, the model knows {known}; {advice}")


def warn_of_carriage_returns(tokenizer: Tokenizer, tokens: np.ndarray | TokenSet, where: str) -> None:
    """Warn if the first `LOOKED_AT` of `tokens` have CRLF line ends, each of which is one more character to predict."""
    texts = tokenizer.decode_batch([[token] for token in range(vocab_size(tokenizer))], skip_special_tokens=False)
    returns = [token for token, text in enumerate(texts) if "\r" in text]
    count = int(np.isin(tokens[:LOOKED_AT], returns).sum())
    if count:
        logger.warning(
            "%s has CRLF line ends (%s carriage returns%s): the loss counts each, and they are unlikely to a model "
            "trained on plain line ends; if that is not intended, convert the text by dos2unix or sed 's/\\r$//'",
            where, f"{count:,}", "" if len(tokens) <= LOOKED_AT else f" in the first {LOOKED_AT:,} tokens",
        )  # fmt: skip


class Encoder:
    """Encode documents to arrays of token ids in pieces, so that memory does not grow with the longest document.

    Byte-level tokenizers like those of `vocabularies` get pieces cut where no token can cross; others get whole
    documents. `separator` holds the ids between documents, one or none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        with _named("the tokenizer cannot be copied"):
            self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True  # a separator that a document spells out is text
        separator = separator_id(tokenizer)
        self.separator = np.array([] if separator is None else [separator], dtype=np.int64)
        self.is_bytes = tokenizer_hash(tokenizer) == _bytes_hash()
        own = pre_tokenizers.ByteLevel(add_prefix_space=False)  # the pre-tokenizer of `vocabularies`
        self.cuts = tokenizer.normalizer is None and str(tokenizer.pre_tokenizer) == str(own)
        self.characters = character_ids(tokenizer)

    def encode(self, texts: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield pairs of a document's number and its next token ids, in order, at least one for each document."""
        if self.is_bytes:
            for number, text in enumerate(texts):
                yield number, np.frombuffer(text, dtype=np.uint8)
            return
        if self.characters is not None:
            for number, text in enumerate(texts):
                yield number, _characters_to_ids(text.decode(), self.characters, f"document {number}")
            return
        batch: list[tuple[int, str]] = []
        size = 0
        for number, text in enumerate(texts):
            for piece in pieces(text) if self.cuts else [text]:
                batch.append((number, piece.decode()))
                size += len(piece)
                if size >= 4 * _PIECE:
                    yield from self._flush(batch)
                    batch, size = [], 0
        yield from self._flush(batch)

    def _flush(self, batch: list[tuple[int, str]]) -> Iterator[tuple[int, np.ndarray]]:
        with _named("the tokenizer cannot encode the text"):
            encodings = self.tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        for (number, _), encoding in zip(batch, encodings, strict=True):
            yield number, np.array(encoding.ids, dtype=np.int64)


def _characters_to_ids(text: str, ids: dict[str, int], where: str) -> np.ndarray:
    """Return the id of each character; raise `ValueError`, with its place, at the first unknown one."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    known = np.array(sorted(map(ord, ids)), dtype=np.uint32)
    places = np.searchsorted(known, codes).clip(max=max(0, len(known) - 1))
    wrong = known[places] != codes if len(known) else np.ones(len(codes), dtype=bool)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(f"{where} has {text[place]!r} at character {place}, not one of the tokenizer's {len(ids)}")
    return np.array([ids[chr(code)] for code in known], dtype=np.int64)[places]


def pieces(text: bytes) -> Iterator[bytes]:
    """Split `text` between words into pieces of at least `_PIECE` bytes (the last may be shorter)."""
    start = 0
    while len(text) - start > _PIECE and (cut := _CUT.search(text, start + _PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


@lru_cache(maxsize=1)
def _bytes_hash() -> str:
    return tokenizer_hash(bytes_tokenizer())
