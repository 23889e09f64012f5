"""Cut token shards into training windows: equally spaced ones from the stream of tokens, or packed whole documents.

No window of a set crosses the end of a shard.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence, Sized
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.config import digest
from subquad.data.files import Progress, cache_folder, fill_once, silent, usable, write_json
from subquad.data.packing import Packing, pack
from subquad.data.shards import TokenShard
from subquad.data.token_set import OPEN_SHARDS, ShardError, TokenSet
from subquad.disk import sha256_of
from subquad.parsing import read_json_mapping

logger = logging.getLogger(__name__)

Pack = Literal["stream", "documents"]
IGNORED = -100
"""Label of tokens that the loss ignores."""
PADDING = -1
"""Document id of padding."""
PACKING_VERSION = 1
COUNTS = "counts.json"


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `length` tokens, each beginning `stride` tokens after the previous one.

    Item i is `{"input_ids": [length], "labels": [length]}`, both the same int64 tokens: the model shifts labels. By
    default windows overlap by one token (`stride = length - 1`), so every token but the shard's first is predicted
    once. A model that predicts only the last `stride` tokens of each window predicts all but the shard's first
    `length - stride` once. Up to `stride - 1` tokens at the end, which fill no window, are left out.
    Raises `ValueError` for a length below 2 or above the shard's, and for a stride below 1 or above `length - 1`.
    """

    def __init__(self, shard: TokenShard, length: int, *, stride: int | None = None) -> None:
        count_windows(len(shard), length, stride)
        if length > len(shard):
            raise ValueError(f"a window of {length} tokens is longer than {shard.path}, which has {len(shard)}")
        self.shard = shard
        self.length = length
        self.stride = length - 1 if stride is None else stride

    def __len__(self) -> int:
        return count_windows(len(self.shard), self.length, self.stride)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        check_index(self, index)
        start = index * self.stride
        tokens = torch.from_numpy(self.shard.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens.clone()}


def check_index(items: Sized, index: int, what: str = "window") -> None:
    """Raise `IndexError` for an index out of range, which also ends a `for` loop over a data set."""
    if not 0 <= index < len(items):
        raise IndexError(f"{what} {index} is out of range: there are {len(items)}")


class WindowParts(Dataset[dict[str, Tensor]]):
    """Windows split into `parts` of `length` tokens each; item i is part `i % parts` of window `i // parts`.

    Parts overlap by one token, so that each token of the window is predicted as in the whole, except for those that
    fill no part at the end; the first part also has the same context. Raises `ValueError` if the windows are too short.
    """

    def __init__(self, windows: Dataset[dict[str, Tensor]], length: int, parts: int) -> None:
        size = len(windows[0]["input_ids"])
        if parts * (length - 1) + 1 > size:
            raise ValueError(f"windows of {size} tokens can't be cut into {parts} of {length}")
        self.windows, self.length, self.parts = windows, length, parts

    def __len__(self) -> int:
        return len(self.windows) * self.parts  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        check_index(self, index, "part")
        window, part = divmod(index, self.parts)
        start = part * (self.length - 1)
        return {name: tokens[start : start + self.length] for name, tokens in self.windows[window].items()}


