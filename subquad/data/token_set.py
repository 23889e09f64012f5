"""Read a folder of token shards with an index as one sequence of tokens, without loading it.

`index.json` names the shards in order, with their counts and checksums, which are known without opening a shard. A
shard is opened, and checked against the index and its own head, when its first token is read, once in each process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from subquad.config import digest, suggest
from subquad.data.files import write_json
from subquad.data.shards import Entry, TokenShard
from subquad.parsing import check_keys, read_json_mapping

INDEX = "index.json"
INDEX_FORMAT, INDEX_VERSION = "subquad-tokens", 1
OPEN_SHARDS = 1024
"""Most shards of a set that a process keeps mapped."""
_CONTENT = {"tokenizer_hash": str, "vocab_size": int, "shards": list}
BadShards = Literal["stop", "skip"]


class ShardError(ValueError):
    """A shard of a set is missing or damaged; the message names it and says what to do."""


class TokenSet:
    """The tokens of many shards, joined in the order of the index or of `names`.

    `len` and the counts come from the index alone; `tokens[start:stop]` and `shard` open only the shards they need.
    Windows never cross the end of a shard (`subquad.data.windows_of`).

    Raises `FileNotFoundError` without an index, and `ValueError` for an index that is damaged or of another format
    version and for names that are unknown or repeated. Reading raises `ShardError`.
    """

    def __init__(
        self, folder: str | Path, names: Sequence[str] | None = None, *, bad_shards: BadShards = "stop"
    ) -> None:
        self.path = Path(folder)
        index = read_index(self.path)
        known = {entry.name: entry for entry in index["shards"]}
        for name in names or ():
            if name not in known:
                raise ValueError(f"{self.path} has no shard {name!r}; {suggest(name, known)}")
        if names is not None and len(set(names)) < len(names):
            raise ValueError(f"each shard can be named only once, got {', '.join(names)}")
        self.entries: list[Entry] = [known[name] for name in (known if names is None else names)]
        if not self.entries:
            raise ValueError(f"a set needs at least one shard of {self.path}, got none")
        self.bad_shards = bad_shards
        self.vocab_size: int = index["vocab_size"]
        self.tokenizer_hash: str = index["tokenizer_hash"]
        self.text_bytes = sum(entry.text_bytes for entry in self.entries)
        self.words = sum(entry.words for entry in self.entries)
        self.fingerprint = digest([self.tokenizer_hash, [asdict(entry) for entry in self.entries]])
        self.ends = list(accumulate(entry.tokens for entry in self.entries))
        self._open: dict[int, TokenShard] = {}
        self._bad: dict[int, ShardError] = {}

    def __len__(self) -> int:
        return self.ends[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TokenSet, bad_shards=self.bad_shards), (self.path, [entry.name for entry in self.entries])

    def __repr__(self) -> str:
        return f"TokenSet({str(self.path)!r}: {len(self):,} tokens in {len(self.entries)} shards)"

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, step = places.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens of a set are read in slices of step 1, got {step}")
        parts = [np.zeros(0, dtype=np.int64)] if start >= stop else []
        while start < stop:
            number = bisect_right(self.ends, start)
            begin = self.ends[number] - self.entries[number].tokens
            parts.append(self.shard(number).tokens[start - begin : stop - begin])
            start = min(stop, self.ends[number])
        return np.concatenate(parts)

    @property
    def tokens(self) -> TokenSet:
        """All tokens, sliced like a shard's; a slice opens only its own shards."""
        return self

    @property
    def documents(self) -> np.ndarray:
        """Offsets in `tokens` at which documents begin, then the number of tokens, `[D + 1]`. Opens all shards."""
        starts = [0, *self.ends[:-1]]
        parts = [self.shard(i).documents[:-1].astype(np.int64) + start for i, start in enumerate(starts)]
        return np.concatenate([*parts, np.array([len(self)])])

    def shard(self, number: int) -> TokenShard:
        """Open and check shard `number`; raise `ShardError` if that fails, and at every later call."""
        if number in self._bad:
            raise self._bad[number]
        if number not in self._open:
            entry = self.entries[number]
            try:
                shard = TokenShard(self.path / entry.name, tokenizer_hash=self.tokenizer_hash)
                if (len(shard), shard.sha256) != (entry.tokens, entry.sha256):
                    raise ValueError(
                        f"it is not the shard of the index: it has {len(shard)} tokens, SHA-256 {shard.sha256[:16]}, "
                        f"not {entry.tokens}, {entry.sha256[:16]}"
                    )
            except (OSError, ValueError) as error:
                self._bad[number] = ShardError(
                    f"shard {entry.name} of {self.path} cannot be read: {error}; restore it, or skip it by "
                    "data.bad_shards=skip"
                )
                raise self._bad[number] from error
            self._open[number] = shard
            if len(self._open) > OPEN_SHARDS:
                del self._open[next(iter(self._open))]
        return self._open[number]


