"""Special tokens of a tokenizer: the separator of documents, the end tokens, and the files that name them.

A `tokenizer.json` does not say which of its tokens ends a text; transformers' files beside it do. `name_special_tokens`
keeps their names with the tokenizer object.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from subquad.data.vocabularies import SEPARATOR
from subquad.parsing import read_json_mapping

logger = logging.getLogger(__name__)

CONFIG = "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_USUAL_ENDS = (SEPARATOR, "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<s>")


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens, as texts by `NAMES`, that the files of transformers in `folder` name.

    Raises `ValueError` for a damaged file and for a token that is not a text.
    """
    found: dict[str, str] = {}
    for file in (folder / CONFIG, folder / "special_tokens_map.json"):
        settings = read_json_mapping(file) if file.is_file() else {}
        for name in NAMES:
            if token := settings.get(name):
                content = token.get("content") if isinstance(token, dict) else token
                if not isinstance(content, str):
                    raise ValueError(f"{file}: {name} must be a text, got {content!r}")
                found.setdefault(name, content)
    return found


def name_special_tokens(tokenizer: Any, tokens: Mapping[str, str]) -> None:
    """Tell a tokenizer its special tokens, by `NAMES`, except those that it lacks or was told before."""
    known = {name: text for name, text in tokens.items() if tokenizer.token_to_id(text) is not None}
    tokenizer.special_tokens = known | getattr(tokenizer, "special_tokens", {})


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the special tokens by `NAMES`; an end token is also found by its usual texts. It also pads by default."""
    found: dict[str, str] = dict(getattr(tokenizer, "special_tokens", {}))
    if "eos_token" not in found and (usual := usual_end(tokenizer)) is not None:
        found["eos_token"] = usual
    if "eos_token" in found:
        found.setdefault("pad_token", found["eos_token"])
    return found


def usual_end(tokenizer: Tokenizer) -> str | None:
    """Return the first of the usual end tokens that the tokenizer has, or None as for `bytes`."""
    return next((token for token in _USUAL_ENDS if tokenizer.token_to_id(token) is not None), None)


def token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """Return the id of a special token by its name in `NAMES`, or None if the tokenizer has none."""
    text = special_tokens(tokenizer).get(name)
    id: int | None = None if text is None else tokenizer.token_to_id(text)
    return id


def separator_id(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends a document, the tokenizer's end token, or None as for `bytes`."""
    return token_id(tokenizer, "eos_token")


def log_separator(tokenizer: Tokenizer) -> None:
    """Log which token separates documents."""
    separator = separator_id(tokenizer)
    if separator is None:
        logger.info("documents are not separated: the tokenizer has no end token")
    else:
        logger.info("documents are separated by %r, token %d", tokenizer.id_to_token(separator), separator)


def end_tokens(tokenizer: Tokenizer, folder: Path) -> frozenset[int]:
    """Return all tokens that end a text of the model in `folder`.

    They are the tokenizer's end token, which separates documents, and every `eos_token_id`, a number or a list, of
    config.json and generation_config.json. Raises `ValueError`, naming the file, for an id that is not a whole number.
    """
    separator = separator_id(tokenizer)
    found = set() if separator is None else {separator}
    for file in (folder / "config.json", folder / "generation_config.json"):
        value = read_json_mapping(file).get("eos_token_id") if file.is_file() else None
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in listed):
            raise ValueError(f"{file}: eos_token_id must be a whole number or a list of them, got {value!r}")
        found.update(listed)
    return frozenset(found)


def special_ids(tokenizer: Tokenizer, stops: Iterable[str]) -> frozenset[int]:
    """Return the ids of those stop strings that are one special token each: decoded texts leave these tokens out."""
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return frozenset(special[stop] for stop in stops if stop in special)


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`, by which transformers loads the tokenizer.

    Batches are padded on the left, as generation needs.
    """
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**settings, "padding_side": "left", **special_tokens(tokenizer)}
