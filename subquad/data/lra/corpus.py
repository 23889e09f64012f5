"""The data sets of Long Range Arena (Tay et al. 2020, arXiv:2011.04006): made by its rules or read from a folder."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from subquad.config import digest
from subquad.data.labelled import LabelledCorpus
from subquad.data.lra.sequences import Sequences, choose
from subquad.data.lra.store import PARTS, Store

if TYPE_CHECKING:
    from subquad.data.files import Progress
    from subquad.data.labelled_config import LabelledConfig

logger = logging.getLogger(__name__)


def lra_corpus(
    config: LabelledConfig, length: int, /, *, workers: int | None = None, progress: Progress | None = None
) -> LabelledCorpus:
    """`subquad.data.labelled.labelled_corpus` for the data sets of Long Range Arena."""
    if length < 1:
        raise ValueError(f"sequences have at least one token, got length={length}")
    store = open_store(config, workers=workers, progress=progress)
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
        train=parts["train"],
        held_out=parts["held_out"],
        test=parts["test"],
        vocab_size=store.vocab_size,
        classes=store.classes,
        fingerprint=digest(facts),
        pairs=store.pairs,
    )


def open_store(config: LabelledConfig, *, workers: int | None = None, progress: Progress | None = None) -> Store:
    """The whole data set of `config`, made or read where that was not done before."""
    config.check_source()
    if config.path is None:
        from subquad.data.lra.made import made

        return made(config, workers=workers, progress=progress)
    from subquad.data.lra.read import read

    return read(config, progress=progress)


def _check_length(sequences: Sequences, part: str, too_long: str, source: str) -> None:
    """Log how many sequences are cut, or raise `ValueError` for the first where none may be."""
    if not sequences.cut:
        return
    lengths = sequences.full_lengths
    if too_long == "refuse":
        index = int((lengths > sequences.length).any(1).argmax())
        raise ValueError(
            f"{source}, part {part}, example {int(sequences.chosen[index])} has {int(lengths[index].max()):,} tokens, "
            f"above batch.length={sequences.length}: raise it, or choose classify.too_long=cut"
        )
    logger.info(
        "%s of %s sequences in the part %s are cut to %s tokens; the longest has %s",
        *(f"{number:,}" for number in (sequences.cut, lengths.size)),
        part,
        *(f"{number:,}" for number in (sequences.length, int(lengths.max()))),
    )
