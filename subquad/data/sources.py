"""Read documents from files, folders, globs, archives, Python's own source and Hugging Face datasets.

A document is UTF-8 text, kept as the bytes that were read but for a byte-order mark at the beginning. Its file's name
is relative to the path asked for, with `/` between the parts, so that it is the same on every machine.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import logging
import os
import sysconfig
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from subquad.config import suggest
from subquad.data.files import check_path
from subquad.data.packed import BAD_ZIP, DAMAGE, check_zip, most, too_much, unpack, unpack_any
from subquad.data.texts import BadTextError, check_text, rows_of
from subquad.extras import needed

logger = logging.getLogger(__name__)

READING_VERSION = 2
"""Changes whenever the same files give other documents, so that prepared data is made again."""
STDLIB_LEAVES_OUT = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})
_ARCHIVES = (".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tgz", ".txz")
HUB_SECONDS = 10.0
"""Longest time to wait for a first answer of the Hugging Face Hub."""
TAR_MARK = slice(257, 262)
"""Place of a tar archive's magic bytes; OpenWebText's archives are named .xz, so names are not enough."""
COMPRESSED, COMPRESSION = (".gz", ".xz", ".bz2", ".tgz", ".txz", ".zip", ".parquet"), 3
"""Endings of compressed files, and the rough number of bytes of text per compressed byte."""
_DAMAGE = (*DAMAGE, *BAD_ZIP, tarfile.TarError)


class TarBytes(io.BytesIO):
    """An archive's bytes with a limit on reads, since a header can make tarfile read in an endless loop."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.left = 4 * len(content) + (1 << 20)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as `io.BytesIO`; raise `OSError` for a damaged header's negative size and for endless reads."""
        self.left -= max(size or 0, 1)
        if size is None or size < 0 or self.left < 0:
            raise OSError("its headers lead in a circle or backwards")
        return super().read(size)


class Document(NamedTuple):
    """A text and its file's name; the split hashes `key`, the name or, for rows of a table or dataset, the text."""

    name: str
    text: bytes
    key: bytes


class Source(Protocol):
    """Documents in a fixed order, read from the path `asked`.

    `names` lists its files, if it has any; `hashes` holds the SHA-256 of each by name, once `fingerprint` was called.
    """

    asked: str
    names: list[str]
    hashes: dict[str, str]

    def fingerprint(self) -> str:
        """Return a hash of all names and contents."""
        ...

    def size(self) -> int:
        """Return roughly the bytes of text, without reading them."""
        ...

    def documents(self) -> Iterator[Document]:
        """Yield the documents; raise `BadTextError` at the first that is not text."""
        ...


