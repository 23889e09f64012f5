"""Check that bytes are UTF-8 text, and read the rows of JSON lines and CSV; errors name a remedy."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from subquad.data.packed import PACKED
from subquad.parsing import parse_json
from subquad.program import install

COLUMN = "text"
"""The column of a table that holds its documents."""
COLUMNS = 20
"""Most columns that an error lists."""
LONGEST_FIELD = 2**31 - 1
"""Most characters of a CSV field; the csv module's own limit is 131,072, fewer than a book has."""
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",  # the first begins like UTF-16's
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
_ASCII = bytes(range(128))
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r"})


class BadTextError(ValueError):
    """A file is not UTF-8 text or not the table that its name promises; the message names the file and the place."""


def check_text(text: bytes, name: str) -> None:
    """Raise `BadTextError`, with the offset and a guessed encoding, at the first NUL or byte that is not UTF-8."""
    if (offset := text.find(b"\0")) >= 0:
        raise BadTextError(f"{name} is not text: it has a NUL at byte {offset}{_remedy(text)}")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadTextError(
            f"{name} is not text: byte {error.start} is 0x{text[error.start]:02x}, which is not valid UTF-8"
            f"{_remedy(text)}"
        ) from error


def _remedy(text: bytes) -> str:
    """Return the end of an error: the encoding that `text` seems to have and how to convert it, or nothing."""
    guessed = _encoding(text)
    shown = guessed.replace("CP1252", "Latin-1 or Windows-1252")
    return f"; it seems to be {shown}: convert it with iconv -f {guessed} -t UTF-8" if guessed else ""


def _encoding(text: bytes) -> str:
    """Guess the encoding of bytes that are not UTF-8, by iconv's name; an empty string if nothing fits."""
    for mark, encoding in _MARKS.items():
        if text.startswith(mark):
            return encoding
    some = text[:4096]
    even, odd = (some[start::2].count(0) for start in (0, 1))
    if max(even, odd) * 4 > len(some):  # in UTF-16 every second byte of a Latin letter is zero
        return "UTF-16LE" if not even else "UTF-16BE" if not odd else ""
    high = len(text.translate(None, _ASCII))
    plain = len(text.translate(None, _CONTROLS)) == len(text)
    # UTF-8 that was damaged or cut has whole or long sequences; other alphabets use high bytes for most letters.
    damaged = not text.decode("utf-8", "ignore").isascii() or (high > 1 and text[:-high].isascii())
    return "CP1252" if plain and not damaged and high * 4 < len(text) else ""


def rows_of(name: str, content: bytes, where: str, folder: Path) -> list[bytes] | None:
    """Return the texts of a table's rows, empty ones too, or None if `name`, packed or not, doesn't end as a table's.

    `where` names the file in errors, `folder` is the folder that holds it. Raises `BadTextError` for content that is
    not UTF-8, a damaged row, a table without the column `text`, and a kind of file that needs another reader.
    """
    ending = Path(name.lower())
    ending = ending.with_suffix("") if ending.suffix in PACKED else ending
    other = f"hf:{folder.absolute()}"
    if ending.suffix == ".parquet":
        how = install("subquad[datasets]")
        raise BadTextError(f"{where} is a parquet table: give its folder as {other} ({how})")
    if ending.suffix == ".zst":
        raise BadTextError(f"{where} is packed by zstd, which is not read: unpack it with zstd -d")
    if ending.suffix not in _READERS:
        return None
    check_text(content, where)
    try:
        return list(_READERS[ending.suffix](content, where, other))
    except ValueError as error:
        raise BadTextError(str(error)) from error


def _json_lines(content: bytes, where: str, other: str) -> Iterator[bytes]:
    for number, line in enumerate(io.BytesIO(content), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number},"
        row = parse_json(line.decode(), place)
        if not isinstance(row, dict):
            raise ValueError(f"{place} must hold an object with {COLUMN!r}, got {type(row).__name__}")
        _check_column(row, place, other)
        text = row[COLUMN]
        if not isinstance(text, str | None):
            raise ValueError(f"{place} must have a string as {COLUMN!r}, got {type(text).__name__}")
        yield (text or "").encode()


def _csv(content: bytes, where: str, other: str) -> Iterator[bytes]:
    rows = csv.reader(io.TextIOWrapper(io.BytesIO(content), "utf-8", newline=""), strict=True)
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        header = next(rows, [])
        _check_column(header, where, other)
        for row in rows:
            if row and len(row) != len(header):
                raise ValueError(
                    f"{where}, line {rows.line_num}, has {len(row)} fields, but the first line has {len(header)}"
                )
            yield row[header.index(COLUMN)].encode() if row else b""
    except csv.Error as error:
        raise ValueError(f"{where}, line {rows.line_num}, is not CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


def _check_column(columns: Collection[str], where: str, other: str) -> None:
    if COLUMN not in columns:
        raise ValueError(
            f"{where} has no column {COLUMN!r}, only {', '.join(list(columns)[:COLUMNS]) or 'none'}; to read another "
            f"column give the folder as {other}:::COLUMN, to read the file as it is rename it to .txt"
        )


_READERS: dict[str, Callable[[bytes, str, str], Iterator[bytes]]] = {
    ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv
}  # fmt: skip
