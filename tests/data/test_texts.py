"""A file is text or a table, as its name and bytes say; the rest is refused with a remedy."""

import codecs
import csv
import io
import json
import logging
import re
import zipfile

import pytest

from subquad.data import DataConfig, prepare
from subquad.data.sources import open_source
from subquad.data.texts import BadTextError, check_text
from tests.data.pictures import PACK

ROWS = ["the first page", 'a "quoted",\nlong é\u2028 page', "", "the last page"]
TEXTS = [text for text in ROWS if text]
JSON_LINES = "".join(json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(ROWS))


def as_csv(header, *rows):
    out = io.StringIO(newline="")
    csv.writer(out).writerows([header, *rows])
    return out.getvalue()


CSV = as_csv(["id", "text"], *enumerate(ROWS))
TABLES = {"pages.jsonl": JSON_LINES, "pages.ndjson": f"\n{JSON_LINES}", "PAGES.CSV": CSV, "pages.csv": CSV + "\r\n"}


def read(path, **options):
    return [(d.name, d.text.decode()) for d in open_source(str(path), **options).documents()]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", TABLES)
def test_each_row_of_a_table_is_a_document(name, suffix, tmp_path):
    file = tmp_path / f"{name}{suffix}"
    file.write_bytes(PACK[suffix](TABLES[name].encode()))
    assert read(file) == [(file.name, text) for text in TEXTS]
    assert [d.key for d in open_source(str(file)).documents()] == [text.encode() for text in TEXTS], "as of hf: rows"


def test_a_folder_is_read_file_by_file_each_by_its_ending(tmp_path):
    (tmp_path / "a.json").write_text(JSON_LINES)
    (tmp_path / "b.py").write_text('{"text": "source"}\n')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "pages.csv.gz").write_bytes(PACK[".gz"](CSV.encode()))
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as packed:
        packed.writestr("pages.jsonl", JSON_LINES)
    expected = [("a.json", JSON_LINES), ("b.py", '{"text": "source"}\n')]
    expected += [(name, text) for name in ("c/pages.csv.gz", "d.zip/pages.jsonl") for text in TEXTS]
    assert read(tmp_path) == expected
    corpus = prepare(DataConfig(path=str(tmp_path), tokenizer="bytes", held_out=0.5, cache=str(tmp_path / ".cache")))
    assert corpus.files == ("a.json", "b.py", "c/pages.csv.gz", "d.zip/pages.jsonl"), "each file is named once"
    assert sorted(corpus.hashes) == ["a.json", "b.py", "c/pages.csv.gz", "d.zip"]


def test_a_book_is_a_field_and_the_limit_of_others_stays(tmp_path):
    book, others = "word " * 50_000, csv.field_size_limit(12_345)
    (tmp_path / "books.csv").write_text(as_csv(["text"], [book]))
    assert read(tmp_path / "books.csv") == [("books.csv", book)]
    assert csv.field_size_limit(others) == 12_345


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", '{"body": "x"}', r"line 1, has no column 'text', only body; .* as hf:{folder}:::COLUMN, .* to \.txt"),
    ("a.jsonl", '{"text": "x"}\n\n{"text": 3}', "line 3, must have a string as 'text', got int"),
    ("a.jsonl", '["text"]', "line 1, must hold an object with 'text', got list"),
    ("a.jsonl", '{"text": "x"}\n{"text": "cut', "line 2, is not JSON: "),
    ("a.jsonl", '{"text": "\\ud800"}', "line 1, spells half a surrogate pair"),
    ("a.jsonl", '{"text": "x\\u0000"}', "row 0 is not text: it has a NUL at byte 1"),
    ("a.jsonl", b"caf\xe9 au lait", "is not text: byte 3 is 0xe9"),
    ("a.csv", "id;text\n1;x\n", r"has no column 'text', only id;text; .* as hf:{folder}:::COLUMN"),
    ("a.csv", "\n", "has no column 'text', only none"),
    ("a.csv", "id,text\n1,one, two\n", "line 2, has 3 fields, but the first line has 2"),
    ("a.csv", 'text\n"one" two\n', "line 2, is not CSV: ',' expected after '\"'"),
    ("a.parquet", b"PAR1\0\0", r"is a parquet table: give its folder as hf:{folder} \(.* -m pip install 'subquad"),
    ("a.jsonl.zst", b"(\xb5/\xfd", "is packed by zstd, which is not read: unpack it with zstd -d"),
])  # fmt: skip
def test_what_is_no_readable_table_is_refused_with_what_to_do(name, content, message, tmp_path, caplog):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(BadTextError, match=rf"{re.escape(name)}.*{message.format(folder=re.escape(str(tmp_path)))}"):
        read(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, skip_bad_files=True) == [("b.txt", "fine")], "a damaged table is skipped as a whole"
    assert [record.message.partition("a.")[0] for record in caplog.records] == [f"skipped: {tmp_path}/"]


