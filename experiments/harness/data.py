"""Locate the data sets that recipes name: by `--data NAME=PATH`, in the folder SUBQUAD_DATA, or built in."""

from __future__ import annotations

import email
import hashlib
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from subquad.config import suggest
from subquad.data.files import aside, cache_folder
from subquad.data.packed import BAD_ZIP, DAMAGE, most, too_much, unpack_any
from subquad.data.sources import TarBytes

ENVIRONMENT = "SUBQUAD_DATA"


@dataclass(frozen=True)
class Named:
    """A data set that recipes write as `@NAME/...`."""

    folder: str
    """Its folder in SUBQUAD_DATA."""
    holds: str
    """Its contents, for error messages."""
    parts: tuple[str, ...] = ()
    """Names of its parts; a single file or a hub data set can only stand for one of them."""


PARTS = ("train", "valid", "test")
DATA: dict[str, Named] = {
    "books": Named("gutenberg", "train/, valid/ and test/ of long books as .txt, or a .tar.xz of them", PARTS),
    "tinyshakespeare": Named("tinyshakespeare", "input.txt, plain or compressed"),
    "enwiki": Named("enwiki_xml_sample", "a file of Wikipedia's XML, plain or compressed"),
    "wikitext": Named("wikitext", "the test files of WikiText, plain or compressed"),
    "mnist": Named("mnist", "the four idx files, plain or compressed"),
    "cifar10": Named("cifar10", "CIFAR-10 in one of its public layouts"),
    "imdb": Named("imdb", "the reviews in one of their public layouts"),
    "acl": Named("acl_pairs", "papers and pairs of them, as the AAN set of LRA"),
    "gpt2": Named("gpt2_bpe", "GPT-2's encoder.json and vocab.bpe, plain or compressed"),
}
LITTLE = "little"
"""A text that comes with Python: the modules of its package `email`."""


def check_data(given: Mapping[str, str]) -> None:
    """Raise `ValueError` for an unknown data set, `FileNotFoundError` for a missing path."""
    valid = [*DATA, *(f"{name}/{part}" for name, named in DATA.items() for part in named.parts)]
    for name, path in given.items():
        if name not in valid:
            raise ValueError(f"unknown data set {name!r}; {suggest(name, valid)}")
        if not path.startswith("hf:") and not Path(path).expanduser().exists():
            holds = DATA[name.partition("/")[0]].holds
            raise FileNotFoundError(f"--data {name}={path}: no such file or folder; expected {holds}")


def is_little(path: str) -> bool:
    """Return whether `path` is that of the built-in text."""
    return path == find(f"@{LITTLE}", {})


def find(value: str, given: Mapping[str, str]) -> str:
    """Return the path that `@NAME/inner` stands for.

    Raises `ValueError` for an unknown name and `FileNotFoundError`, with the ways to provide it, for missing data.
    """
    name, _, inner = value.removeprefix("@").partition("/")
    if name == LITTLE:
        return str(Path(email.__file__).parent / "*.py")
    if name not in DATA:
        raise ValueError(f"{value} is not a known data set; {suggest(name, [*DATA, LITTLE])}")
    if f"{name}/{inner}" in given:
        return str(given[f"{name}/{inner}"])
    whole = given.get(name, "").startswith("hf:")
    root = Path() if whole else _root(name, given)
    if whole or root.is_file():
        if inner in DATA[name].parts:
            ways = " ".join(f"{name}/{part}=PATH" for part in DATA[name].parts)
            raise ValueError(
                f"--data {name}={given.get(name, root)} is one text, but {name} has parts: use --data {ways}"
            )
        return given[name] if whole else str(root)
    return str(_inside(root, inner, name))


def _root(name: str, given: Mapping[str, str]) -> Path:
    if name in given:
        return Path(given[name]).expanduser()
    place = os.environ.get(ENVIRONMENT)
    root = Path(place).expanduser() / DATA[name].folder if place else None
    if root is None or not root.exists():
        where = f"{ENVIRONMENT}={place} has no {DATA[name].folder}/" if place else f"{ENVIRONMENT} is not set"
        raise FileNotFoundError(
            f"this scale needs the data set {name!r} ({DATA[name].holds}): use --data {name}=PATH, or set "
            f"{ENVIRONMENT} to a folder that contains {DATA[name].folder}/ ({where})"
        )
    return root


def _inside(root: Path, inner: str, name: str) -> Path:
    """Return the path of `inner` in `root`: as it is, compressed, or in the only tar archive there."""
    if not inner:
        return root
    for suffix in ("", ".xz", ".gz", ".bz2"):
        if (file := root / f"{inner}{suffix}").exists():
            return file
    archives = sorted(root.glob("*.tar*"))
    if len(archives) == 1:
        unpacked = _unpacked(archives[0])
        for place in (unpacked / inner, *(folder / inner for folder in unpacked.iterdir())):
            if place.exists():
                return place
    raise FileNotFoundError(f"{root} has no {inner}; the data set {name!r} should be {DATA[name].holds}")


def _unpacked(archive: Path) -> Path:
    """Unpack the archive in the cache, unless it is there, and return its folder."""
    with archive.open("rb") as stream:
        name = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    folder = cache_folder(None) / f"unpacked-{name}"
    if not folder.is_dir():
        unpack_archive(archive, folder)
    return folder


def unpack_archive(archive: Path, folder: Path) -> None:
    """Unpack a tar archive into `folder` only. Raises `ValueError` if it is damaged or a decompression bomb."""
    with aside(folder) as temporary:
        temporary.mkdir()
        try:
            raw = archive.read_bytes()
            with tarfile.open(fileobj=TarBytes(unpack_any(raw)), mode="r:") as opened:
                members = opened.getmembers()
                if sum(member.size for member in members) > most(len(raw)):
                    raise too_much(len(raw))
                opened.extractall(temporary, members, filter="data")
        except (*DAMAGE, *BAD_ZIP, tarfile.TarError) as error:
            raise ValueError(f"{archive} is damaged and does not unpack: {error}") from error
