"""Data sets that are made by rules: blocks by several processes, put together in their order."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from subquad.config import digest
from subquad.data.files import cache_folder, locked, remove
from subquad.data.labelled_config import LabelledConfig
from subquad.data.lra.blocks import make_blocks, read_block
from subquad.data.lra.kept import is_kept, kept
from subquad.data.lra.store import PARTS, Labelled, Store, write_store

if TYPE_CHECKING:
    from subquad.data.files import Progress

logger = logging.getLogger(__name__)

USUAL = {
    "listops": (96_000, 2_000),
    "pathfinder32": (160_000, 20_000),
    "pathfinder64": (20_000, 2_000),
    "pathfinder128": (20_000, 2_000),
}
"""Training examples, and those of validation and of test each: as many as Long Range Arena has, but of the images that
take long to make, where it has 160,000 and 20,000."""
LEAST_NEW = 0.02
"""A block of which fewer examples are new ends the search for more."""


class _Plan(NamedTuple):
    """What to make. `sizes` are the examples of `PARTS`."""

    maker: str
    options: dict[str, Any]
    seed: int
    sizes: dict[str, int]
    block: int
    version: int


def made(config: LabelledConfig, *, workers: int | None = None, progress: Progress | None = None) -> Store:
    """The data set that `config` describes, made or opened. The test part comes first, then validation, then training:
    with more examples to learn from the others stay.

    Raises `ValueError` for rules that have too few different examples.
    """
    plan = _plan(config)
    key = digest(plan._asdict())
    name = f"labelled-{config.dataset}-{key}"
    folder = cache_folder(config.cache) / name
    blocks = folder.with_name(f"making-{config.dataset}-{key}")
    if not is_kept(folder):
        blocks.mkdir(parents=True, exist_ok=True)
        with locked(blocks):
            store = kept(config.cache, name, lambda path: _fill(path, blocks, plan, config, workers, progress))
        remove(blocks)
        return store
    return Store(folder)


def _plan(config: LabelledConfig) -> _Plan:
    rules = "pathfinder" if config.dataset.startswith("pathfinder") else config.dataset
    train, held_out = USUAL[config.dataset]
    held_out = config.held_out or held_out
    options = getattr(config, rules).to_dict()
    if rules == "pathfinder":
        options["size"] = int(config.dataset.removeprefix(rules))
    module = importlib.import_module(f"subquad.data.lra.{rules}")
    return _Plan(
        maker=module.__name__,
        options=options,
        seed=config.seed,
        sizes={"test": held_out, "held_out": held_out, "train": config.examples or train},
        block=module.BLOCK,
        version=module.VERSION,
    )


def _fill(
    folder: Path, blocks: Path, plan: _Plan, config: LabelledConfig, workers: int | None, progress: Progress | None
) -> None:
    """Make what is missing in `blocks` and write the store into `folder`."""
    total = sum(plan.sizes.values())
    report = progress or (lambda *_: None)
    what = f"making {config.dataset}"
    wanted, counts = -(-total // plan.block), list[int]()
    seen: set[bytes] = set()
    fresh: list[np.ndarray] = []
    while True:
        make_blocks(
            plan.maker,
            plan.options,
            plan.seed,
            blocks,
            range(wanted),
            workers=workers,
            done=lambda count: report(what, min(count * plan.block, total), total),
        )
        for number in range(len(fresh), wanted):
            fresh.append(_new(_block(blocks, number), seen))
            counts.append(len(fresh[-1]))
        missing = total - sum(counts)
        if missing <= 0:
            break
        if counts[-1] < LEAST_NEW * plan.block:
            raise ValueError(
                f"{config.dataset} by these rules has hardly more than {sum(counts):,} different examples, and "
                f"{total:,} are asked for: lower classify.examples or held_out, or allow longer ones"
            )
        wanted += min(wanted, -(-missing // counts[-1]))
    module = importlib.import_module(plan.maker)
    pieces = _Pieces(blocks, fresh)
    write_store(
        folder,
        {part: pieces.take(plan.sizes[part]) for part in reversed(PARTS)},
        classes=module.CLASSES,
        vocab_size=module.VOCAB_SIZE,
        source=f"{config.dataset} (seed {plan.seed})",
    )


def _block(blocks: Path, number: int) -> Labelled:
    block = read_block(blocks, number)
    if block is None:
        raise OSError(f"block {number} in {blocks} is gone: start again, the others are kept")
    return block


def _new(block: Labelled, seen: set[bytes]) -> np.ndarray:
    """The numbers of the block's sequences that were not `seen` before; they are added."""
    ends = np.cumsum(block.lengths)
    new = []
    for number, (start, end) in enumerate(zip(ends - block.lengths, ends, strict=True)):
        word = hashlib.blake2b(block.tokens[start:end].tobytes(), digest_size=16).digest()
        if word not in seen:
            seen.add(word)
            new.append(number)
    return np.array(new, dtype=np.int64)


class _Pieces:
    """The new sequences of all blocks in order, given out part by part."""

    def __init__(self, blocks: Path, fresh: list[np.ndarray]) -> None:
        self.blocks, self.fresh = blocks, fresh
        self.number = self.used = 0

    def take(self, count: int) -> Iterator[Labelled]:
        """The next `count` sequences, at most a block at once."""
        while count:
            block = _block(self.blocks, self.number)
            chosen = self.fresh[self.number][self.used : self.used + count]
            if len(chosen):
                starts = np.cumsum(block.lengths) - block.lengths
                tokens = np.concatenate([block.tokens[starts[i] : starts[i] + block.lengths[i]] for i in chosen])
                yield Labelled(tokens, block.lengths[chosen], block.labels[chosen])
            count -= len(chosen)
            self.used += len(chosen)
            if self.used == len(self.fresh[self.number]):
                self.number, self.used = self.number + 1, 0
