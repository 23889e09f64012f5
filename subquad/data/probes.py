"""Probes of memory: sequences of which some tokens follow from earlier ones and from nothing else.

Each is a pure function of a seed. Row i depends on the seed, the length, the probe's numbers and i alone.
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
"""Tokens of the passkey probe after the ten digits: the mark before the key, the question, the first of the filler."""
SEPARATOR = 0
"""Between the two strings of the copy probe; its letters follow."""
POWER = 0.01
"""The i-th place after the pairs of mqar is asked with a weight of `i ** (POWER - 1)`, as in Zoology."""

Seed = int | Sequence[int]
"""At least 0. The row's number follows it, and numpy fills what is short with zeros: row 0 of the seed (0, 5) is row 5
of the seed 0. Among seeds of as many parts no two rows share their random numbers."""


class ProbeRows(NamedTuple):
    """Sequences and what is asked in them, all int64 `[B, T]`."""

    tokens: np.ndarray
    labels: np.ndarray
    """The token to predict at this place, from those before it; -100 where nothing is asked."""
    source: np.ndarray
    """The place of the token that the label repeats; -1 where nothing is asked."""

    @property
    def asked(self) -> np.ndarray:
        """Bool `[B, T]`: the places where a token is asked for."""
        return self.labels != IGNORED


def probe_rows(
    config: ProbeConfig, length: int, rows: int, /, *, depth: float | None = None, first: int = 0, seed: Seed = 0
) -> ProbeRows:
    """Make rows number `first` to `first + rows - 1` of the probe `config`, `length` tokens each.

    `depth` is for passkey alone: at 0 the mark before the key is the first token, at 1 nothing stands between the key
    and the question; None draws its place in each row. `seed` is used as it is: the configuration's numbers its own
    sequences. Raises `ValueError` for a length, a depth or a number of rows that cannot be, and for a depth of another
    probe.
    """
    if depth is not None and config.name != "passkey":
        raise ValueError(f"depth is for passkey, and the probe is {config.name}, got depth={depth}")
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

    The filler is random. Tokens: the digits are 0 to 9, then the mark, the question, `symbols` tokens of filler.
    Source: the task of Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2, in tokens instead of words.
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
    """Fill a row with `k1 v1 .. kn vn`, then each key once more among noise: after it, its value is asked for.

    The i-th place after the pairs holds a key with a weight of `i ** (POWER - 1)`: most questions come soon, some late.
    The value is asked for and not shown: the next token is noise, as all others, drawn from the values and from the
    keys that no pair has. Keys differ, values differ. Tokens: `symbols` keys, then as many values. Source: Arora et al.
    2023, "Zoology", arXiv:2312.04927, section 3.1 and appendix; the noise there may also repeat the keys.
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
    """Fill a row with `s1..sn SEPARATOR s1..sn SEPARATOR ..`: a random string, and the whole of it again.

    n is `(length - 1) // 2`, or drawn from `shortest` up to that; separators fill what is left. Tokens: the separator,
    then `symbols` letters.
    """
    size = longest = (len(row.tokens) - 1) // 2
    if config.shortest is not None:
        size = int(rng.integers(config.shortest, longest + 1))
    again = slice(size + 1, 2 * size + 1)
    row.tokens[:] = SEPARATOR
    row.tokens[:size] = row.tokens[again] = row.labels[again] = rng.integers(1, config.vocab_size, size=size)
    row.source[again] = np.arange(size)


def check_depth(depth: float | None) -> None:
    """Raise `ValueError` for a depth outside of 0 to 1."""
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"a depth must lie between 0 (the start) and 1 (the end), got {depth}")


def empty_rows(length: int, rows: int) -> ProbeRows:
    """Return rows that ask nothing yet."""
    if rows < 1:
        raise ValueError(f"a probe needs at least one row, got rows={rows}")
    zeros = np.zeros((rows, length), dtype=np.int64)
    return ProbeRows(zeros, zeros + IGNORED, zeros + NOTHING)


def generators(seed: Seed, first: int, rows: int) -> list[np.random.Generator]:
    """Return a stream of random numbers for each row; `ValueError` for a negative seed or row."""
    parts = [seed] if isinstance(seed, int) else list(seed)
    if min((first, *parts)) < 0:
        raise ValueError(f"a seed and the first row must be at least 0, got seed={seed}, first={first}")
    return [np.random.default_rng([*parts, row]) for row in range(first, first + rows)]


TRAIN, HELD_OUT, MEASURE = range(3)
"""Streams of random numbers after a seed: what is learned, what training measures, what `subquad probe` measures."""


class ProbeItems(Dataset[dict[str, Tensor]]):
    """Sequences of a probe, made as they are read: `{"input_ids": [length], "labels": [length]}`, int64.

    `labels` are -100 where nothing is asked; a causal language model shifts them. An item depends on the probe, its
    seed, the stream and its index alone. Raises `ValueError` for a length that the probe does not fit in.
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
    """A probe at one length, split in two; `fingerprint` differs where any sequence does."""

    config: ProbeConfig
    train: ProbeItems
    held_out: ProbeItems
    fingerprint: str

    @classmethod
    def of(cls, config: ProbeConfig, length: int) -> ProbeCorpus:
        """Return the sequences of `config`, `length` tokens each. Raises `ValueError` as `ProbeItems` does."""
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
    """`text BEFORE key AFTER text QUESTION key`: the tokens of a key of `digits` digits are asked for at the end.

    `text` holds tokens `[N]`; each row takes a piece of it that begins at a random place. `depth` is that of
    `probe_rows`. All parts are tokenised apart, so that the key is the same tokens at both places.
    Raises `ValueError` for a tokenizer that cannot spell digits, for a length in which the parts leave no room, for a
    text shorter than that room, and for a depth outside of 0 to 1.
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
    """Return the tokens of a key after a blank."""
    ids = encode_text(tokenizer, f" {digits}")
    if (spelt := tokenizer.decode(ids).strip()) != digits:
        raise ValueError(
            f"the tokenizer cannot spell digits: {digits!r} becomes {spelt!r}; passkey needs one that can, such as "
            "bytes or a byte-level BPE"
        )
    return np.array(ids)
