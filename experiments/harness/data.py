"""Locate the data sets that recipes name: by `--data NAME=PATH`, in the folder SUBQUAD_DATA, fetched, or built in."""

from __future__ import annotations

import email
import hashlib
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.harness.catalogue import DATA, HUB, LITTLE, PAGE
from subquad.config import suggest
from subquad.data.files import cache_folder
from subquad.data.packed import BAD_ZIP, DAMAGE, most, read_packed, too_much, unpack_any
from subquad.data.sources import TarBytes
from subquad.disk import aside

ENVIRONMENT = "SUBQUAD_DATA"


def check_data(given: Mapping[str, str]) -> None:
    """Raise `ValueError` for an unknown data set, `FileNotFoundError` for a missing path."""
    valid = [*DATA, *(f"{name}/{part}" for name, named in DATA.items() for part in named.parts)]
    for name, path in given.items():
        if name not in valid:
            raise ValueError(f"unknown data set {name!r}; {suggest(name, valid)}")
        if not path.startswith(HUB) and not Path(path).expanduser().exists():
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
    whole = given.get(name, "").startswith(HUB)
    root = Path() if whole else _root(name, given)
    if whole or root.is_file():
        if inner in DATA[name].parts:
            ways = " ".join(f"{name}/{part}=PATH" for part in DATA[name].parts)
            raise ValueError(
                f"--data {name}={given.get(name, root)} is one text, but {name} has parts: use --data {ways}"
            )
        return given[name] if whole else str(root)
    return str(_inside(root, inner, name))


def fetched_folder(name: str) -> Path:
    """Return the folder where `--fetch` keeps the data set."""
    return cache_folder(None) / "data" / DATA[name].folder


def compared(wanted: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Return a sentence about each data set in `wanted`: whether its files are those of the page of the data."""
    said = []
    names = dict.fromkeys(value.removeprefix("@").partition("/")[0] for value in wanted if value.startswith("@"))
    for name in names:
        if name == LITTLE:
            said.append(f"{LITTLE}: a substitute, the package email of this Python")
            continue
        inner = [value.removeprefix(f"@{name}").strip("/") for value in wanted if value.startswith(f"@{name}")]
        listed = [file for file in DATA[name].files if any(_below(file.name, part) for part in inner)]
        others = [file.name for file in listed if _sha256(name, file.name, given) != file.sha256]
        if listed and not others:
            said.append(f"{name}: the files of {PAGE}")
        else:
            which = f" ({others[0]}{' and others' if len(others) > 1 else ''})" if others else ""
            said.append(f"{name}: not the files of {PAGE}{which}; figures don't compare with the committed ones")
    return said


def _below(file: str, part: str) -> bool:
    return not part or file == part or file.startswith(f"{part}/")


def _sha256(name: str, file: str, given: Mapping[str, str]) -> str:
    """Return the checksum of a file of the data set, unpacked, or an empty text if it isn't there."""
    part, _, rest = file.partition("/")
    try:
        of_part = given.get(f"{name}/{part}")
        path = Path(of_part).expanduser() / rest if of_part else Path(find(f"@{name}/{file}", given))
        return hashlib.sha256(read_packed(path)).hexdigest() if path.is_file() else ""
    except (ValueError, FileNotFoundError):
        return ""


def _root(name: str, given: Mapping[str, str]) -> Path:
    if name in given:
        return Path(given[name]).expanduser()
    place = os.environ.get(ENVIRONMENT)
    root = Path(place).expanduser() / DATA[name].folder if place else None
    if root is not None and root.exists():
        return root
    if (kept := fetched_folder(name)).exists():
        return kept
    where = f"{ENVIRONMENT}={place} has no {DATA[name].folder}/" if place else f"{ENVIRONMENT} is not set"
    fetch = f"python -m experiments --fetch {name}, or " if DATA[name].fetched else ""
    raise FileNotFoundError(
        f"this scale needs the data set {name!r} ({DATA[name].holds}): {fetch}use --data {name}=PATH, or set "
        f"{ENVIRONMENT} to a folder that contains {DATA[name].folder}/ ({where}). {PAGE} has its source and checksums"
    )


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
