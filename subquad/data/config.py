"""What to read and how to make tokens of it, apart from the code that does, so that reading it loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from subquad.config import Config

SMALLEST_BPE = 257
"""The bytes and the separator: the smallest vocabulary that is trained here."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """A corpus: where its text comes from, its tokenizer and its held-out part."""

    path: str = "stdlib"
    """Text to read: `stdlib` (the source of Python's standard library), a file, a folder, a glob, a tar or zip archive,
    a folder of token shards with their own tokenizer (`subquad data tokens` makes one), or
    hf:NAME[:CONFIG[:SPLIT[:COLUMN]]] for a Hugging Face dataset. Files may be compressed (.xz, .gz, .bz2)."""
    held_out_path: str | None = None
    """Text to hold out, in the forms of path; None holds out a part of path instead."""
    held_out: float = 0.05
    """Fraction of the documents to hold out, chosen by a hash of their names; of a single document, its end."""
    split_seed: int = 0
    """Another number holds out other documents."""
    tokenizer: str = "bpe"
    """`bytes` (256 tokens), `bpe` or `unigram` (trained on the training documents, over bytes; unigram is
    SentencePiece's default model), `characters` (all that occur), or the path of a tokenizer.json, of a folder that
    holds one, or of a folder with GPT-2's encoder.json and vocab.bpe."""
    vocab_size: int = 4096
    """Tokens of a `bpe` or `unigram` vocabulary, the separator <|endoftext|> included; others have their own."""
    skip_bad_files: bool = False
    """Whether to leave out, with a warning each, files that are not UTF-8 text, instead of stopping at the first."""
    pack: Literal["stream", "documents"] = "stream"
    """stream: windows run over the ends of documents, which the model sees across; documents: windows are packed from
    whole documents, each of which is read as if it were alone (one longer than a window is cut)."""
    held_out_shards: list[str] | None = None
    """Of a folder of token shards: names of those to hold out; None: the last ones, as many as held_out asks for."""
    bad_shards: Literal["stop", "skip"] = "stop"
    """Of a folder of token shards: what to do about one that is missing or damaged when it is first read: stop with its
    name, or warn once and read windows of the next one in the place of its. Held-out ones always stop."""
    workers: int = 0
    """Processes that read ahead in training, for each training process; 0: it reads by itself."""
    worker_timeout: float = 300.0
    """Seconds after which one of those processes counts as stuck, which stops the run with the name of what it read."""
    cache: str | None = None
    """Folder for prepared corpora; None means $SUBQUAD_CACHE, or ~/.cache/subquad where that is not set."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1, both excluded, got {self.held_out}")
        if self.tokenizer in ("bpe", "unigram") and self.vocab_size < SMALLEST_BPE:
            raise ValueError(
                f"vocab_size must be at least {SMALLEST_BPE} for tokenizer={self.tokenizer!r} (256 bytes and a "
                f"separator), got {self.vocab_size}"
            )
        if self.workers < 0:
            raise ValueError(f"workers must be at least 0, got {self.workers}")
        if not 0 < self.worker_timeout < math.inf:
            raise ValueError(f"worker_timeout must be a positive number of seconds, got {self.worker_timeout}")
        if not self.path:
            raise ValueError("path must name a file, a folder, a glob, 'stdlib' or 'hf:NAME', got an empty string")