def is_token_set(path: str | Path) -> bool:
    """Return whether a path is a folder of shards with an index, valid or damaged."""
    folder = Path(path).expanduser()
    if not (folder / INDEX).is_file():
        return False
    try:
        return read_json_mapping(folder / INDEX).get("format") == INDEX_FORMAT
    except ValueError:
        return any(folder.glob("*.tokens"))


def read_index(folder: Path) -> dict[str, Any]:
    """Return an index's `tokenizer_hash`, `vocab_size` and `shards`, a list of `Entry`; raise as `TokenSet`."""
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} holds no {INDEX}; `subquad data tokens` writes a folder of token shards")
    where = str(folder / INDEX)
    index = read_json_mapping(where)
    if index.get("format") != INDEX_FORMAT or index.get("version") != INDEX_VERSION:
        raise ValueError(
            f"{where} has format {index.get('format')!r} version {index.get('version')!r}; this release reads "
            f"{INDEX_FORMAT!r} version {INDEX_VERSION}: make the shards again"
        )
    content: dict[str, Any] = {name: index.get(name) for name in _CONTENT}
    if index.get("sha256") != digest(content):
        raise ValueError(f"{where} is damaged: its checksum is wrong")
    check_keys(content, _CONTENT, where)
    return content | {"shards": [_entry(entry, where) for entry in content["shards"]]}


def _entry(values: Any, where: str) -> Entry:
    """Return an entry of the index; raise `ValueError` for a name outside the folder or a count out of range."""
    counts = ("tokens", "documents", "text_bytes", "words")
    check_keys(values, {"name": str, "sha256": str, **dict.fromkeys(counts, int)}, where)
    name = values["name"]
    if not name or name.startswith(".") or Path(name).name != name:
        raise ValueError(f"{where}: a shard must be a file in the folder of its index, got {name!r}")
    for count in counts:
        if not 0 <= values[count] < 2**48:
            raise ValueError(f"{where}: {count} of {name} must be at least 0 and below 2^48, got {values[count]}")
    return Entry(name=name, sha256=values["sha256"], **{count: values[count] for count in counts})


def write_index(folder: Path, entries: Sequence[Entry], *, tokenizer_hash: str, vocab_size: int) -> None:
    """Write the index of the shards in `folder`."""
    shards = [asdict(entry) for entry in entries]
    content = {"tokenizer_hash": tokenizer_hash, "vocab_size": vocab_size, "shards": shards}
    values = {"format": INDEX_FORMAT, "version": INDEX_VERSION, **content, "sha256": digest(content)}
    write_json(folder / INDEX, values)


def held_out_names(entries: Sequence[Entry], fraction: float) -> list[str]:
    """Return the names of the last shards that together hold at least `fraction` of the tokens, at most all but one."""
    wanted = fraction * sum(entry.tokens for entry in entries)
    names: list[str] = []
    for entry in reversed(entries[1:]):
        if wanted <= 0:
            break
        names.append(entry.name)
        wanted -= entry.tokens
    return names[::-1]