def count_windows(tokens: int, length: int, stride: int | None = None) -> int:
    """Return the number of windows in `tokens` tokens; raise `ValueError` for an invalid length or stride."""
    if length < 2:
        raise ValueError(f"a window needs at least 2 tokens, one to read and one to predict, got length={length}")
    if stride is not None and not 1 <= stride <= length - 1:
        raise ValueError(f"stride must lie between 1 and {length - 1} for windows of {length} tokens, got {stride}")
    return max(0, (tokens - length) // (length - 1 if stride is None else stride) + 1)


def check_not_empty(windows: Sized, where: object) -> None:
    """Raise `ValueError`, naming `where`, if packing gave no window."""
    if not len(windows):
        raise ValueError(f"{where} holds no document to pack")


class PackedWindows(Dataset[dict[str, Tensor]]):
    """Windows of packed documents: `{"input_ids", "labels", "doc_ids"}`, each int64 `[length]`.

    `doc_ids` numbers the documents of a window from 0 and is -1 at padding. Labels are the tokens, but -100 at padding
    and at the first token of each piece, which nothing predicts. Raises `ValueError` for a length below 2.
    """

    def __init__(self, shard: TokenShard, length: int, packing: Packing | None = None) -> None:
        self.shard, self.length = shard, length
        self.packing = pack(shard.documents, length) if packing is None else packing
        check_not_empty(self, shard.path)

    def __len__(self) -> int:
        return len(self.packing.firsts) - 1

    @property
    def padding(self) -> float:
        """Fraction of all places that hold no token."""
        places = len(self) * self.length
        return (places - int((self.packing.stops - self.packing.starts).sum())) / places

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        check_index(self, index)
        first, last = self.packing.firsts[index : index + 2].tolist()
        spans = zip(self.packing.starts[first:last].tolist(), self.packing.stops[first:last].tolist(), strict=True)
        return packed_window([self.shard.tokens[start:stop] for start, stop in spans], self.length)


def packed_window(parts: list[np.ndarray], length: int) -> dict[str, Tensor]:
    """Join pieces of documents into an item of `PackedWindows`, padded to `length`."""
    tokens, labels = np.zeros(length, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64)
    doc_ids = np.full(length, PADDING, dtype=np.int64)
    place = 0
    for number, part in enumerate(parts):
        end = place + len(part)
        tokens[place:end] = part
        labels[place + 1 : end] = part[1:]
        doc_ids[place:end] = number
        place = end
    made = {"input_ids": tokens, "labels": labels, "doc_ids": doc_ids}
    return {name: torch.from_numpy(array) for name, array in made.items()}


class SetWindows(Dataset[dict[str, Tensor]]):
    """Windows of all shards of a set, in order; `counts` holds the number of each shard's windows, known unopened.

    Items are those of each shard's windows (`part`). A shard that cannot be read raises `ShardError`; with
    `bad_shards="skip"` it warns once and gives windows of the next readable shard instead, so that all other windows
    keep their indices and the order stays the same.
    """

    def __init__(self, tokens: TokenSet, counts: Sequence[int]) -> None:
        self.tokens, self.counts = tokens, list(counts)
        self.ends = list(accumulate(self.counts))
        self._warned: set[int] = set()

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, index: int) -> tuple[int, int]:
        """Return the number of a window's shard, and the window's index within it."""
        check_index(self, index)
        shard = bisect_right(self.ends, index)
        return shard, index - self.ends[shard] + self.counts[shard]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, number = self.place(index)
        for further in range(len(self.counts)):
            shard = (first + further) % len(self.counts)
            if not self.counts[shard]:
                continue
            try:
                return self.part(shard)[number % self.counts[shard]]
            except ShardError as error:
                if self.tokens.bad_shards == "stop":
                    raise
                if shard not in self._warned:
                    self._warned.add(shard)
                    logger.warning("%d windows are replaced by others: %s", self.counts[shard], error)
        raise ShardError(f"no shard of {self.tokens.path} can be read; the warnings above say why")

    def part(self, shard: int) -> Dataset[dict[str, Tensor]]:
        """Return the windows of one shard; raise `ShardError` if it cannot be read."""
        raise NotImplementedError(f"{type(self).__name__} must define part (SetWindows is abstract)")


class StreamWindows(SetWindows):
    """`Windows` of each shard; raise `ValueError` for an invalid length or stride, or if every shard is too short."""

    def __init__(self, tokens: TokenSet, length: int, *, stride: int | None = None) -> None:
        self.length, self.stride = length, stride
        super().__init__(tokens, [count_windows(entry.tokens, length, stride) for entry in tokens.entries])
        if not len(self):
            raise ValueError(f"a window of {length} tokens is longer than every shard of {tokens.path}")

    def part(self, shard: int) -> Windows:
        return Windows(self.tokens.shard(shard), self.length, stride=self.stride)


