"""Windows of a set of shards, none of which crosses the end of a shard."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from subquad.config import digest
from subquad.data.files import Progress, aside, cache_folder, usable, write_json
from subquad.data.packing import PackedWindows, Packing, check_not_empty, pack
from subquad.data.shards import TokenShard
from subquad.data.token_set import OPEN_SHARDS, ShardError, TokenSet
from subquad.data.windows import Windows, count_windows
from subquad.parsing import read_json_mapping

logger = logging.getLogger(__name__)

Pack = Literal["stream", "documents"]
PACKING_VERSION = 1
COUNTS = "counts.json"


class SetWindows(Dataset[dict[str, Tensor]]):
    """The windows of all shards, shard after shard; `counts` says how many each has, without opening it.

    Item i is that of the shard's own windows (`part`). Where a shard cannot be read, `ShardError` says so; with
    `bad_shards="skip"` the set warns once, and in the place of each of its windows there is one of the next shard that
    can be read: all others keep their numbers, so that no order changes.
    """

    def __init__(self, tokens: TokenSet, counts: Sequence[int]) -> None:
        self.tokens, self.counts = tokens, list(counts)
        self.ends = list(accumulate(self.counts))
        self._warned: set[int] = set()

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, index: int) -> tuple[int, int]:
        """The shard of a window, and the window's number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is out of range: there are {len(self)}")
        shard = bisect_right(self.ends, index)
        return shard, index - self.ends[shard] + self.counts[shard]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shard, number = self.place(index)
        try:
            return self.part(shard)[number]
        except ShardError as error:
            if self.tokens.bad_shards == "stop":
                raise
            self._warn(shard, error)
        for further in range(1, len(self.counts)):
            other = (shard + further) % len(self.counts)
            if not self.counts[other]:
                continue
            try:
                return self.part(other)[number % self.counts[other]]
            except ShardError as error:
                self._warn(other, error)
        raise ShardError(f"no shard of {self.tokens.path} can be read; the warnings before this one say why")

    def part(self, shard: int) -> Dataset[dict[str, Tensor]]:
        """The windows of one shard; `ShardError` where it cannot be read."""
        raise NotImplementedError(f"{type(self).__name__} must define part (SetWindows is abstract)")

    def _warn(self, shard: int, error: ShardError) -> None:
        if shard not in self._warned:
            self._warned.add(shard)
            logger.warning("%d windows are replaced by others: %s", self.counts[shard], error)


class StreamWindows(SetWindows):
    """`subquad.data.Windows` of each shard. Raises `ValueError` as that does, where no shard is long enough too."""

    def __init__(self, tokens: TokenSet, length: int, *, stride: int | None = None) -> None:
        self.length, self.stride = length, stride
        super().__init__(tokens, [count_windows(entry.tokens, length, stride) for entry in tokens.entries])
        if not len(self):
            raise ValueError(
                f"a window of {length} tokens is longer than every shard of {tokens.path}; use a shorter window or "
                "larger shards"
            )

    def part(self, shard: int) -> Windows:
        """The windows of one shard."""
        return Windows(self.tokens.shard(shard), self.length, stride=self.stride)


