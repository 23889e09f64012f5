"""Tokenizers that are made here: from the text to train on, or from the two files that GPT-2's came in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from subquad.data.packed import find_packed, read_packed
from subquad.parsing import decoded, parse_json

SEPARATOR = "<|endoftext|>"
"""The token between two documents, for a tokenizer made here."""
TRAINED = ("bpe", "characters", "unigram")
"""The tokenizers that are made of the text itself, by their names in `DataConfig.tokenizer`."""
_GPT2_NAMES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_SCORE_DIGITS = 6
_SCORE_GAP = 1e-4


def make_tokenizer(name: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Make the tokenizer `bpe`, `unigram` or `characters` of `texts`; only the first two have a size to choose."""
    if name == "characters":
        return characters(texts)
    return (train_bpe if name == "bpe" else train_unigram)(texts, vocab_size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; the separator is 0 and every text can be encoded.

    The same texts give the same tokenizer. Few texts give fewer tokens.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_unigram(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a unigram model, SentencePiece's default, over bytes: a text is cut into the most probable pieces.

    At most `vocab_size` tokens; the separator has the id 0 and every text can be encoded and comes back as it was
    (SentencePiece itself normalises the text and begins it with a space). Trained scores differ in their last digits
    from run to run; they are rounded, and single bytes that the text makes no use of get one lower score, so that the
    same texts give the same tokenizer. Source: Kudo 2018, arXiv:1804.10959.
    """
    tokenizer = _byte_level(models.Unigram())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained: dict[str, float] = dict(json.loads(tokenizer.to_str())["model"]["vocab"])
    del trained[SEPARATOR]
    scores = {piece: round(score, _SCORE_DIGITS) for piece, score in trained.items()}
    floor = min((score for piece, score in scores.items() if len(piece) > 1), default=0.0)
    scores |= {byte: floor - _SCORE_GAP for byte in alphabet if scores.get(byte, floor - 1) < floor}
    pieces = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    made = _byte_level(models.Unigram([(SEPARATOR, 0.0), *pieces]))
    made.add_special_tokens([SEPARATOR])
    return made


def characters(texts: Iterable[str]) -> Tokenizer:
    """Make one token a character of `texts`, in Unicode's order; a text with another one can't be encoded."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(sorted(found))}, unk_token=""))
    tokenizer.pre_tokenizer = _single_characters()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def character_ids(tokenizer: Tokenizer) -> dict[str, int] | None:
    """Return the vocabulary of a tokenizer that `characters` made; None for another one."""
    one_each = str(tokenizer.pre_tokenizer) == str(_single_characters())
    if not one_each or not isinstance(tokenizer.model, models.WordLevel):
        return None
    ids: dict[str, int] = tokenizer.get_vocab()
    return ids if all(len(token) == 1 for token in ids) else None


def gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    """Find the vocabulary and the merges in `folder`, by either pair of usual names, plain or packed."""
    for names in _GPT2_NAMES:
        vocabulary, merges = (find_packed(folder, name) for name in names)
        if vocabulary is not None and merges is not None:
            return vocabulary, merges
    return None


def load_gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    """GPT-2's byte-level BPE from its two files.

    Raises `ValueError` that names the file, and for the merges the line, where one is damaged or they do not belong
    together.
    """
    ids = parse_json(_read(vocabulary), str(vocabulary))
    numbers: list[Any] = list(ids.values()) if isinstance(ids, dict) else [None]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise ValueError(f"{vocabulary} must map each token to a number of its own, from 0 on")
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(_read(merges).splitlines(), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise ValueError(f"{merges}, line {number}: a merge is two tokens with a space between, got {line!r}")
        for token in (*parts, "".join(parts)):
            if token not in ids:
                raise ValueError(f"{merges}, line {number}: {vocabulary.name} has no token {token!r}")
        pairs.append((parts[0], parts[1]))
    for byte in pre_tokenizers.ByteLevel.alphabet():
        if byte not in ids:
            raise ValueError(f"{vocabulary} has no token {byte!r}: a byte-level vocabulary holds all 256 bytes")
    try:
        tokenizer = _byte_level(models.BPE(vocab=ids, merges=pairs))
    except Exception as error:  # the Rust library raises bare Exception
        raise ValueError(f"{merges} does not fit {vocabulary}: {error}") from error
    if SEPARATOR in ids:
        tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer


def _byte_level(model: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _single_characters() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")


def _read(file: Path) -> str:
    """Read the text of a plain or packed file; `ValueError` names the file where it is no text."""
    return decoded(read_packed(file), str(file))
