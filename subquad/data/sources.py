"""Documents from files, folders, globs, archives, Python's own source and Hugging Face datasets.

A document is UTF-8 text, kept as the bytes that were read. Its name is relative to what was asked for, with `/`
between the parts, so that it is the same on every machine.
"""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import sysconfig
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from subquad.config import suggest
from subquad.data.files import check_path
from subquad.data.packed import BAD_ZIP, DAMAGE, check_zip, most, too_much, unpack, unpack_any

logger = logging.getLogger(__name__)

STDLIB_LEAVES_OUT = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})
_ARCHIVES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tgz", ".txz")
TAR_MARK = slice(257, 262)
"""Where a tar archive says what it is: OpenWebText's are named .xz."""
_DAMAGE = (*DAMAGE, *BAD_ZIP, tarfile.TarError)


class TarBytes(io.BytesIO):
    """An archive's bytes that are read a few times over at most: a header can send tarfile back to itself for ever."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.left = 4 * len(content) + (1 << 20)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as `io.BytesIO`; `OSError` for a damaged header's negative size, and for reading without end."""
        self.left -= max(size or 0, 1)
        if size is None or size < 0 or self.left < 0:
            raise OSError("its headers lead in a circle or backwards")
        return super().read(size)


class BadTextError(ValueError):
    """A file that holds no UTF-8 text; the message names the file and, where there is one, the offset."""


class Document(NamedTuple):
    """A text and its name. `key` is what the split hashes: the name, or the text where names are only numbers."""

    name: str
    text: bytes
    key: bytes


class Source(Protocol):
    """Documents in a fixed order, from what was `asked` for; `names` are those of its files, if it has files."""

    asked: str
    names: list[str]

    def fingerprint(self) -> str:
        """Return a hash of all names and contents, without making documents of them."""
        ...

    def documents(self) -> Iterator[Document]:
        """Yield the documents; `BadTextError` at the first that isn't text."""
        ...


def open_source(path: str, *, skip_bad_files: bool = False) -> Source:
    """Open the source that `path` names, as `DataConfig.path` describes it.

    Raises `FileNotFoundError` for a path that is missing or a glob that matches nothing, `ImportError` for a dataset
    without the `datasets` extra.
    """
    check_source(path)
    if path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return FileSource(path, root, _stdlib_files(root), skip_bad_files)
    if path.startswith("hf:"):
        return DatasetSource(path, skip_bad_files)
    place = Path(path).expanduser()
    if place.is_file():
        return FileSource(path, place.parent, [place], skip_bad_files)
    if place.is_dir():
        return FileSource(path, place, _files_below(place), skip_bad_files)
    files = [Path(found) for found in sorted(glob.glob(str(place), recursive=True)) if os.path.isfile(found)]
    if not files:
        raise FileNotFoundError(f"the glob {path!r} matches no file")
    return FileSource(path, Path(os.path.commonpath([file.parent for file in files])), files, skip_bad_files)


def check_source(path: str) -> None:
    """Raise `FileNotFoundError` for a path that is missing."""
    if not glob.has_magic(path):
        check_path(path, "stdlib", "hf:NAME")


