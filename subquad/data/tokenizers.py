"""Tokenizers that a `tokenizer.json` holds: bytes, a byte-level BPE trained here, or any other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from subquad.config import suggest

SEPARATOR = "<|endoftext|>"
"""What stands between two documents for a BPE trained here."""
_SEPARATORS = (SEPARATOR, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
# Pre-tokens of `train_bpe` hold blanks at their start only, so one always ends between a visible character and a blank.
_CUT = re.compile(rb"[!-~](?=\s)")
_PIECE = 1 << 18


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer `bytes`, or the one in a `tokenizer.json` or in a folder that holds one.

    Raises `ValueError` for another name and for a file that is no tokenizer.
    """
    if name == "bytes":
        return bytes_tokenizer()
    file = Path(name).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"unknown tokenizer {str(name)!r}: it is neither a tokenizer.json nor a folder that holds one; "
            + suggest(str(name), ["bytes", "bpe", "PATH/tokenizer.json"])
        )
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the Rust library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def bytes_tokenizer() -> Tokenizer:
    """The vocabulary of exactly 256 tokens in which the byte b has the id b."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_chars())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens; the separator has the id 0 and every text can be encoded.

    The same texts give the same tokenizer. Few texts give fewer tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Sixty-four hexadecimal digits that differ when the tokenizer does."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def separator_id(tokenizer: Tokenizer) -> int | None:
    """The token that ends a document, by its usual names; None where there is none, as in `bytes`."""
    ids = (tokenizer.token_to_id(token) for token in _SEPARATORS)
    return next((id for id in ids if id is not None), None)


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the greatest id: the rows that a model's embedding needs."""
    return max(tokenizer.get_vocab().values()) + 1


class Encoder:
    """Documents to arrays of token ids, piece by piece, so that memory does not grow with the longest document.

    A tokenizer of ours is fed pieces that end where no token can cross; another one gets whole documents. `separator`
    holds the ids that stand between documents, one or none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self.tokenizer.encode_special_tokens = True  # a separator that a document spells out is text
        separator = separator_id(tokenizer)
        self.separator = np.array([] if separator is None else [separator], dtype=np.int64)
        self.is_bytes = tokenizer_hash(tokenizer) == _bytes_hash()
        self.cuts = _is_ours(tokenizer)

    def encode(self, texts: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]:
        """Pairs of a document's number and its next token ids, in order; each document has at least one pair."""
        if self.is_bytes:
            for number, text in enumerate(texts):
                yield number, np.frombuffer(text, dtype=np.uint8)
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
        encodings = self.tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        for (number, _), encoding in zip(batch, encodings, strict=True):
            yield number, np.array(encoding.ids, dtype=np.int64)


def pieces(text: bytes) -> Iterator[bytes]:
    """Cuts of `text` between words, each a quarter of a mebibyte or longer."""
    start = 0
    while len(text) - start > _PIECE and (cut := _CUT.search(text, start + _PIECE)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _is_ours(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer splits text as `train_bpe`'s do, by the form of its pre-tokenizer."""
    own = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer.normalizer is None and str(tokenizer.pre_tokenizer) == str(own)


@lru_cache(maxsize=1)
def _bytes_hash() -> str:
    return tokenizer_hash(bytes_tokenizer())


def _byte_chars() -> list[str]:
    """The character that byte-level models write for each byte: printable Latin-1 as it is, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
