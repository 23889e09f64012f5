"""Tokenizers that a `tokenizer.json` holds: bytes, one made here (`vocabularies`), or any other."""

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
from subquad.data.token_set import TokenSet
from subquad.data.vocabularies import SEPARATOR, TRAINED, character_ids, gpt2_files, load_gpt2
from subquad.parsing import parse_json, read_text

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 24
"""Of a vocabulary: a model has a row for each number up to the greatest."""
LOOKED_AT = 1 << 22
"""Tokens of a text in which carriage returns are counted."""
_SEPARATORS = (SEPARATOR, "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<s>")
# Byte-level pre-tokens hold blanks at their start only, so one always ends between a visible character and a blank.
_CUT = re.compile(rb"[!-~](?=\s)")
_PIECE = 1 << 18


def load_tokenizer(name: str | Path, also: Sequence[str] = ()) -> Tokenizer:
    """Load the tokenizer `bytes`, the one in a `tokenizer.json` or in a folder that holds one, or GPT-2's two files.

    Raises `ValueError` for another name, which lists `also` those that the caller knows, and for a file that is no
    tokenizer, has no token or numbers them too high.
    """
    if name == "bytes":
        return bytes_tokenizer()
    file = Path(name).expanduser()
    if file.is_dir():
        folder, file = file, file / "tokenizer.json"
        if not file.is_file() and (pair := gpt2_files(folder)) is not None:
            return load_gpt2(*pair)
    if not file.is_file():
        if name in TRAINED:
            raise ValueError(
                f"a tokenizer {name!r} is made of a text; one that is there is needed here: bytes or a tokenizer.json"
            )
        raise ValueError(
            f"unknown tokenizer {str(name)!r}: it is neither a tokenizer.json nor a folder that holds one, or GPT-2's "
            "encoder.json and vocab.bpe; " + suggest(str(name), ["bytes", *also, "PATH/tokenizer.json"])
        )
    text = read_text(file)
    parse_json(text, str(file))  # bounds that the Rust library has not
    with _named(f"{file} is not a tokenizer.json"):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        vocabulary = tokenizer.get_vocab()
        if not vocabulary or max(vocabulary.values()) >= MOST_TOKENS:
            raise ValueError(f"it must have at least one token, and none above {MOST_TOKENS:,}")
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return whether `load_tokenizer` finds files of one in a folder."""
    return (folder / "tokenizer.json").is_file() or gpt2_files(folder) is not None


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise a `ValueError` that begins with `what` for anything that the Rust library raises, panics too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def bytes_tokenizer() -> Tokenizer:
    """Make the vocabulary of exactly 256 tokens in which the byte b has the id b.

    The character of each byte is that of byte-level models: printable Latin-1 as it is, the rest from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of `text`; `ValueError` for a character that a tokenizer of characters lacks."""
    known = character_ids(tokenizer)
    if known is not None:
        return _characters_to_ids(text, known, "the text").tolist()
    with _named("the tokenizer cannot encode the text"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of `text` after those that begin every text of this tokenizer, as Llama's `<s>`.

    A text that spells them out itself, as chat templates do, gets no second ones. Raises as `encode_text`.
    """
    if tokenizer.post_processor is None:
        return encode_text(tokenizer, text)
    with _named("the tokenizer cannot encode the text"):
        begun = tokenizer.encode("a", add_special_tokens=True)
        first = next((i for i, added in enumerate(begun.special_tokens_mask) if not added), 0)
    start, ids = begun.ids[:first], encode_text(tokenizer, text)
    return ids if ids[:first] == start else start + ids


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Return sixty-four hexadecimal digits that differ when the tokenizer does."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def separator_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a document, by its usual names; None where there is none, as in `bytes`."""
    ids = (tokenizer.token_to_id(token) for token in _SEPARATORS)
    return next((id for id in ids if id is not None), None)


def vocab_size(tokenizer: Tokenizer) -> int:
    """Return one more than the greatest id: the rows that a model's embedding needs."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabulary(tokenizer: Tokenizer, known: int, advice: str = "is it another model's?") -> None:
    """Raise `ValueError` where the tokenizer has more tokens than the `known` ones of a model."""
    size = vocab_size(tokenizer)
    if size > known:
        raise ValueError(f"the tokenizer has {size} tokens, the model knows {known}; {advice}")


def warn_of_carriage_returns(tokenizer: Tokenizer, tokens: np.ndarray | TokenSet, where: str) -> None:
    """Log a warning where the text of `tokens` has CRLF line ends: each is one character more to predict.

    Of a long text the first `LOOKED_AT` tokens are looked at.
    """
    texts = tokenizer.decode_batch([[token] for token in range(vocab_size(tokenizer))], skip_special_tokens=False)
    returns = [token for token, text in enumerate(texts) if "\r" in text]
    count = int(np.isin(tokens[:LOOKED_AT], returns).sum())
    if count:
        logger.warning(
            "%s has CRLF line ends (%s carriage returns%s): the loss counts each, and a model of texts with plain line "
            "ends finds them unlikely; convert the text, by dos2unix or sed 's/\\r$//', where that isn't meant",
            where, f"{count:,}", "" if len(tokens) <= LOOKED_AT else f" in the first {LOOKED_AT:,} tokens",
        )  # fmt: skip


class Encoder:
    """Documents to arrays of token ids, piece by piece, so that memory does not grow with the longest document.

    A tokenizer made here is fed pieces that end where no token can cross; another one gets whole documents. `separator`
    holds the ids that stand between documents, one or none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        with _named("the tokenizer cannot be copied"):
            self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True  # a separator that a document spells out is text
        separator = separator_id(tokenizer)
        self.separator = np.array([] if separator is None else [separator], dtype=np.int64)
        self.is_bytes = tokenizer_hash(tokenizer) == _bytes_hash()
        own = pre_tokenizers.ByteLevel(add_prefix_space=False)  # by its form a tokenizer splits text as those made here
        self.cuts = tokenizer.normalizer is None and str(tokenizer.pre_tokenizer) == str(own)
        self.characters = character_ids(tokenizer)

    def encode(self, texts: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a document's number and its next token ids, in order; each document has at least one pair."""
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
    """Return the id of each character; `ValueError` names the first unknown one and its place."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    known = np.array(sorted(map(ord, ids)), dtype=np.uint32)
    places = np.searchsorted(known, codes).clip(max=max(0, len(known) - 1))
    wrong = known[places] != codes if len(known) else np.ones(len(codes), dtype=bool)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"{where} has {text[place]!r} at character {place}, which is none of the tokenizer's {len(ids)} characters"
        )
    return np.array([ids[chr(code)] for code in known], dtype=np.int64)[places]


def pieces(text: bytes) -> Iterator[bytes]:
    """Yield cuts of `text` between words, each a quarter of a mebibyte or longer."""
    start = 0
    while len(text) - start > _PIECE and (cut := _CUT.search(text, start + _PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


@lru_cache(maxsize=1)
def _bytes_hash() -> str:
    return tokenizer_hash(bytes_tokenizer())