class PackedSetWindows(SetWindows):
    """`PackedWindows` of each shard.

    The packing is computed once, which opens and checks every shard, and cached; later readers open only the shards of
    the windows they read. Raises as `PackedWindows`, and `ShardError` for a shard that cannot be read while packing;
    with `bad_shards="skip"` that shard gets no windows.
    """

    def __init__(
        self, tokens: TokenSet, length: int, *, cache: str | None = None, progress: Progress | None = None
    ) -> None:
        self.length, self.cache = length, cache_folder(cache)
        self._packings: dict[int, Packing] = {}
        self.folder = self._place(tokens, ())
        if not usable(self.folder, lambda: _read(self.folder)):
            unreadable = [entry.name for i, entry in enumerate(tokens.entries) if not _readable(tokens, i)]
            self.folder = self._place(tokens, unreadable)

            def fill(temporary: Path) -> None:
                _pack_all(temporary, tokens, unreadable, length, progress or silent)

            fill_once(self.folder, lambda: _read(self.folder), fill)
        self._found = _read(self.folder)
        super().__init__(tokens, self._found["windows"])
        check_not_empty(self, tokens.path)

    def part(self, shard: int) -> PackedWindows:
        """Return the windows of one shard."""
        if shard not in self._packings:
            self._packings[shard] = self._packing(shard)
            if len(self._packings) > OPEN_SHARDS:
                del self._packings[next(iter(self._packings))]
        return PackedWindows(self.tokens.shard(shard), self.length, self._packings[shard])

    @property
    def padding(self) -> float:
        """Fraction of all places that hold no token."""
        places = len(self) * self.length
        return (places - sum(self._found["used"])) / places

    def _packing(self, shard: int) -> Packing:
        file = self.folder / f"{shard:05d}.npy"
        if sha256_of(file) != self._found["sha256"][shard]:
            raise ValueError(f"{file} is damaged: its checksum is wrong; delete {self.folder} to pack again")
        values, windows = np.load(file, mmap_mode="r", allow_pickle=False), self.counts[shard]
        firsts, pieces = values[: windows + 1], values[windows + 1 :]
        return Packing(firsts, *np.split(pieces, 2))

    def _place(self, tokens: TokenSet, unreadable: Sequence[str]) -> Path:
        """Return the folder of the packing, whose name depends on the shards that are left out."""
        key = digest([tokens.fingerprint, self.length, PACKING_VERSION, list(unreadable)])
        return self.cache / f"packing-{key}"


def _readable(tokens: TokenSet, shard: int) -> bool:
    """Return whether a shard of a set opens; if it does not, warn with `bad_shards="skip"`, else raise."""
    try:
        tokens.shard(shard)
    except ShardError as error:
        if tokens.bad_shards == "stop":
            raise
        logger.warning("left out of the packing: %s", error)
        return False
    return True


def _pack_all(folder: Path, tokens: TokenSet, unreadable: Sequence[str], length: int, progress: Progress) -> None:
    """Pack each shard and write the packings, their counts and checksums into `folder`."""
    found: dict[str, list[int | str]] = {"windows": [], "used": [], "sha256": []}
    for i, entry in enumerate(tokens.entries):
        progress("packing", i, len(tokens.entries))
        none = np.zeros(1, dtype=np.int64)
        packing = pack(none if entry.name in unreadable else tokens.shard(i).documents, length)
        file = folder / f"{i:05d}.npy"
        np.save(file, np.concatenate(packing))
        found["windows"].append(len(packing.firsts) - 1)
        found["used"].append(int((packing.stops - packing.starts).sum()))
        found["sha256"].append(sha256_of(file))
    write_json(folder / COUNTS, {"packing": found, "digest": digest(found)})


def _read(folder: Path) -> dict[str, list[Any]]:
    """Read the counts and checksums of a packing; raise `ValueError` if they are damaged."""
    values = read_json_mapping(folder / COUNTS)
    found: dict[str, list[Any]] = values.get("packing", {})
    if values.get("digest") != digest(found):
        raise ValueError(f"{folder / COUNTS} is damaged: its checksum is wrong")
    return found


def windows_of(
    tokens: TokenShard | TokenSet,
    length: int,
    *,
    stride: int | None = None,
    pack: Pack = "stream",
    cache: str | None = None,
    progress: Progress | None = None,
) -> Windows | PackedWindows | StreamWindows | PackedSetWindows:
    """Return the windows of a shard or of a set of shards.

    `pack="stream"` gives windows that cross document ends, `stride` tokens apart, as `Windows`; `pack="documents"`
    packs whole documents, as `PackedWindows`. Raises as these do, and `ValueError` for a stride of packed documents.
    """
    if pack == "stream":
        if isinstance(tokens, TokenSet):
            return StreamWindows(tokens, length, stride=stride)
        return Windows(tokens, length, stride=stride)
    if stride is not None:
        raise ValueError(f"packed documents predict each token once and take no stride, got stride={stride}")
    if isinstance(tokens, TokenSet):
        return PackedSetWindows(tokens, length, cache=cache, progress=progress)
    return PackedWindows(tokens, length)