def _files_below(root: Path) -> list[Path]:
    """Return all files below `root` but hidden ones."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _stdlib_files(root: Path) -> list[Path]:
    """List the modules of the standard library, without its tests and without what the build of Python wrote."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_LEAVES_OUT and not name.startswith("config-")]
        found += [Path(folder, n) for n in files if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


class FileSource:
    """Files, each one document; an archive has one for each of its files. Empty files hold no document."""

    def __init__(self, asked: str, root: Path, files: list[Path], skip_bad_files: bool) -> None:
        self.asked = asked
        # Bytes of a name that are no UTF-8 are written out.
        names = (os.fsencode(file.relative_to(root).as_posix()).decode("utf-8", "backslashreplace") for file in files)
        self.files = dict(zip((unicodedata.normalize("NFC", name) for name in names), files, strict=True))
        self.names = list(self.files)
        self.skip_bad_files = skip_bad_files

    def fingerprint(self) -> str:
        """Return sixty-four hexadecimal digits of all names and contents."""
        total = hashlib.sha256()
        for name, file in self.files.items():
            if file.exists() and not file.is_file():  # a pipe would be waited for
                raise BadTextError(f"{file} is no regular file but a pipe, a socket or a device")
            with file.open("rb") as stream:
                _add(total, name, hashlib.file_digest(stream, "sha256").digest())
        return total.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield each file's documents, in order of the names.

        Raises `BadTextError` for a file that isn't text, and for a file asked for by name that is empty; with
        `skip_bad_files` it warns and goes on.
        """
        for name, file in self.files.items():
            try:
                raw = file.read_bytes()
                if not raw and len(self.files) == 1:
                    raise BadTextError(f"{file} is empty: there is no text to read")
                for inner, text in _unpack(name, raw, file):
                    shown = str(file) if inner == name else f"{file}: {inner}"
                    if not text:
                        logger.info("%s is empty and holds no document", shown)
                    elif _is_text(text, shown, self.skip_bad_files):
                        yield Document(inner, text, inner.encode())
            except BadTextError as error:
                if not self.skip_bad_files:
                    raise
                logger.warning("skipped: %s", error)


class DatasetSource:
    """The rows of a Hugging Face dataset, each one document; rows without text hold none."""

    def __init__(self, asked: str, skip_bad_files: bool = False) -> None:
        name, *rest = asked.removeprefix("hf:").split(":")
        if not name or len(rest) > 3:
            raise ValueError(f"a dataset is hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], got {asked!r}")
        config, split, column = [*rest, "", "", ""][:3]
        self.asked = asked
        self.names: list[str] = []
        self.skip_bad_files = skip_bad_files
        self.rows = hub_dataset(asked, name, config or None, split=split or "train")
        self.column = column or "text"
        if self.column not in self.rows.column_names:
            choices = suggest(self.column, self.rows.column_names)
            raise ValueError(f"{asked!r} has no column {self.column!r}; {choices}")

    def fingerprint(self) -> str:
        """Return sixty-four hexadecimal digits of all rows."""
        total = hashlib.sha256()
        for text in self.rows[self.column]:
            _add(total, "", hashlib.sha256((text or "").encode()).digest())
        return total.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yield the rows that hold text; `BadTextError` for a row with a NUL, or with `skip_bad_files` a warning."""
        for number, row in enumerate(self.rows[self.column]):
            text = (row or "").encode()
            if text and _is_text(text, f"{self.asked}, row {number}", self.skip_bad_files):
                yield Document(f"row {number}", text, text)


def hub_dataset(asked: str, *arguments: Any, **options: Any) -> Any:
    """Return `datasets.load_dataset(*arguments, **options)` for the path `asked`; `ImportError` without `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{asked!r} needs the package datasets, which is not installed: pip install 'subquad[datasets]'"
        ) from error
    return datasets.load_dataset(*arguments, **options)


def check_text(text: bytes, name: str) -> None:
    """Raise `BadTextError` with the offset of the first byte that isn't UTF-8 text (a NUL isn't)."""
    if (offset := text.find(b"\0")) >= 0:
        raise BadTextError(f"{name} is not text: it has a NUL at byte {offset}")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadTextError(
            f"{name} is not text: byte {error.start} is 0x{text[error.start]:02x}, which is not valid UTF-8"
        ) from error


def _is_text(text: bytes, name: str, skip: bool) -> bool:
    """Check as `check_text`; with `skip`, warn and return False instead of raising."""
    try:
        check_text(text, name)
    except BadTextError as error:
        if not skip:
            raise
        logger.warning("skipped: %s", error)
        return False
    return True


def _unpack(name: str, raw: bytes, file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents in a file: one, or those in an archive; damage is a `BadTextError`."""
    try:
        if file.name.endswith(".zip"):
            with zipfile.ZipFile(io.BytesIO(raw)) as packed:
                check_zip(packed, len(raw))
                for inner in sorted(inner for inner in packed.namelist() if not inner.endswith("/")):
                    yield f"{name}/{inner}", packed.read(inner)
            return
        named = file.name.endswith(_ARCHIVES)
        content = unpack_any(raw) if named else unpack(file, raw)
        if not named and content[TAR_MARK] != b"ustar":
            yield name, content
            return
        with tarfile.open(fileobj=TarBytes(content), mode="r:", errors="backslashreplace") as archive:
            members = [member for member in archive if member.isfile()]
            if sum(member.size for member in members) > most(len(raw)):  # a sparse file has more than the archive
                raise too_much(len(raw))
            for member in sorted(members, key=lambda member: member.name):
                stream = archive.extractfile(member)
                yield f"{name}/{member.name}", stream.read() if stream else b""
    except _DAMAGE as error:
        raise BadTextError(f"{file} is damaged and does not unpack: {error}") from error


def _add(total: Any, name: str, content: bytes) -> None:
    encoded = name.encode()
    total.update(len(encoded).to_bytes(8, "little") + encoded + content)


def hold_out(keys: Sequence[bytes], fraction: float, seed: int = 0) -> list[bool]:
    """Return whether to hold out each document: SHA-256 of seed and key, as a number in [0, 1), is below `fraction`.

    At least one document is on each side: where the hashes say otherwise, the one with the least (or the greatest)
    changes sides. Raises `ValueError` for fewer than two documents.
    """
    if len(keys) < 2:
        raise ValueError(f"a split by document needs at least two documents, got {len(keys)}")
    prefix = f"{seed} ".encode()
    numbers = [int.from_bytes(hashlib.sha256(prefix + key).digest()[:8], "big") for key in keys]
    held_out = [number < fraction * 2**64 for number in numbers]
    if not any(held_out):
        held_out[numbers.index(min(numbers))] = True
    if all(held_out):
        held_out[numbers.index(max(numbers))] = False
    return held_out


def cut(text: bytes, fraction: float) -> int:
    """Return where to cut a single document: its last `fraction` is held out, from a character's first byte on.

    Raises `ValueError` where one of the two parts would be empty.
    """
    place = int(len(text) * (1 - fraction))
    while place < len(text) and text[place] & 0xC0 == 0x80:  # inside a character
        place += 1
    if not 0 < place < len(text):
        raise ValueError(f"a document of {len(text)} bytes is too short to hold out {fraction} of it")
    return place