class PackedSetWindows(SetWindows):
    """`subquad.data.PackedWindows` of each shard.

    How documents fill windows is found once, which reads the offsets of all documents and checks every shard, and kept
    in a folder of the cache; later readers open the shards of their own windows alone. Raises as `PackedWindows`, and
    `ShardError` for a shard that cannot be read when they are packed; with `bad_shards="skip"` it then has no windows.
    """

    def __init__(
        self, tokens: TokenSet, length: int, *, cache: str | None = None, progress: Progress | None = None
    ) -> None:
        self.length, self.cache = length, cache_folder(cache)
        self._packings: OrderedDict[int, Packing] = OrderedDict()
        self.folder = self._place(tokens, ())
        if not usable(self.folder, lambda: _read(self.folder)):
            unreadable = [entry.name for i, entry in enumerate(tokens.entries) if not self._readable(tokens, i)]
            self.folder = self._place(tokens, unreadable)
            if not unreadable or not usable(self.folder, lambda: _read(self.folder)):
                _make(self.folder, tokens, unreadable, length, progress)
        self._sha256 = _read(self.folder)["sha256"]
        super().__init__(tokens, _read(self.folder)["windows"])
        check_not_empty(len(self), tokens.path)

    def part(self, shard: int) -> PackedWindows:
        """The windows of one shard."""
        packing = self._packings.get(shard)
        if packing is None:
            packing = self._packings[shard] = self._packing(shard)
            if len(self._packings) > OPEN_SHARDS:
                self._packings.popitem(last=False)
        return PackedWindows(self.tokens.shard(shard), self.length, packing)

    @property
    def padding(self) -> float:
        """Share of all places that hold no token."""
        places = len(self) * self.length
        return (places - sum(_read(self.folder)["used"])) / places

    def _packing(self, shard: int) -> Packing:
        file = self.folder / f"{shard:05d}.npy"
        if hashlib.sha256(file.read_bytes()).hexdigest() != self._sha256[shard]:
            raise ValueError(f"{file} is damaged: its checksum is wrong; delete {self.folder}, which is made again")
        values, windows = np.load(file, mmap_mode="r", allow_pickle=False), self.counts[shard]
        firsts, pieces = values[: windows + 1], values[windows + 1 :]
        return Packing(firsts, *np.split(pieces, 2))

    def _place(self, tokens: TokenSet, unreadable: Sequence[str]) -> Path:
        """The folder of the packing: another one where shards are left out."""
        key = digest([tokens.fingerprint, self.length, PACKING_VERSION, list(unreadable)])
        return self.cache / f"packing-{key}"

    @staticmethod
    def _readable(tokens: TokenSet, shard: int) -> bool:
        try:
            tokens.shard(shard)
        except ShardError as error:
            if tokens.bad_shards == "stop":
                raise
            logger.warning("left out of the packing: %s", error)
            return False
        return True


def _make(folder: Path, tokens: TokenSet, unreadable: Sequence[str], length: int, progress: Progress | None) -> None:
    """Pack each shard, and write where the pieces are, the counts and the checksums."""
    found: dict[str, list[int | str]] = {"windows": [], "used": [], "sha256": []}
    with aside(folder) as temporary:
        temporary.mkdir()
        for i, entry in enumerate(tokens.entries):
            if progress:
                progress("packing", i, len(tokens.entries))
            none = np.zeros(1, dtype=np.int64)
            documents = none if entry.name in unreadable else tokens.shard(i).documents
            packing = pack(documents, length)
            file = temporary / f"{i:05d}.npy"
            np.save(file, np.concatenate(packing))
            found["windows"].append(len(packing.firsts) - 1)
            found["used"].append(int((packing.stops - packing.starts).sum()))
            found["sha256"].append(hashlib.sha256(file.read_bytes()).hexdigest())
        write_json(temporary / COUNTS, {"packing": found, "digest": digest(found)})


def _read(folder: Path) -> dict[str, list[Any]]:
    """The counts and checksums of a packing. `ValueError` where they are damaged."""
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
    """The windows of a shard or of a set of them.

    `stream`: windows that run over the ends of documents, `stride` tokens apart, as `Windows`; `documents`: whole
    documents, packed with their boundaries, as `PackedWindows`. Raises `ValueError` as these do, and for a stride of
    packed documents.
    """
    if pack == "stream":
        if isinstance(tokens, TokenSet):
            return StreamWindows(tokens, length, stride=stride)
        return Windows(tokens, length, stride=stride)
    if stride is not None:
        raise ValueError(
            f"packed documents have no stride: each token but a document's first is predicted once, got {stride}"
        )
    if isinstance(tokens, TokenSet):
        return PackedSetWindows(tokens, length, cache=cache, progress=progress)
    return PackedWindows(tokens, length)
