"""Build tokenizers from the training text, or from GPT-2's two files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from subquad.data.packed import find_packed, read_packed
from subquad.parsing import decoded, parse_json

SEPARATOR = "<|endoftext|>"
"""The token between two documents."""
TRAINED = ("bpe", "characters", "unigram")
"""Values of `DataConfig.tokenizer` that build a tokenizer from the text."""
_GPT2_NAMES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_SCORE_DIGITS = 6
_SCORE_GAP = 1e-4


def make_tokenizer(name: str, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Build the tokenizer `bpe`, `unigram` or `characters` from `texts`; `vocab_size` is for the first two."""
    if name == "characters":
        return characters(texts)
    return (train_bpe if name == "bpe" else train_unigram)(texts, vocab_size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of up to `vocab_size` tokens, the separator is 0; equal texts give equal tokenizers."""
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
    """Train a byte-level unigram model, SentencePiece's default, which splits a text into the most probable pieces.

    It has at most `vocab_size` tokens; the separator has the id 0. Every text can be encoded and decodes unchanged
    (SentencePiece itself normalises text and prepends a space). Trained scores vary in their last digits from run to
    run; they are rounded, and unused single bytes share one lower score, so that the same texts yield the same
    tokenizer. Source: Kudo 2018, arXiv:1804.10959.
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
    """Build a tokenizer with one token for each character of `texts`, in Unicode order; it encodes no others."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(sorted(found))}, unk_token=""))
    tokenizer.pre_tokenizer = _single_characters()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def character_ids(tokenizer: Tokenizer) -> dict[str, int] | None:
    """Return the vocabulary of a tokenizer from `characters`, or None for any other."""
    one_each = str(tokenizer.pre_tokenizer) == str(_single_characters())
    if not one_each or not isinstance(tokenizer.model, models.WordLevel):
        return None
    ids: dict[str, int] = tokenizer.get_vocab()
    return ids if all(len(token) == 1 for token in ids) else None


def gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    """Return GPT-2's vocabulary and merges in `folder`, plain or packed under either usual pair of names, or None."""
    for names in _GPT2_NAMES:
        vocabulary, merges = (find_packed(folder, name) for name in names)
        if vocabulary is not None and merges is not None:
            return vocabulary, merges
    return None


def load_gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    """Load a byte-level BPE from GPT-2's two files; `ValueError` names the file (and line) that is at fault."""
    ids = parse_json(_read(vocabulary), str(vocabulary))
    numbers: list[Any] = list(ids.values()) if isinstance(ids, dict) else [None]
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(len(numbers))):
        raise ValueError(f"{vocabulary} must map the tokens to the distinct numbers 0, 1, 2, ...")
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(_read(merges).splitlines(), 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise ValueError(f"{merges}, line {number}: a merge must be two tokens with a space between, got {line!r}")
        for token in (*parts, "".join(parts)):
            if token not in ids:
                raise ValueError(f"{merges}, line {number}: {vocabulary.name} has no token {token!r}")
        pairs.append((parts[0], parts[1]))
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        if byte not in ids:
            raise ValueError(f"{vocabulary} has no token {byte!r}: a byte-level vocabulary must hold all 256 bytes")
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
    """Read the text of a plain or packed file; raise `ValueError`, naming it, if it is not UTF-8."""
    return decoded(read_packed(file), str(file))
