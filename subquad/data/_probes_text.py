"""The passkey probe for models of text: a sentence with a key somewhere in real text, and a question at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from subquad.data.probes import DIGITS, ProbeRows, Seed, check_depth, empty_rows, generators
from subquad.data.tokenizers import encode_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BEFORE, AFTER = "\nThe pass key is", ". Keep it in mind.\n"
QUESTION = "\nWhat was the pass key? The pass key is"


def text_passkey(
    tokenizer: Tokenizer,
    text: np.ndarray,
    length: int,
    rows: int,
    /,
    *,
    digits: int = 5,
    depth: float | None = None,
    first: int = 0,
    seed: Seed = 0,
) -> ProbeRows:
    """`text BEFORE key AFTER text QUESTION key`: the tokens of a key of so many digits are asked for at the end.

    `text` holds tokens `[N]`; each row takes a piece of it that begins at a random place. `depth` is that of
    `subquad.data.probes.passkey`. All parts are tokenised apart, so that the key is the same tokens at both places.
    Raises `ValueError` for a tokenizer that cannot spell digits, for a length in which the parts leave no room, for a
    text shorter than that room, and for a depth outside of 0 to 1.
    """
    check_depth(depth)
    if digits < 1:
        raise ValueError(f"digits must be at least 1, got {digits}")
    before, after, question = (np.array(encode_text(tokenizer, part)) for part in (BEFORE, AFTER, QUESTION))
    made = empty_rows(length, rows)
    for row, rng in enumerate(generators(seed, first, rows)):
        key = _key(tokenizer, "".join(map(str, rng.integers(DIGITS, size=digits))))
        room = length - len(before) - len(after) - len(question) - 2 * len(key)
        if room < 0:
            raise ValueError(
                f"the sentences around a key of {digits} digits take {length - room} tokens, got length={length}"
            )
        if room > len(text):
            raise ValueError(f"the text has {len(text)} tokens, and {room} are needed to fill length={length}")
        start = int(rng.integers(len(text) - room + 1))
        filler = np.asarray(text[start : start + room], dtype=np.int64)
        place = int(rng.integers(room + 1)) if depth is None else round(depth * room)
        parts = (filler[:place], before, key, after, filler[place:], question, key)
        made.tokens[row] = np.concatenate(parts)
        made.labels[row, length - len(key) :] = key
        begin = place + len(before)
        made.source[row, length - len(key) :] = np.arange(begin, begin + len(key))
    return made


def _key(tokenizer: Tokenizer, digits: str) -> np.ndarray:
    """The tokens of a key after a blank."""
    ids = encode_text(tokenizer, f" {digits}")
    if (spelt := tokenizer.decode(ids).strip()) != digits:
        raise ValueError(
            f"the tokenizer cannot spell digits: {digits!r} becomes {spelt!r}; passkey needs one that can, such as "
            "bytes or a byte-level BPE"
        )
    return np.array(ids)
