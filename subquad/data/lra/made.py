"""Generate data sets in blocks by several processes, and join the blocks in order.

Each block has its own random numbers, so the number of processes does not change it. Finished blocks are kept, and
interrupted work resumes from them. Child processes share no state with their parent.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from subquad.config import digest
from subquad.data.config import LabelledConfig
from subquad.data.files import Progress, cache_folder, silent, usable
from subquad.data.lra.store import PARTS, Labelled, Store, kept, write_store
from subquad.data.packed import load_arrays
from subquad.disk import aside, locked, remove

logger = logging.getLogger(__name__)

USUAL = {
    "listops": (96_000, 2_000),
    "pathfinder32": (160_000, 20_000),
    "pathfinder64": (20_000, 2_000),
    "pathfinder128": (20_000, 2_000),
}
"""Default numbers of training examples, and of validation and test examples each: Long Range Arena's, but less for the
larger images, which take long to draw; it has 160,000 and 20,000 of each size."""
LEAST_NEW = 0.02
"""Give up if a smaller fraction of a block is new."""


class _Plan(NamedTuple):
    """A data set to generate; `sizes` are the numbers of examples in `PARTS`."""

    maker: str
    options: dict[str, Any]
    seed: int
    sizes: dict[str, int]
    block: int
    version: int


def made(config: LabelledConfig, *, workers: int | None = None, progress: Progress | None = None) -> Store:
    """Generate or open the data set that `config` describes.

    The test part is taken first, then validation, so that more training examples do not change them. Raises
    `ValueError` for rules with too few distinct examples.
    """
    plan = _plan(config)
    key = digest(plan._asdict())
    name = f"labelled-{config.dataset}-{key}"
    folder = cache_folder(config.cache) / name
    blocks = folder.with_name(f"making-{config.dataset}-{key}")
    if not usable(folder, lambda: Store(folder)):
        blocks.mkdir(parents=True, exist_ok=True)
        with locked(blocks):
            kept(config.cache, name, lambda path: _fill(path, blocks, plan, config, workers, progress or silent))
        remove(blocks)
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
    folder: Path, blocks: Path, plan: _Plan, config: LabelledConfig, workers: int | None, report: Progress
) -> None:
    """Make the missing blocks in `blocks` and write the store into `folder`."""
    total = sum(plan.sizes.values())
    wanted = -(-total // plan.block)
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
            done=lambda count: report(f"making {config.dataset}", min(count * plan.block, total), total),
        )
        fresh += [_new(_block(blocks, number), seen) for number in range(len(fresh), wanted)]
        found, latest = sum(map(len, fresh)), len(fresh[-1])
        if found >= total:
            break
        if latest < LEAST_NEW * plan.block:
            raise ValueError(
                f"{config.dataset} by these rules has hardly more than {found:,} distinct examples, but {total:,} are "
                "asked for: lower classify.examples or held_out, or allow longer expressions"
            )
        wanted += min(wanted, -(-(total - found) // latest))
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
        raise OSError(f"block {number} in {blocks} is gone: start again, all other blocks are kept")
    return block


def _new(block: Labelled, seen: set[bytes]) -> np.ndarray:
    """Return the indices of the block's sequences that are not in `seen`, and add them to it."""
    ends = np.cumsum(block.lengths)
    new = []
    for number, (start, end) in enumerate(zip(ends - block.lengths, ends, strict=True)):
        word = hashlib.blake2b(block.tokens[start:end].tobytes(), digest_size=16).digest()
        if word not in seen:
            seen.add(word)
            new.append(number)
    return np.array(new, dtype=np.int64)


class _Pieces:
    """Hand out the new sequences of all blocks, in order, to one part after another."""

    def __init__(self, blocks: Path, fresh: list[np.ndarray]) -> None:
        self.blocks, self.fresh = blocks, fresh
        self.number = self.used = 0

    def take(self, count: int) -> Iterator[Labelled]:
        """Yield the next `count` sequences, at most a block at a time."""
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


