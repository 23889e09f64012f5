"""Read tokenizer files of llama2.c (A. Karpathy, github.com/karpathy/llama2.c) as a `tokenizers.Tokenizer`.

Little-endian: an int32, the length in bytes of the longest token; then for each token a float32 score, an int32 length
and its UTF-8 bytes. Token 0 is unknown, 1 begins a text, 2 ends one, 3 to 258 are the bytes `<0x00>` to `<0xFF>`.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

BOS = 1
BOS_TEXT = "<s>"
_BYTES = 3
MOST_BYTES = 1 << 26
"""Largest file that is read; 32,000 tokens take 400 kilobytes."""
LONGEST = 1024
"""Longest token that is read, in bytes; TinyStories' longest has 7."""


def read_llama2c_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a tokenizer that yields llama2.c's tokens and can be saved as `tokenizer.json`.

    The text, with a space in front, is split into characters, or bytes for characters without a token. Then the
    neighbours that form the token with the highest score are merged, leftmost first, until no pair forms a token. `<s>`
    begins a text if special tokens are asked for; decoding removes the leading space.

    Raises `FileNotFoundError` for a missing file, and `ValueError`, naming it, for a file that is damaged or whose
    scores leave the order of merges open.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES:,} bytes, too large for a tokenizer of llama2.c")
    tokens, scores = _read(path.read_bytes(), path)
    ids = {token: id for id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if ids[token] != id)
        raise ValueError(f"{path} holds the token {twice!r} twice")
    merges = _merges(ids, scores, path)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=tokens[0], byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TEXT} $A", pair=f"{BOS_TEXT} $A {BOS_TEXT} $B", special_tokens=[(BOS_TEXT, BOS)]
    )
    tokenizer.add_special_tokens([AddedToken(BOS_TEXT, normalized=False)])
    return tokenizer


def _read(raw: bytes, path: Path) -> tuple[list[str], list[float]]:
    if len(raw) < 4:
        raise ValueError(f"{path} has {len(raw)} bytes, too few for a tokenizer of llama2.c")
    (longest,) = struct.unpack_from("<i", raw)
    if longest > LONGEST:  # finding a token's merges costs the square of its length
        raise ValueError(f"{path} says that its longest token has {longest} bytes; at most {LONGEST} are valid")
    tokens: list[str] = []
    scores: list[float] = []
    at = 4
    while at < len(raw):
        where = f"{path}: token {len(tokens)}, at byte {at},"
        if len(raw) - at < 8:
            raise ValueError(f"{where} is cut short")
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8
        if not 0 < length <= min(longest, len(raw) - at):
            raise ValueError(f"{where} has a length of {length}, not 1 to {min(longest, len(raw) - at)}")
        if not math.isfinite(score):
            raise ValueError(f"{where} has the score {score}")
        try:
            tokens.append(raw[at : at + length].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8: {error}") from error
        scores.append(score)
        at += length
    for byte in range(256):
        if tokens[_BYTES + byte : _BYTES + byte + 1] != [f"<0x{byte:02X}>"]:
            raise ValueError(f"{path}: token {_BYTES + byte} must be <0x{byte:02X}>, as in all tokenizers of llama2.c")
    tokens[BOS] = BOS_TEXT  # the file has it between line breaks
    return tokens, scores


def _merges(ids: dict[str, int], scores: list[float], path: Path) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a token, by descending score; `ValueError` for equal scores (order open)."""
    made: list[tuple[float, int, str]] = []
    whose: dict[float, str] = {}
    for token, id in ids.items():
        if not any(token[:i] in ids and token[i:] in ids for i in range(1, len(token))):
            continue
        score = scores[id]
        if score in whose:
            raise ValueError(f"{path}: the tokens {whose[score]!r} and {token!r} have the same score, {score}")
        whose[score] = token
        made.append((-score, id, token))
    pairs: list[tuple[str, str]] = []
    for _, _, token in sorted(made):
        cuts = range(1, len(token))
        pairs += [(token[:i], token[i:]) for i in cuts if token[:i] in ids and token[i:] in ids]
    return pairs
