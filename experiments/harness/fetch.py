"""Fetch a data set from the addresses in `experiments/data.yaml`, and keep it if its SHA-256 is the one listed."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

from experiments.harness.catalogue import DATA, PAGE, Listed
from experiments.harness.data import ENVIRONMENT, fetched_folder
from subquad.config import suggest
from subquad.data.packed import DAMAGE, unpack_any
from subquad.disk import aside

SECONDS, TIMES = 60, 2
"""Time to wait for an answer; the most bytes that are read, as a multiple of the file's."""


def fetch(name: str, tell: Callable[[str], None]) -> Path:
    """Fetch the data set `name` into the cache, unless it is there, and return its folder.

    Raises `ValueError` for a data set that is not fetched or a file that is not the one listed, and `OSError` if an
    address can't be read. The folder appears complete or not at all.
    """
    if name not in DATA:
        raise ValueError(
            f"unknown data set {name!r}; {suggest(name, [key for key, one in DATA.items() if one.fetched])}"
        )
    if not DATA[name].fetched:
        raise ValueError(
            f"{name} is not fetched ({DATA[name].terms}): {PAGE} says where to get it; then --data {name}=PATH"
        )
    folder = fetched_folder(name)
    if folder.is_dir():
        tell(f"{name}: already in {folder}")
        return folder
    with aside(folder) as temporary:
        for file in DATA[name].files:
            tell(f"{name}: {file.name}, {file.bytes:,} bytes")
            place = temporary / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(_checked(name, file, _read(file)))
    tell(f"{name}: in {folder}")
    return folder


def _read(file: Listed) -> bytes:
    most = TIMES * file.bytes + (1 << 20)
    try:
        with urllib.request.urlopen(file.url, timeout=SECONDS) as answer:
            raw: bytes = answer.read(most + 1)
    except (OSError, HTTPException) as error:
        raise OSError(f"{file.url} can't be read ({error}): get it by hand, see {PAGE}") from error
    if len(raw) > most:
        raise ValueError(f"{file.url} has more than {most:,} bytes; {file.name} has {file.bytes:,}")
    return raw


def _checked(name: str, file: Listed, raw: bytes) -> bytes:
    """Return the file's content. Raises `ValueError` if it isn't in what has arrived."""
    try:
        whole = unpack_any(raw)
    except DAMAGE as error:
        raise ValueError(f"{file.url} is damaged and does not unpack: {error}") from error
    for content in _parts(file, whole) if file.begins else [whole]:
        if hashlib.sha256(content).hexdigest() == file.sha256:
            return content
    raise ValueError(
        f"{file.url} has no {file.name} with the SHA-256 {file.sha256}: it has changed. Give a copy by "
        f"--data {name}=PATH or in {ENVIRONMENT}; see {PAGE}"
    )


def _parts(file: Listed, raw: bytes) -> Iterator[bytes]:
    """Yield the parts of a text that begin and are as long as the file, which ends with one end of a line."""
    for encoding in ("utf-8-sig", "cp1252"):
        try:
            text = raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n").encode()
        except UnicodeDecodeError:
            continue
        begins, place = file.begins.encode(), -1
        while (place := text.find(begins, place + 1)) >= 0:
            yield text[place : place + file.bytes - 1] + b"\n"