def make_blocks(
    maker: str,
    options: dict[str, Any],
    seed: int,
    folder: Path,
    numbers: Sequence[int],
    *,
    workers: int | None = None,
    done: Callable[[int], None] | None = None,
) -> None:
    """Make those blocks of `numbers` that `folder` lacks, and call `done(count)` after each.

    `maker` is a module with a function `make_block(options, seed, number) -> Labelled`. `workers` processes share the
    work (None: one for each CPU). Raises `ValueError` if `make_block` does, `RuntimeError` if a process fails.
    """
    missing = [number for number in numbers if read_block(folder, number) is None]
    count, report = len(numbers) - len(missing), done or (lambda _: None)
    report(count)
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers, len(missing))
    if workers <= 1:
        for number in missing:
            _make(maker, options, seed, folder, number)
            count += 1
            report(count)
        return
    task = {"maker": maker, "options": options, "seed": seed, "folder": str(folder)}
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        try:
            children = [_start(task | {"numbers": missing[i::workers]}, writing) for i in range(workers)]
        finally:
            os.close(writing)
        try:
            for line in lines:  # ends when the last child exits
                if line.startswith("{"):  # not a block number but an error, from `main`
                    failure = json.loads(line)
                    raise (ValueError if failure["kind"] == "ValueError" else RuntimeError)(failure["message"])
                count += 1
                report(count)
        finally:
            for child in children:
                child.terminate()
                child.wait()
    if count < len(numbers):
        raise RuntimeError(f"a process that generates data ended early: {len(numbers) - count} blocks are missing")


def read_block(folder: Path, number: int) -> Labelled | None:
    """Return block `number`, or None if it is missing or damaged."""
    path = folder / f"{number}.npz"
    try:
        arrays = load_arrays(path.read_bytes(), path)
        return _checked(Labelled(*(arrays.get(name, np.empty(0)) for name in Labelled._fields)), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is damaged and will be generated again: %s", path, error)
        return None


def _checked(block: Labelled, path: Path) -> Labelled:
    """Return `block`; raise `ValueError` if its arrays do not fit each other."""
    tokens, lengths, labels = block
    if not all(array.ndim == 1 and array.dtype.kind in "iu" for array in block):
        raise ValueError(f"{path}: tokens, lengths and labels must be one-dimensional arrays of integers")
    if len(lengths) != len(labels) or (lengths < 1).any() or lengths.sum(dtype=object) != len(tokens):
        raise ValueError(f"{path}: {len(lengths)} lengths, {len(labels)} labels and {len(tokens)} tokens do not fit")
    return block


def _make(maker: str, options: dict[str, Any], seed: int, folder: Path, number: int) -> None:
    block = importlib.import_module(maker).make_block(options, seed, number)
    with aside(folder / f"{number}.npz") as path, path.open("wb") as stream:
        np.savez(stream, **block._asdict())


def _start(task: dict[str, Any], output: int) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    child = subprocess.Popen(
        [sys.executable, "-c", "from subquad.data.lra.made import main; main()"],
        stdin=subprocess.PIPE,
        stdout=output,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:  # a child that failed already shows by its missing blocks
        child.stdin.write(json.dumps(task))
    return child


def main() -> None:
    """Make the blocks that standard input asks for, and write each one's number, or an error, to standard output."""
    task = json.load(sys.stdin)
    folder = Path(task["folder"])
    try:
        for number in task["numbers"]:
            _make(task["maker"], task["options"], task["seed"], folder, number)
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent process has ended, so no more blocks are needed
    except Exception as error:
        message = f"block {number}: {error}" if isinstance(error, ValueError) else f"block {number}: {error!r}"
        sys.stdout.write(json.dumps({"kind": type(error).__name__, "message": message}) + "\n")
        raise SystemExit(1) from error
