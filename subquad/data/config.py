"""What to read and how to make tokens of it, apart from the code that does, so that reading it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.config import Config

SMALLEST_BPE = 257
"""The bytes and the separator: the smallest vocabulary that is trained here."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """A corpus: where its text comes from, its tokenizer and its held-out part."""

    path: str = "stdlib"
    """Text to read: `stdlib` (the source of Python's standard library), a file, a folder, a glob, a tar or zip archive,
    or hf:NAME[:CONFIG[:SPLIT[:COLUMN]]] for a Hugging Face dataset. Files may be compressed (.xz, .gz, .bz2)."""
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
        if not self.path:
            raise ValueError("path must name a file, a folder, a glob, 'stdlib' or 'hf:NAME', got an empty string")
