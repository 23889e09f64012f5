"""Load labelled sequences for classifiers: a toy task and the data sets of Long Range Arena."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from subquad.config import digest
from subquad.data.config import LabelledConfig
from subquad.data.files import Progress, silent
from subquad.data.lra.made import made
from subquad.data.lra.read_images import grey_images, pathfinder_release
from subquad.data.lra.read_text import hub_parts, listops_release, paper_pairs, texts
from subquad.data.lra.store import PARTS, VERSION, Contents, Sequences, Store, choose, kept, write_store
from subquad.data.toy import CLASSES, MARK, MarkedVotes
from subquad.data.toy import VERSION as TOY_VERSION

logger = logging.getLogger(__name__)

READERS: dict[str, Callable[[LabelledConfig, Progress], Contents]] = {
    "listops": listops_release,
    "text": texts,
    "retrieval": paper_pairs,
    "image": grey_images,
    "pathfinder": pathfinder_release,
}
"""Readers by data set; all sizes of Pathfinder share one."""


@dataclass(frozen=True)
class LabelledCorpus:
    """A classification task in three parts.

    Items are `{"input_ids": [length], "attention_mask": [length], "labels": []}`, all int64; at padding the mask and
    the ids are 0. With `pairs`, `pair_input_ids` and `pair_attention_mask` hold the second document. `fingerprint`
    changes when any item does.
    """

    train: Dataset[dict[str, Tensor]]
    held_out: Dataset[dict[str, Tensor]]
    """Validation part, evaluated during training."""
    test: Dataset[dict[str, Tensor]]
    """Evaluated at the end of training."""
    vocab_size: int
    classes: tuple[str, ...]
    """Names of the labels, label 0 first."""
    fingerprint: str
    pairs: bool = False


def labelled_corpus(
    config: LabelledConfig, length: int, /, *, workers: int | None = None, progress: Progress | None = None
) -> LabelledCorpus:
    """Return the data set `config.dataset` in sequences of `length` tokens, generated or read once and then cached.

    `workers` processes generate the data (None: one for each CPU); their number does not change it.

    Raises `FileNotFoundError`, `ImportError` or `ValueError`, naming the file and the place in it, if the data is
    missing, damaged, in no known layout, lacks examples of a class, or (too_long=refuse) is longer than `length`.
    """
    if config.dataset == "toy":
        return toy(length, examples=config.examples or 50_000, held_out=config.held_out or 1000, seed=config.seed)
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got length={length}")
    config.check_source()
    if config.path is None:
        store = made(config, workers=workers, progress=progress)
    else:
        store = read(config, progress=progress)
    parts = {}
    for part in PARTS:
        wanted = config.examples if part == "train" else config.held_out
        try:
            parts[part] = Sequences(store, part, length, choose(store.labels[part], wanted, config.seed))
        except ValueError as error:
            name = "examples" if part == "train" else "held_out"
            raise ValueError(f"classify.{name}={wanted} is too many for {store.source}: {error}") from error
        _check_length(parts[part], part, config.too_long, store.source)
    facts = [store.fingerprint, length, config.examples, config.held_out, config.seed]
    return LabelledCorpus(
        **parts, vocab_size=store.vocab_size, classes=store.classes, fingerprint=digest(facts), pairs=store.pairs
    )


def toy(length: int, *, examples: int, held_out: int, seed: int = 0) -> LabelledCorpus:
    """Return the task `MarkedVotes` with `examples` training and `held_out` other sequences for validation and test."""
    apart = MarkedVotes(length, held_out, seed=seed, held_out=True)
    return LabelledCorpus(
        train=MarkedVotes(length, examples, seed=seed),
        held_out=apart,
        test=apart,
        vocab_size=MARK + 1,
        classes=CLASSES,
        fingerprint=digest(["marked votes", TOY_VERSION, length, examples, held_out, seed]),
    )


def read(config: LabelledConfig, *, progress: Progress | None = None) -> Store:
    """Read the data set at `config.path`, or open the cached copy.

    The copy is found by the names, sizes and times of the files, or the fingerprint of a Hugging Face dataset.
    Raises as `labelled_corpus`.
    """
    path, rules = config.path or "", config.dataset.rstrip("0123456789")
    options = [config.validation, config.pathfinder.difficulty if rules == "pathfinder" else None]
    state: Any
    if path.startswith("hf:"):
        state = {name: part._fingerprint for name, part in sorted(hub_parts(path).items())}
    else:
        state = _state(path)

    def fill(folder: Path) -> None:
        parts, classes, vocab_size = READERS[rules](config, progress or silent)
        write_store(folder, parts, classes=classes, vocab_size=vocab_size, source=path)

    return kept(config.cache, f"labelled-{config.dataset}-{digest([config.path, state, options, VERSION])}", fill)


def _state(asked: str) -> list[Any]:
    """Return name, size and modification time of a file, or of all files below a folder."""
    place = Path(asked).expanduser()
    files = sorted(Path(folder, name) for folder, _, names in os.walk(place) for name in names) or [place]
    stats = [(file, file.stat()) for file in files]
    return [[file.as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _check_length(sequences: Sequences, part: str, too_long: str, source: str) -> None:
    """Log how many sequences are truncated; with `too_long="refuse"` raise `ValueError` for the first."""
    if not sequences.cut:
        return
    lengths = sequences.full_lengths
    if too_long == "refuse":
        index = int((lengths > sequences.length).any(1).argmax())
        raise ValueError(
            f"{source}, part {part}, example {int(sequences.chosen[index])} has {int(lengths[index].max()):,} tokens, "
            f"more than batch.length={sequences.length}: raise it, or set classify.too_long=cut"
        )
    logger.info(
        "%s of %s sequences in the part %s are truncated to %s tokens; the longest has %s",
        *(f"{number:,}" for number in (sequences.cut, lengths.size)),
        part,
        *(f"{number:,}" for number in (sequences.length, int(lengths.max()))),
    )
