"""Generate memory probes: sequences with tokens that can be predicted only by recalling earlier ones.

Row i is a function of the seed, the length, the probe's configuration and i alone.
Shape letters: B batch (rows), T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from subquad.config import check_at_least, digest
from subquad.data.config import MARKS, ProbeConfig
from subquad.data.tokenizers import encode_text
from subquad.data.windows import check_index

VERSION = 1
IGNORED = -100
NOTHING = -1
DIGITS = 10
KEY, ASK, FILLER = DIGITS, DIGITS + 1, DIGITS + MARKS
"""Tokens of the passkey probe after the ten digits: the mark before the key, the question, the first filler token."""
SEPARATOR = 0
"""Token between the two strings of the copy probe; the letters follow it."""
POWER = 0.01
"""The weight of a question of mqar at the i-th place after the pairs is `i ** (POWER - 1)`, as in Zoology."""

Seed = int | Sequence[int]
"""Non-negative. NumPy seeds each row with it and the row's number, padded with zeros: row 0 of the seed (0, 5) is row 5
of the seed 0. Among seeds with the same number of parts no two rows share random numbers."""


class ProbeRows(NamedTuple):
    """Sequences and the tokens to recall, all int64 `[B, T]`."""

    tokens: np.ndarray
    labels: np.ndarray
    """Token to predict at this place from those before it; -100 if none is asked for."""
    source: np.ndarray
    """Place of the earlier token that the label repeats; -1 if none is asked for."""

    @property
    def asked(self) -> np.ndarray:
        """Bool `[B, T]`, True where a token is asked for."""
        return self.labels != IGNORED


def probe_rows(
    config: ProbeConfig, length: int, rows: int, /, *, depth: float | None = None, first: int = 0, seed: Seed = 0
) -> ProbeRows:
    """Make rows `first` to `first + rows - 1` of the probe `config`, `length` tokens each.

    `depth` places the passkey: at 0 the mark before the key is the first token, at 1 the question follows the key
    directly; None draws the place in each row. `seed` is used instead of the configuration's. Raises `ValueError` for
    an invalid length, depth or number of rows, and for a depth with another probe.
    """
    if depth is not None and config.name != "passkey":
        raise ValueError(f"depth is valid only for the probe passkey, got depth={depth} for {config.name}")
    check_depth(depth)
    asked = config.first_asked(length)
    made = empty_rows(length, rows)
    for number, rng in enumerate(generators(seed, first, rows)):
        row = ProbeRows(*(array[number] for array in made))
        if config.name == "passkey":
            _passkey(config, asked, depth, rng, row)
        elif config.name == "mqar":
            _mqar(config, asked, rng, row)
        else:
            _copy(config, rng, row)
    return made


def _passkey(config: ProbeConfig, asked: int, depth: float | None, rng: np.random.Generator, row: ProbeRows) -> None:
    """Fill a row with `filler KEY d1..dk filler ASK d1..dk`: k random digits after a mark, asked for at the end.

    Tokens: the digits 0 to 9, the mark, the question, `symbols` tokens of random filler. Source: the task of Mohtashami
    and Jaggi 2023, arXiv:2305.16300, section 4.2, in tokens instead of words.
    """
    room = len(row.tokens) - config.fewest_tokens
    start = int(rng.integers(room + 1)) if depth is None else round(depth * room)
    key = rng.integers(DIGITS, size=config.digits)
    row.tokens[:] = rng.integers(FILLER, config.vocab_size, size=len(row.tokens))
    row.tokens[start] = KEY
    row.tokens[start + 1 : start + 1 + config.digits] = key
    row.tokens[asked - 1] = ASK
    row.tokens[asked:] = row.labels[asked:] = key
    row.source[asked:] = np.arange(start + 1, start + 1 + config.digits)


def _mqar(config: ProbeConfig, asked: int, rng: np.random.Generator, row: ProbeRows) -> None:
    """Fill a row with `k1 v1 .. kn vn`, then each key once more among noise; the value is asked for after the key.

    The i-th place after the pairs holds a key with weight `i ** (POWER - 1)`, so most questions are near the pairs. The
    value is not shown: the token after a key is noise, drawn like all noise from the values and the keys without a
    pair. All keys and all values differ. Tokens: `symbols` keys, then `symbols` values. Source: Arora et al. 2023,
    "Zoology", arXiv:2312.04927, section 3.1 and appendix, whose noise may also repeat keys of pairs.
    """
    pairs, symbols, begin = config.pairs, config.symbols, asked - 1
    weights = np.arange(1, len(row.tokens) - begin, dtype=np.float64) ** (POWER - 1)
    keys = rng.permutation(symbols)
    values = symbols + rng.permutation(symbols)[:pairs]
    noise = rng.integers(pairs, 2 * symbols, size=len(row.tokens))
    row.tokens[:] = np.where(noise < symbols, keys[noise % symbols], noise)
    row.tokens[:begin] = np.stack([keys[:pairs], values], 1).ravel()
    chosen = rng.choice(len(weights), size=pairs, replace=False, p=weights / weights.sum())
    places = begin + rng.permutation(chosen)
    row.tokens[places] = keys[:pairs]
    row.labels[places + 1] = values
    row.source[places + 1] = 2 * np.arange(pairs) + 1


def _copy(config: ProbeConfig, rng: np.random.Generator, row: ProbeRows) -> None:
    """Fill a row with `s1..sn SEPARATOR s1..sn SEPARATOR ..`: a random string and its copy, padded with separators.

    n is `(length - 1) // 2`, or drawn from `shortest` up to that. Tokens: the separator, then `symbols` letters.
    """
    size = longest = (len(row.tokens) - 1) // 2
    if config.shortest is not None:
        size = int(rng.integers(config.shortest, longest + 1))
    again = slice(size + 1, 2 * size + 1)
    row.tokens[:] = SEPARATOR
    row.tokens[:size] = row.tokens[again] = row.labels[again] = rng.integers(1, config.vocab_size, size=size)
    row.source[again] = np.arange(size)


def check_depth(depth: float | None) -> None:
    """Raise `ValueError` for a depth outside [0, 1]."""
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"a depth must lie between 0 (the start) and 1 (the end), got {depth}")


def empty_rows(length: int, rows: int) -> ProbeRows:
    """Return rows of zeros in which nothing is asked for."""
    if rows < 1:
        raise ValueError(f"a probe needs at least one row, got rows={rows}")
    zeros = np.zeros((rows, length), dtype=np.int64)
    return ProbeRows(zeros, zeros + IGNORED, zeros + NOTHING)


def generators(seed: Seed, first: int, rows: int) -> list[np.random.Generator]:
    """Return a random generator for each row; raise `ValueError` for a negative seed or row."""
    parts = [seed] if isinstance(seed, int) else list(seed)
    if min((first, *parts)) < 0:
        raise ValueError(f"a seed and the first row must be at least 0, got seed={seed}, first={first}")
    return [np.random.default_rng([*parts, row]) for row in range(first, first + rows)]


TRAIN, HELD_OUT, MEASURE = range(3)
"""Streams of a seed: training, validation, and the sequences of `subquad probe`."""


class ProbeItems(Dataset[dict[str, Tensor]]):
    """Sequences of a probe, generated when read: `{"input_ids": [length], "labels": [length]}`, int64.

    `labels` are -100 where nothing is asked for; the language model shifts them. An item depends only on the
    configuration, the stream and its index. Raises `ValueError` for a length too short for the probe.
    """

    def __init__(self, config: ProbeConfig, length: int, items: int, *, stream: int = TRAIN) -> None:
        config.first_asked(length)
        self.config, self.length, self.items, self.stream = config, length, items, stream

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        check_index(self, index, "example")
        made = probe_rows(self.config, self.length, 1, first=index, seed=(self.config.seed, self.stream))
        return {"input_ids": torch.from_numpy(made.tokens[0]), "labels": torch.from_numpy(made.labels[0])}


@dataclass(frozen=True)
class ProbeCorpus:
    """Training and validation sequences of a probe at one length; `fingerprint` changes when any sequence does."""

    config: ProbeConfig
    train: ProbeItems
    held_out: ProbeItems
    fingerprint: str

    @classmethod
    def of(cls, config: ProbeConfig, length: int) -> ProbeCorpus:
        """Return sequences of `config`, `length` tokens each; raise `ValueError` as `ProbeItems`."""
        return cls(
            config=config,
            train=ProbeItems(config, length, config.examples),
            held_out=ProbeItems(config, length, config.held_out, stream=HELD_OUT),
            fingerprint=digest(["probe", VERSION, length, config.to_dict()]),
        )


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
    """Make rows `text BEFORE key AFTER text QUESTION key`, in which the key's `digits` digits are asked for at the end.

    `text` holds tokens `[N]`, of which each row takes a piece from a random place. `depth` places the key as in
    `probe_rows`. The parts are tokenized separately, so both copies of the key have the same tokens.

    Raises `ValueError` for a tokenizer that cannot spell digits, a length too short for the sentences, a text too short
    to fill it, and a depth outside [0, 1].
    """
    check_depth(depth)
    check_at_least(1, digits=digits)
    before, after, question = (np.array(encode_text(tokenizer, part)) for part in (BEFORE, AFTER, QUESTION))
    made = empty_rows(length, rows)
    for row, rng in enumerate(generators(seed, first, rows)):
        key = _key(tokenizer, "".join(map(str, rng.integers(DIGITS, size=digits))))
        room = length - len(before) - len(after) - len(question) - 2 * len(key)
        if room < 0:
            raise ValueError(
                f"the sentences around a key of {digits} digits take {length - room} tokens, got {length=}"
            )
        if room > len(text):
            raise ValueError(f"the text has {len(text)} tokens, but length={length} needs {room}")
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
    """Return the tokens of a space and the key."""
    ids = encode_text(tokenizer, f" {digits}")
    if (spelt := tokenizer.decode(ids).strip()) != digits:
        raise ValueError(
            f"the tokenizer cannot spell digits: {digits!r} becomes {spelt!r}; passkey needs another, such as bytes"
        )
    return np.array(ids)
