"""A corpus in a folder of token shards: which are read, and which are held out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from subquad.config import digest
from subquad.data.config import DataConfig
from subquad.data.token_set import TokenSet, held_out_names, is_token_set
from subquad.data.tokenizers import load_tokenizer, tokenizer_hash
from subquad.data.vocabularies import TRAINED


class TokenCorpus(NamedTuple):
    """The fields of `subquad.data.Corpus`."""

    folder: Path
    tokenizer: Tokenizer
    train: TokenSet
    held_out: TokenSet
    fingerprint: str
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def open_token_corpus(config: DataConfig) -> TokenCorpus:
    """The folder of token shards at `config.path`, and its held-out ones or those of the folder `held_out_path`.

    Raises `ValueError` for an index that is damaged, for names that are not in it, where nothing would be left to train
    on or to hold out, and where the shards were made with another tokenizer than `config` or the other folder has.
    """
    folder = Path(config.path).expanduser()
    whole = TokenSet(folder, bad_shards=config.bad_shards)
    tokenizer = load_tokenizer(folder)
    _check_tokenizer(whole, tokenizer, config.tokenizer)
    names = [entry.name for entry in whole.entries]
    if config.held_out_path is not None:
        held_out = _other(config, whole)
        train = whole
    else:
        chosen = config.held_out_shards
        apart = held_out_names(whole.entries, config.held_out) if chosen is None else chosen
        rest = [name for name in names if name not in set(apart)]
        if not rest or not apart:
            raise ValueError(
                f"{folder} has the shards {', '.join(names)}: at least one must be held out and one be left, got "
                f"held_out_shards={chosen}; make more of them, by fewer tokens in each, or name another folder by "
                "held_out_path"
            )
        held_out = TokenSet(folder, apart)
        train = TokenSet(folder, rest, bad_shards=config.bad_shards)
    return TokenCorpus(
        folder=folder,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        fingerprint=digest([train.fingerprint, held_out.fingerprint]),
        train_files=tuple(entry.name for entry in train.entries),
        held_out_files=tuple(entry.name for entry in held_out.entries),
    )


def _other(config: DataConfig, whole: TokenSet) -> TokenSet:
    """The folder that is held out."""
    assert config.held_out_path is not None
    if config.held_out_shards is not None:
        raise ValueError("held_out_path and held_out_shards name two held-out parts: leave one out")
    if not is_token_set(config.held_out_path):
        raise ValueError(
            f"path {config.path!r} is a folder of token shards: held_out_path must be one too, got "
            f"{config.held_out_path!r}"
        )
    held_out = TokenSet(Path(config.held_out_path).expanduser())
    if held_out.tokenizer_hash != whole.tokenizer_hash:
        raise ValueError(f"{held_out.path} was made with another tokenizer than {whole.path}")
    return held_out


def _check_tokenizer(tokens: TokenSet, tokenizer: Tokenizer, asked: str) -> None:
    """Raise `ValueError` where the folder's tokenizer did not make its shards, or another one is asked for by name."""
    if tokenizer_hash(tokenizer) != tokens.tokenizer_hash:
        raise ValueError(f"{tokens.path} was made with another tokenizer than its tokenizer.json")
    if asked not in TRAINED and tokenizer_hash(load_tokenizer(asked)) != tokens.tokenizer_hash:
        raise ValueError(
            f"{tokens.path} was made with another tokenizer than tokenizer={asked!r}; leave it out, or make the shards "
            "again"
        )
