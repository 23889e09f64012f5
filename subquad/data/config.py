"""Configurations of data: text and its tokens, images, labelled sequences, probes of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from subquad.config import Config
from subquad.data.files import check_path

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


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Images as sequences of pixels, row by row."""

    path: str | None = None
    """The images: a folder of idx files (MNIST), of PNG files, an npz file, or hf:NAME for a Hugging Face dataset."""
    output: Literal["categorical", "logistic"] = "categorical"
    """What a pixel is drawn from: 256 probabilities, or a mixture of logistic distributions cut into 256 bins."""
    mixtures: int = 10
    """Distributions in the mixture (output=logistic)."""
    axes: bool = False
    """Whether to add vectors learned for the row, the column and the channel of the pixel that is predicted."""
    near: int = 0
    """Rows and columns around the pixel to predict whose known pixels go into its input beside the one before, by a
    masked convolution; 0: the pixel before alone."""
    test_images: int = 1000
    """Held-out images that are measured at the end, evenly spread (all where there are fewer)."""
    samples: int = 100
    """Images that are generated at the end, as a picture; 0: none."""

    def __post_init__(self) -> None:
        self.check_least("image", mixtures=1, near=0, test_images=1, samples=0)


DatasetName = Literal["toy", "listops", "text", "retrieval", "image", "pathfinder32", "pathfinder64", "pathfinder128"]
MADE = ("toy", "listops", "pathfinder32", "pathfinder64", "pathfinder128")
"""Data sets that need no `path`: they are made by rules."""
ON_THE_HUB = ("text", "image")
"""Data sets that hf:NAME can be read as."""
SPLIT_HERE = ("text", "image")
"""Data sets that are published without a part to measure on while training."""


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig(Config):
    """Expressions that `listops` makes; the defaults are those of Long Range Arena."""

    max_depth: int = 10
    """Operators and digits lie no deeper; the root has depth 1."""
    max_args: int = 10
    """Most arguments of an operator, which has at least two; each number is equally likely."""
    min_length: int = 501
    """Fewest tokens of an expression that is kept; operators, digits and closing brackets count, nothing else."""
    max_length: int = 1999
    """Most tokens of an expression that is kept."""
    leaf: float = 0.75
    """Probability that a node above the greatest depth is a digit and not an operator."""

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
    """Images that `pathfinder32`, `pathfinder64` and `pathfinder128` (Path-X) make."""

    difficulty: Literal["hard", "intermediate", "easy"] = "hard"
    """Segments of the two long snakes: 14 (hard, that of Long Range Arena), 9 or 6."""


