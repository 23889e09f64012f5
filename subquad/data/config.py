"""Configurations of data: text, images, labelled sequences, memory probes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from subquad.config import Config
from subquad.data.files import check_path

SMALLEST_BPE = 257
"""Smallest vocabulary that can be trained: 256 bytes and the separator."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """A text corpus: its source, its tokenizer and its held-out part."""

    path: str = "stdlib"
    """Text to read: `stdlib` (the source of Python's standard library), a file, a folder, a glob, a tar or zip archive,
    a folder of token shards (written by `subquad data tokens`), or hf:NAME[:CONFIG[:SPLIT[:COLUMN]]] for a Hugging Face
    dataset. Files may be compressed (.xz, .gz, .bz2); of .jsonl and .csv the column `text` is read."""
    held_out_path: str | None = None
    """Text to hold out, in the same forms as path; None: hold out a part of path."""
    held_out: float = 0.05
    """Fraction of the documents to hold out, chosen by a hash of their names; the end of a single document."""
    split_seed: int = 0
    """Seed of the choice of held-out documents."""
    tokenizer: str = "bpe"
    """`bytes` (256 tokens), `bpe` or `unigram` (byte-level, trained on the training documents; unigram is
    SentencePiece's default model), `characters` (all that occur in the text), or a path: a tokenizer.json, a folder
    that holds one, or a folder with GPT-2's encoder.json and vocab.bpe."""
    vocab_size: int = 4096
    """Vocabulary size of `bpe` and `unigram`, including the separator `<|endoftext|>`; ignored by other tokenizers."""
    skip_bad_files: bool = False
    """Skip files that are not UTF-8 text and damaged tables, with a warning each, instead of stopping at the first."""
    pack: Literal["stream", "documents"] = "stream"
    """stream: cut windows from all documents joined together, so attention crosses document ends; documents: pack
    whole documents into windows, attention stays within each (documents longer than a window are split)."""
    held_out_shards: list[str] | None = None
    """Names of the token shards to hold out; None: the last shards that hold the fraction held_out of the tokens."""
    bad_shards: Literal["stop", "skip"] = "stop"
    """Missing or damaged token shards: stop, or skip them, warn once and read windows of the next shard instead.
    Held-out ones always stop."""
    workers: int = 0
    """Data loading processes for each training process; 0: load in the training process."""
    worker_timeout: float = 300.0
    """Seconds after which a data loading process that does not answer stops the run, naming what it was reading."""
    cache: str | None = None
    """Folder for prepared corpora; None: $SUBQUAD_CACHE, or ~/.cache/subquad if that is not set."""

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


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Images, read as sequences of pixels row by row."""

    path: str | None = None
    """Images: a folder of idx files (MNIST) or PNG files, an npz file, or hf:NAME for a Hugging Face dataset."""
    output: Literal["categorical", "logistic"] = "categorical"
    """Distribution of a pixel: 256 probabilities, or a mixture of logistic distributions over 256 bins."""
    mixtures: int = 10
    """Number of logistic distributions in the mixture (output=logistic)."""
    axes: bool = False
    """Add learned embeddings of the row, column and channel of the predicted pixel."""
    near: int = 0
    """Radius, in rows and columns, of a masked convolution over the known pixels around the predicted one; 0: the input
    is the previous pixel alone."""
    position_channels: int = 0
    """Channels of added positions (model.position sinusoidal or learned) that are concatenated with those of the pixel
    instead, together model.dim; 0: both have model.dim channels and are added."""
    test_images: int = 1000
    """Number of held-out images, evenly spaced, to evaluate at the end of training (at most all)."""
    samples: int = 100
    """Number of images to generate at the end of training, saved as one picture; 0: none."""

    def __post_init__(self) -> None:
        self.check_least("image", mixtures=1, near=0, position_channels=0, test_images=1, samples=0)


DatasetName = Literal["toy", "listops", "text", "retrieval", "image", "pathfinder32", "pathfinder64", "pathfinder128"]
MADE = ("toy", "listops", "pathfinder32", "pathfinder64", "pathfinder128")
"""Data sets that are generated, so they need no `path`."""
ON_THE_HUB = ("text", "image")
"""Data sets that can be read from the Hugging Face hub."""
SPLIT_HERE = ("text", "image")
"""Data sets that are published without a validation part."""


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig(Config):
    """Expressions generated for `listops`; the defaults are Long Range Arena's."""

    max_depth: int = 10
    """Greatest depth of a node; the root has depth 1."""
    max_args: int = 10
    """Most arguments of an operator; each number from 2 on is equally likely."""
    min_length: int = 501
    """Fewest tokens of an expression; operators, digits and closing brackets each count one."""
    max_length: int = 1999
    """Most tokens of an expression."""
    leaf: float = 0.75
    """Probability that a node above max_depth is a digit and not an operator."""

    def __post_init__(self) -> None:
        self.check_least("listops", max_depth=2, max_args=2, min_length=1, max_length=1)
        if not 0 < self.leaf < 1:
            raise ValueError(f"listops.leaf must lie between 0 and 1, both excluded, got {self.leaf}")
        if self.max_length < self.min_length:
            raise ValueError(f"listops.max_length must be at least min_length={self.min_length}, got {self.max_length}")
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
            if longest >= self.min_length:
                break
        if longest < self.min_length:
            raise ValueError(
                f"listops.min_length={self.min_length} is above the {longest} tokens of the longest expression with "
                f"max_depth={self.max_depth}, max_args={self.max_args}"
            )


@dataclass(frozen=True, kw_only=True)
class PathfinderConfig(Config):
    """Images generated for `pathfinder32`, `pathfinder64` and `pathfinder128` (Path-X)."""

    difficulty: Literal["hard", "intermediate", "easy"] = "hard"
    """Strokes of each of the two long paths: 14 (hard, as in Long Range Arena), 9 or 6."""


@dataclass(frozen=True, kw_only=True)
class LabelledConfig(Config):
    """A classification task."""

    dataset: DatasetName = "toy"
    """toy: zeros and ones, of which five follow a mark; the label is the majority of these five. The others are Long
    Range Arena's: listops and pathfinder32, 64, 128 (Path-X) are generated, or read from the release in path; text
    (reviews as bytes), retrieval (pairs of papers as bytes) and image (grey pixels) are read from path."""
    path: str | None = None
    """Folder or file of the data set, or hf:NAME for a Hugging Face dataset; docs/lra.md lists the layouts."""
    cache: str | None = None
    """Folder for prepared data; None: $SUBQUAD_CACHE, or ~/.cache/subquad if that is not set."""
    examples: int | None = None
    """Number of training sequences; each epoch visits them in another order. None: all."""
    held_out: int | None = None
    """Number of validation sequences, and of test sequences; None: all."""
    seed: int = 0
    """Seed of generated sequences, and of the choice if examples or held_out is less than the data set has."""
    too_long: Literal["cut", "refuse"] = "cut"
    """Sequences longer than batch.length: cut them, as Long Range Arena does, or refuse the data set."""
    validation: Literal["apart", "test"] = "apart"
    """Validation part of data sets that are published without one. apart: a tenth of the training part, chosen by a
    hash; test: the test part, as Long Range Arena does for text."""
    listops: ListOpsConfig = field(default_factory=ListOpsConfig)
    """Rules of the expressions (dataset=listops without a path)."""
    pathfinder: PathfinderConfig = field(default_factory=PathfinderConfig)
    """Rules of the images (dataset=pathfinder32, 64, 128)."""

    def check_source(self) -> None:
        """Raise `ValueError` if the data set needs a path, `FileNotFoundError` if its path is missing."""
        if self.path is not None:
            check_path(self.path, "hf:NAME")
        elif self.dataset not in MADE:
            raise ValueError(
                f"dataset={self.dataset} is read, not made: give its path, a folder, a file or hf:NAME "
                f"(docs/lra.md lists the layouts); only {', '.join(MADE)} need none"
            )

    def __post_init__(self) -> None:
        self.check_least("classify", examples=1, held_out=1, seed=0)
        if self.path is not None and (self.dataset == "toy" or not self.path):
            rule = "must name a folder, a file or hf:NAME" if not self.path else "has no effect with dataset=toy"
            raise ValueError(f"classify.path={self.path!r} {rule}")
        if self.path is not None and self.path.startswith("hf:"):
            if self.dataset not in ON_THE_HUB:
                raise ValueError(
                    f"classify.path={self.path!r}: {self.dataset} must be a folder; only {' and '.join(ON_THE_HUB)} "
                    "can be read from the Hugging Face hub"
                )
            if not self.path.removeprefix("hf:").partition(":")[0]:
                raise ValueError(f"classify.path={self.path!r} names no dataset; it must be hf:NAME or hf:NAME:CONFIG")
        if self.validation != "apart" and self.dataset not in SPLIT_HERE:
            raise ValueError(
                f"classify.validation={self.validation} has no effect with dataset={self.dataset}, which has its own "
                f"validation part; only {' and '.join(SPLIT_HERE)} have none"
            )
        for name, used in (
            ("listops", self.dataset == "listops" and self.path is None),
            ("pathfinder", self.dataset.startswith("pathfinder")),
        ):
            group = getattr(self, name)
            if group != type(group)() and not used:
                where = f"dataset={self.dataset}" + (f" and path={self.path!r}" if self.path else "")
                raise ValueError(f"classify.{name} has no effect with {where}; leave it out")


ProbeName = Literal["passkey", "mqar", "copy"]
MARKS = 2
"""Special tokens of the passkey probe: the mark before the key, and the question."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Config):
    """A memory probe: generated sequences, parts of which can be predicted only by recalling earlier tokens."""

    name: ProbeName = "mqar"
    """passkey: recall a key of digits hidden in filler; mqar: recall the values of keys from key-value pairs
    (multi-query associative recall); copy: repeat a random string after a separator."""
    digits: int = 4
    """Digits of the key (passkey)."""
    pairs: int = 8
    """Key-value pairs, each asked for once (mqar)."""
    symbols: int = 32
    """Number of filler tokens (passkey), of keys and of values (mqar), or of letters (copy)."""
    shortest: int | None = None
    """Letters of the shortest string (copy); lengths are drawn from it up to half of the sequence. None: always half,
    which a model can learn as a fixed distance that fails at other lengths."""
    examples: int = 100_000
    """Number of training sequences; each epoch visits them in another order."""
    held_out: int = 500
    """Number of validation sequences."""
    seed: int = 0
    """Seed of the sequences."""

    def __post_init__(self) -> None:
        self.check_least("probe", digits=1, pairs=1, examples=1, held_out=1, seed=0)
        if self.shortest is not None and (self.name != "copy" or self.shortest < 1):
            raise ValueError(
                f"probe.shortest must be at least 1 and needs name=copy, got {self.shortest} for {self.name}"
            )
        fewest = {"passkey": 1, "mqar": self.pairs, "copy": 2}[self.name]
        if self.symbols < fewest:
            needed = "a key for each of its pairs" if self.name == "mqar" else f"at least {fewest}"
            raise ValueError(
                f"the vocabulary is too small: {self.name} needs {needed}, so probe.symbols must be at least {fewest}, "
                f"got {self.symbols}"
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return {"passkey": 10 + MARKS + self.symbols, "mqar": 2 * self.symbols, "copy": 1 + self.symbols}[self.name]

    @property
    def chance(self) -> float:
        """Accuracy without memory: guess all digits (passkey), a letter (copy), the value of any pair (mqar)."""
        return {"passkey": 10.0**-self.digits, "mqar": 1 / self.pairs, "copy": 1 / self.symbols}[self.name]

    @property
    def fewest_tokens(self) -> int:
        """Length of the shortest possible sequence, in tokens."""
        return {"passkey": 2 * (self.digits + 1), "mqar": 3 * self.pairs + 1, "copy": 3}[self.name]

    def first_asked(self, length: int) -> int:
        """Return the first place, in sequences of `length` tokens, whose token may be asked for.

        Raises `ValueError` for a length below `fewest_tokens`, or one that `shortest` does not fit into twice.
        """
        if length < self.fewest_tokens:
            what = {"passkey": f"digits={self.digits}", "mqar": f"pairs={self.pairs}", "copy": "one letter"}[self.name]
            raise ValueError(
                f"{self.name} with {what} needs sequences of at least {self.fewest_tokens} tokens, got length={length}"
            )
        if self.shortest is not None and (length - 1) // 2 < self.shortest:
            raise ValueError(f"probe.shortest={self.shortest} letters and a copy do not fit in {length} tokens")
        string = (length - 1) // 2 if self.shortest is None else self.shortest
        return {"passkey": length - self.digits, "mqar": 2 * self.pairs + 1, "copy": string + 1}[self.name]
