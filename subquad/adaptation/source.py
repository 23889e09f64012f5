"""Read the model that is converted, its tokenizer, and the text that it is converted on.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from subquad.checksums import check_unchanged
from subquad.data import load_tokenizer, prepare
from subquad.data.config import DataConfig
from subquad.data.order import epoch_order
from subquad.data.special_tokens import separator_id
from subquad.data.token_set import TokenSet
from subquad.data.tokenizers import check_vocabulary
from subquad.hf import SubquadConfig, SubquadForCausalLM, from_transformers, lora
from subquad.hf.loading import check_finite, read_config
from subquad.models import Decoder


class Source(NamedTuple):
    """A subquad model and its tokenizer."""

    folder: Path
    model: SubquadForCausalLM
    tokenizer: Tokenizer

    @property
    def decoder(self) -> Decoder:
        """Return the model without its transformers wrapper."""
        return self.model.decoder


def load_source(folder: str | Path) -> Source:
    """Load the model in a folder, in float32 and in eval mode.

    Raises `FileNotFoundError` if the model or its tokenizer is missing, and `ValueError` for an adapter, for a model
    that is neither subquad's nor of a family that `subquad.hf.from_transformers` reads, for weights that are not
    finite, and for a tokenizer with more tokens than the model knows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; give the folder of a model")
    if lora.is_adapter(folder):
        raise ValueError(f"{folder} holds an adapter, not a whole model: merge it with: {lora.merging(folder)}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}; a conversion needs a model and its tokenizer")
    check_unchanged(folder)
    if isinstance(read_config(folder), SubquadConfig):
        model = SubquadForCausalLM.from_pretrained(folder, local_files_only=True)
    else:
        model = from_transformers(folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, model.config.vocab_size, f"does the tokenizer in {folder} belong to another model?")
    check_finite(model, folder)
    return Source(folder, model.float().eval(), tokenizer)


class Tokens:
    """Tokens of a shard, read from its file on demand, with the token that the model expects at the start of a text.

    `start` (None: the model has none) is added at the beginning and replaces each `separator`.
    """

    def __init__(self, stored: np.ndarray, start: int | None, separator: int | None) -> None:
        self.stored, self.start, self.separator = stored, start, separator

    def __len__(self) -> int:
        return len(self.stored) + (self.start is not None)

    def part(self, begin: int, stop: int) -> np.ndarray:
        """Return tokens `begin` to `stop - 1`, int64."""
        if self.start is None:
            return np.asarray(self.stored[begin:stop], dtype=np.int64)
        found = np.asarray(self.stored[max(0, begin - 1) : max(0, stop - 1)], dtype=np.int64)
        found = np.where(found == self.separator, self.start, found)
        return np.concatenate([[self.start], found]) if begin == 0 < stop else found


class Text(NamedTuple):
    """Training tokens, read from their file on demand, and held-out ones, int64."""

    train: Tokens
    held_out: np.ndarray
    fingerprint: str


def read_text(config: DataConfig, folder: str, tokenizer: Tokenizer, start: int | None, length: int) -> Text:
    """Read the text, tokenized for the model in `folder`.

    `start` is the model's first token of a text: it is added at the beginning, and replaces the tokenizer's separator
    between documents. Raises `ValueError` for a folder of token shards and for parts of fewer than `length + 1` tokens,
    and as `subquad.data.prepare`.
    """
    corpus = prepare(config.replace(tokenizer=folder))
    parts = []
    for what, shard in (("train", corpus.train), ("held-out", corpus.held_out)):
        if isinstance(shard, TokenSet):
            raise ValueError(f"{config.path!r} is a folder of token shards; a conversion reads text")
        tokens = Tokens(shard.tokens, start, separator_id(tokenizer))
        if len(tokens) < length + 1:
            advice = f"give more text{', a larger data.held_out' * (what == 'held-out')} or a smaller batch.length"
            few = f"has {len(tokens)} tokens, fewer than batch.length + 1 = {length + 1}"
            raise ValueError(f"the {what} part of {config.path!r} {few}; {advice}")
        parts.append(tokens)
    train, held_out = parts
    return Text(train, held_out.part(0, len(held_out)), corpus.fingerprint)


def batches(tokens: Tokens, length: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches `[B, T + 1]` forever, in an order drawn from `seed`; neighbouring windows share one token."""
    windows = (len(tokens) - 1) // length
    order = (index for epoch in count() for index in epoch_order(windows, seed, epoch))
    while True:
        starts = [index * length for index in islice(order, size)]
        yield torch.from_numpy(np.stack([tokens.part(start, start + length + 1) for start in starts]))