def open_source(path: str, *, skip_bad_files: bool = False) -> Source:
    """Open the source at `path`, in any form that `DataConfig.path` takes.

    Raises `FileNotFoundError` for a missing path or a glob without a match, `ImportError` for a dataset without the
    extra `datasets`.
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
    root = Path(os.path.commonpath([file.parent for file in files]))
    return FileSource(path, root, _once(files, root), skip_bad_files)


def text_size(path: str) -> int:
    """Return roughly the bytes of the text at `path`, or of a folder of token shards, without reading it."""
    return open_source(path, skip_bad_files=True).size()


def check_source(path: str) -> None:
    """Raise `FileNotFoundError` if `path` is missing; globs are not checked."""
    if not glob.has_magic(path):
        check_path(path, "stdlib", "hf:NAME")


def no_text(asked: str) -> str:
    """Return the message of an error for sources without a document, named by `asked`."""
    return (
        f"no text found in {asked}: nothing is there, or only empty, hidden and skipped files; "
        "give a file, a folder or an archive of text"
    )


def _files_below(root: Path) -> list[Path]:
    """Return all files below `root` that are not hidden, sorted; links to folders are followed, each folder once."""
    found: list[Path] = []
    seen: set[str] = set()
    waiting = [root]
    for top in waiting:  # links come last, so that a folder's own name precedes those of its links
        for folder, folders, files in os.walk(top):
            here = os.path.realpath(folder)
            folders[:] = [] if here in seen else sorted(name for name in folders if not name.startswith("."))
            waiting += [link for name in folders if (link := Path(folder, name)).is_symlink()]
            found += [] if here in seen else [Path(folder, name) for name in files if not name.startswith(".")]
            seen.add(here)
    return _once(found, root)


def _once(files: Iterable[Path], root: Path) -> list[Path]:
    """Return the files sorted by their names below `root`, each once, though links may lead to it again."""
    names = {file: file.relative_to(root).as_posix() for file in files}
    top, found = os.path.realpath(root), dict[str, Path]()
    for file, name in names.items():
        real = os.path.realpath(file)
        if real not in found or real == os.path.join(top, name):
            found[real] = file
    return sorted(found.values(), key=names.__getitem__)


def _stdlib_files(root: Path) -> list[Path]:
    """List the modules of the standard library, without tests and files generated by Python's build."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_LEAVES_OUT and not name.startswith("config-")]
        found += [Path(folder, n) for n in files if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


class FileSource:
    """Files, each one document, or one for each row (JSON lines, CSV) or member (archives); empty ones hold none."""

    def __init__(self, asked: str, root: Path, files: list[Path], skip_bad_files: bool) -> None:
        self.asked = asked
        # File names may hold invalid UTF-8, which is escaped.
        names = (os.fsencode(file.relative_to(root).as_posix()).decode("utf-8", "backslashreplace") for file in files)
        self.files = dict(zip((unicodedata.normalize("NFC", name) for name in names), files, strict=True))
        self.names = list(self.files)
        self.hashes: dict[str, str] = {}
        self.skip_bad_files = skip_bad_files

    def fingerprint(self) -> str:
        """Return a SHA-256 of all names and contents."""
        total = hashlib.sha256()
        for name, file in self.files.items():
            if file.exists() and not file.is_file():  # reading a pipe would block
                raise BadTextError(f"{file} is not a regular file but a pipe, a socket or a device")
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256")
            _add(total, name, content.digest())
            self.hashes[name] = content.hexdigest()
        return total.hexdigest()

    def size(self) -> int:
        """Return the sum of the files' sizes, of which compressed ones count `COMPRESSION` times."""
        sizes = ((name, file.stat().st_size) for name, file in self.files.items())
        return sum(size * (COMPRESSION if name.endswith(COMPRESSED) else 1) for name, size in sizes)

    def documents(self) -> Iterator[Document]:
        """Yield each file's documents, in order of their names.

        Raises `BadTextError` for a file that is not text, and for a single file that is empty; with `skip_bad_files`
        it warns instead.
        """
        for name, file in self.files.items():
            try:
                raw = file.read_bytes()
                if not raw and len(self.files) == 1:
                    raise BadTextError(f"{file} is empty: there is no text to read")
                for inner, content in _unpack(name, raw, file):
                    shown = str(file) if inner == name else f"{file}: {inner}"
                    text = content.removeprefix(codecs.BOM_UTF8)
                    if not text:
                        logger.info("%s is empty and holds no document", shown)
                    elif (rows := rows_of(inner, text, shown, file.parent)) is not None:
                        yield from _row_documents(inner, rows, shown, self.skip_bad_files)
                    elif _is_text(text, shown, self.skip_bad_files):
                        yield Document(inner, text, inner.encode())
            except BadTextError as error:
                if not self.skip_bad_files:
                    raise
                logger.warning("skipped: %s", error)


class DatasetSource:
    """Rows of a Hugging Face dataset, each one document; rows without text hold none."""

    def __init__(self, asked: str, skip_bad_files: bool = False) -> None:
        name, *rest = asked.removeprefix("hf:").split(":")
        if not name or len(rest) > 3:
            raise ValueError(f"a dataset is hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], got {asked!r}")
        config, split, column = [*rest, "", "", ""][:3]
        self.asked = asked
        self.names: list[str] = []
        self.hashes: dict[str, str] = {}
        self.skip_bad_files = skip_bad_files
        self.rows = hub_dataset(asked, name, config or None, split=split or "train")
        self.column = column or "text"
        if self.column not in self.rows.column_names:
            choices = suggest(self.column, self.rows.column_names)
            raise ValueError(f"{asked!r} has no column {self.column!r}; {choices}")

    def fingerprint(self) -> str:
        """Return a SHA-256 of all rows."""
        total = hashlib.sha256()
        for text in self.rows[self.column]:
            _add(total, "", hashlib.sha256((text or "").encode()).digest())
        return total.hexdigest()

    def size(self) -> int:
        """Return the number of rows times the mean bytes of the first thousand."""
        first = self.rows[:1000][self.column]
        return len(self.rows) * sum(len((text or "").encode()) for text in first) // max(1, len(first))

    def documents(self) -> Iterator[Document]:
        """Yield the rows with text; raise `BadTextError`, or warn with `skip_bad_files`, at a row with a NUL."""
        texts = ((row or "").encode() for row in self.rows[self.column])
        yield from _row_documents("", texts, self.asked, self.skip_bad_files)


def hub_dataset(asked: str, *arguments: Any, **options: Any) -> Any:
    """Return `datasets.load_dataset(*arguments, **options)`.

    Raises `ImportError` for `asked` without `datasets`, and `ConnectionError` if the Hub can't be reached.
    """
    with needed(repr(asked)):
        import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:  # `load_dataset` would try again for half a minute
        HfApi().repo_info(arguments[0], repo_type="dataset", timeout=HUB_SECONDS)
    except (HfHubHTTPError, OfflineModeIsEnabled, ValueError) as error:
        logger.debug("load_dataset words it: %s", error)
    except Exception as error:  # the errors depend on the version of the client
        raise ConnectionError(
            f"{asked!r} is on the Hugging Face Hub, which can't be reached ({error}); HF_HUB_OFFLINE=1 takes the copy "
            "of an earlier download"
        ) from error
    return datasets.load_dataset(*arguments, **options)


def _row_documents(name: str, texts: Iterable[bytes], where: str, skip: bool) -> Iterator[Document]:
    """Yield the rows with text; they are known by their text, so that equal ones are held out together."""
    for number, text in enumerate(texts):
        if text and _is_text(text, f"{where}, row {number}", skip):
            yield Document(name, text, text)


def _is_text(text: bytes, name: str, skip: bool) -> bool:
    """Return whether `text` passes `check_text`; if it does not, warn with `skip`, else raise."""
    try:
        check_text(text, name)
    except BadTextError as error:
        if not skip:
            raise
        logger.warning("skipped: %s", error)
        return False
    return True


def _unpack(name: str, raw: bytes, file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of a file, or of each member of an archive; raise `BadTextError` for damage."""
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
            if sum(member.size for member in members) > most(len(raw)):  # sparse members can exceed the archive
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

    If that leaves one part empty, the document with the smallest (or largest) hash changes sides. Raises `ValueError`
    for fewer than two documents.
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
    """Return where to split off the last `fraction`, rounded up to a character; `ValueError` for an empty part."""
    place = int(len(text) * (1 - fraction))
    while place < len(text) and text[place] & 0xC0 == 0x80:  # inside a character
        place += 1
    if not 0 < place < len(text):
        raise ValueError(f"a document of {len(text)} bytes is too short to hold out {fraction} of it")
    return place