@dataclass(frozen=True, kw_only=True)
class LabelledConfig(Config):
    """A classification task."""

    dataset: DatasetName = "toy"
    """toy: zeros and ones, some of them after a mark; the label is what most of the marked ones are. The others are
    Long Range Arena's: listops and pathfinder32, 64, 128 (Path-X) are made by its rules, or read from its release in
    path; text (reviews as bytes), retrieval (pairs of papers as bytes) and image (grey pixels) are read from path."""
    path: str | None = None
    """A folder or file that holds the data set, or hf:NAME for a Hugging Face dataset: docs/lra.md."""
    cache: str | None = None
    """Where data that was made or read is kept (None: SUBQUAD_CACHE, else ~/.cache/subquad)."""
    examples: int | None = None
    """Sequences to learn from; after them come the same again, in another order. None: all that the data set has."""
    held_out: int | None = None
    """Other sequences to measure on while training, and as many again for the end (None: all of both)."""
    seed: int = 0
    """Another number makes other sequences, and chooses others where examples or held_out is below what there is."""
    too_long: Literal["cut", "refuse"] = "cut"
    """What to do with sequences longer than batch.length: cut them to it, as Long Range Arena does, or stop."""
    validation: Literal["apart", "test"] = "apart"
    """What to measure while training where the data set has no such part. apart: a tenth of its training part, chosen
    by a hash; test: its test part, as Long Range Arena does for text."""
    listops: ListOpsConfig = field(default_factory=ListOpsConfig)
    """Which expressions to make (dataset=listops without a path)."""
    pathfinder: PathfinderConfig = field(default_factory=PathfinderConfig)
    """Which images to make (dataset=pathfinder32, 64, 128)."""

    def check_source(self) -> None:
        """Raise `ValueError` for a data set that is read, without a path; `FileNotFoundError` for a missing one."""
        if self.path is not None:
            check_path(self.path, "hf:NAME")
        elif self.dataset not in MADE:
            raise ValueError(
                f"dataset={self.dataset} is read, not made: give its path, a folder, a file or hf:NAME "
                f"(docs/lra.md has their layouts); {', '.join(MADE)} need none"
            )

    def __post_init__(self) -> None:
        self.check_least("classify", examples=1, held_out=1, seed=0)
        if self.path is not None and (self.dataset == "toy" or not self.path):
            rule = "must name a folder, a file or hf:NAME" if not self.path else "has no effect with dataset=toy"
            raise ValueError(f"classify.path={self.path!r} {rule}")
        if self.path is not None and self.path.startswith("hf:"):
            if self.dataset not in ON_THE_HUB:
                raise ValueError(
                    f"classify.path={self.path!r}: {self.dataset} is read from a folder; {' and '.join(ON_THE_HUB)} "
                    "can be read from the Hugging Face hub"
                )
            if not self.path.removeprefix("hf:").partition(":")[0]:
                raise ValueError(f"classify.path={self.path!r} names no dataset; it must be hf:NAME or hf:NAME:CONFIG")
        if self.validation != "apart" and self.dataset not in SPLIT_HERE:
            raise ValueError(
                f"classify.validation={self.validation} has no effect with dataset={self.dataset}, which has a part "
                f"for it; {' and '.join(SPLIT_HERE)} have none"
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
"""Tokens of the passkey probe that are neither digits nor filler: one before the key, one that asks."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Config):
    """A probe: sequences made up from a seed, parts of which can be predicted by remembering earlier tokens alone."""

    name: ProbeName = "mqar"
    """passkey: a key of digits hidden in filler, asked for at the end; mqar: pairs of keys and values, then keys whose
    values are asked for (multi-query associative recall); copy: a random string, a separator, the string again."""
    digits: int = 4
    """Digits of the key (passkey)."""
    pairs: int = 8
    """Pairs of a key and a value, each asked for once (mqar)."""
    symbols: int = 32
    """Tokens of filler (passkey), keys and as many values (mqar), letters of the alphabet (copy)."""
    shortest: int | None = None
    """Letters of the shortest string to learn (copy): how many there are is drawn from it up to half of the sequence.
    None: always half of it, which can be learned as a distance that other lengths do not have."""
    examples: int = 100_000
    """Sequences to learn from; after them come the same again, in another order."""
    held_out: int = 500
    """Other sequences, to measure on."""
    seed: int = 0
    """Another number gives other sequences."""

    def __post_init__(self) -> None:
        self.check_least("probe", digits=1, pairs=1, examples=1, held_out=1, seed=0)
        if self.shortest is not None and (self.name != "copy" or self.shortest < 1):
            raise ValueError(
                f"probe.shortest is the number of letters of a string to copy, at least 1, got {self.shortest} for the "
                f"probe {self.name}"
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
        """Tokens of the probe's vocabulary."""
        return {"passkey": 10 + MARKS + self.symbols, "mqar": 2 * self.symbols, "copy": 1 + self.symbols}[self.name]

    @property
    def chance(self) -> float:
        """Accuracy without memory: of guessed digits (passkey), a guessed letter (copy), any value of a pair (mqar)."""
        return {"passkey": 10.0**-self.digits, "mqar": 1 / self.pairs, "copy": 1 / self.symbols}[self.name]

    @property
    def fewest_tokens(self) -> int:
        """Tokens of the shortest sequence that asks all."""
        return {"passkey": 2 * (self.digits + 1), "mqar": 3 * self.pairs + 1, "copy": 3}[self.name]

    def first_asked(self, length: int) -> int:
        """Return the first place of a sequence of `length` tokens whose token may be asked for.

        Raises `ValueError` for a length below `fewest_tokens`, and for one whose half is below `shortest`.
        """
        if length < self.fewest_tokens:
            what = {"passkey": f"digits={self.digits}", "mqar": f"pairs={self.pairs}", "copy": "one letter"}[self.name]
            raise ValueError(
                f"{self.name} with {what} needs sequences of at least {self.fewest_tokens} tokens, got length={length}"
            )
        if self.shortest is not None and (length - 1) // 2 < self.shortest:
            raise ValueError(
                f"a string of probe.shortest={self.shortest} letters does not fit twice in {length} tokens with a "
                "separator"
            )
        string = (length - 1) // 2 if self.shortest is None else self.shortest
        return {"passkey": length - self.digits, "mqar": 2 * self.pairs + 1, "copy": string + 1}[self.name]