def test_a_parquet_folder_is_read_in_the_form_that_its_error_names(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "pages").mkdir()
    datasets.Dataset.from_dict({"text": ROWS}).to_parquet(tmp_path / "pages" / "a.parquet")
    with pytest.raises(BadTextError, match="is a parquet table") as error:
        read(tmp_path / "pages")
    asked = re.search(r"hf:\S+", str(error.value))[0]
    assert read(asked) == [("", text) for text in TEXTS]


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = codecs.BOM_UTF8
    (tmp_path / "a.txt").write_bytes(mark + "the text, \ufeff inside".encode())
    (tmp_path / "b.csv").write_bytes(mark + CSV.encode())  # as Excel writes it, before the first column's name
    (tmp_path / "c.jsonl.xz").write_bytes(PACK[".xz"](mark + JSON_LINES.encode()))
    (tmp_path / "d.txt").write_bytes(mark)
    tables = [(name, text) for name in ("b.csv", "c.jsonl.xz") for text in TEXTS]
    assert read(tmp_path) == [("a.txt", "the text, \ufeff inside"), *tables]


GERMAN = "Größe, Mühe und Fuß: «schön» sagt der Bär.\n" * 3


@pytest.mark.parametrize(("content", "encoding"), [
    (GERMAN.encode("utf-16"), "UTF-16"),
    (codecs.BOM_UTF16_BE + "漢字".encode("utf-16-be"), "UTF-16"),
    (GERMAN.encode("utf-16-le"), "UTF-16LE"),
    (GERMAN.encode("utf-16-be"), "UTF-16BE"),
    (GERMAN.encode("utf-32"), "UTF-32"),
    (GERMAN.encode("latin-1"), "CP1252"),
    ("“quoted” – and more\n".encode("cp1252"), "CP1252"),
])  # fmt: skip
def test_another_encoding_is_named_with_the_command_that_converts_it(content, encoding, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    known = "Latin-1 or Windows-1252" if encoding == "CP1252" else encoding
    told = rf"a\.txt is not text: .*; it seems to be {known}: convert it with iconv -f {encoding} -t UTF-8$"
    with pytest.raises(BadTextError, match=told):
        read(tmp_path)
    assert content.decode(encoding).rstrip() in (GERMAN.rstrip(), "漢字", "“quoted” – and more"), "the guess is right"


@pytest.mark.parametrize("content", [
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    b"plain text and a late NUL\0",
    GERMAN.encode()[:-40] + b"\xff" + GERMAN.encode()[-40:],  # damaged UTF-8
    b"plain text, cut in a picture: " + "🎉".encode()[:3],
    ("слово за слово\n" * 9).encode("koi8-r"),
])  # fmt: skip
def test_no_encoding_is_guessed_for_other_bytes(content):
    with pytest.raises(BadTextError, match="is not text: ") as error:
        check_text(content, "a.bin")
    assert "iconv" not in str(error.value)
