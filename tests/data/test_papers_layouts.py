"""The papers' own data sets, in the layouts that they are public in: small copies load as the recipes read them."""

import io
import lzma
import sys
import tarfile
import types
import zipfile

import pytest

from subquad.config import read_mapping
from subquad.data.sources import cut, open_source
from subquad.recipes import recipe_path
from subquad.training import TrainConfig

ARTICLE = " \n = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . \n \n"
LANGUAGE = ("wikitext103-llp", "wikitext103-perceiver-ar", "pg19-llp", "openwebtext-latte", "enwik8-latte")


def documents(path):
    return [(document.name, document.text.decode()) for document in open_source(str(path)).documents()]


def corpus(path, held_out_path=None, **options):
    """A corpus of bytes, and its training and held-out text."""
    from subquad.data import DataConfig, prepare

    cache = str(path.parent / "cache")
    held = None if held_out_path is None else str(held_out_path)
    made = prepare(DataConfig(path=str(path), held_out_path=held, tokenizer="bytes", cache=cache, **options))
    return made, *(made.tokenizer.decode(shard.tokens.tolist()) for shard in (made.train, made.held_out))


@pytest.mark.parametrize("kind", ["raw", "tokens"])
def test_wikitext_is_a_file_for_each_split(tmp_path, kind):
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"wiki.{split}.{kind}").write_text(ARTICLE * 20 + split, encoding="utf-8")
    made, train, held_out = corpus(folder / f"wiki.train.{kind}", folder / f"wiki.test.{kind}")
    assert (train, held_out) == (ARTICLE * 20 + "train", ARTICLE * 20 + "test")
    assert made.held_out.words == len((ARTICLE * 20 + "test").split())


def test_pg19_is_a_folder_of_numbered_books_for_each_split(tmp_path):
    for split, numbers in (("train", (10, 9)), ("validation", (11,)), ("test", (1023,))):
        (tmp_path / "pg19" / split).mkdir(parents=True)
        for number in numbers:
            (tmp_path / "pg19" / split / f"{number}.txt").write_text(f"Book {number}.\n" * 60)
    assert [name for name, _ in documents(tmp_path / "pg19/train")] == ["10.txt", "9.txt"]
    _, train, held_out = corpus(tmp_path / "pg19/train", tmp_path / "pg19/test")
    assert train.count("Book 9.") == train.count("Book 10.") == 60
    assert held_out == "Book 1023.\n" * 60


def tar(**files):
    """A tar archive of these files, as bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture
def openwebtext(tmp_path):
    """The release, unpacked once: archives of pages that are named .xz and not .tar.xz."""
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    for number in range(2):
        pages = {f"{number:07}-{page:032x}.txt": f"Page {page} of {number}.\n".encode() for page in range(3)}
        (folder / f"urlsf_subset{number:02}-1_data.xz").write_bytes(lzma.compress(tar(**pages)))
    return folder


def test_openwebtext_loads_as_it_is_released(openwebtext):
    found = documents(openwebtext)
    assert [text for _, text in found] == [f"Page {page} of {number}.\n" for number in range(2) for page in range(3)]
    assert found[0][0].startswith("urlsf_subset00-1_data.xz/0000000-")


def test_openwebtext_loads_unpacked(tmp_path):
    for number in range(2):
        folder = tmp_path / "openwebtext" / f"urlsf_subset{number:02}-1_data"
        folder.mkdir(parents=True)
        (folder / "0000001-abc.txt").write_text(f"Page {number}.\n")
    assert [text for _, text in documents(tmp_path / "openwebtext")] == ["Page 0.\n", "Page 1.\n"]


def test_enwik8_is_one_file_whose_end_is_held_out(tmp_path):
    pages = "".join(f"<page>\n<title>Ærø {number}</title>\n</page>\n" for number in range(200))
    text = '<mediawiki xml:lang="en">\n' + pages
    (tmp_path / "enwik8").write_text(text, encoding="utf-8")
    made, train, held_out = corpus(tmp_path / "enwik8", held_out=0.05)
    assert train + held_out == text
    assert made.held_out.text_bytes == len(text.encode()) - cut(text.encode(), 0.05)
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(tmp_path / "enwik8", "enwik8")
    assert documents(tmp_path / "enwik8.zip") == [("enwik8.zip/enwik8", text)]


class Rows(list):
    """The rows of a data set of the hub."""

    column_names = ("short_book_title", "publication_date", "url", "text")

    def __getitem__(self, column):
        return [row[column] for row in self]


@pytest.mark.parametrize("name", [name for name in LANGUAGE if name != "enwik8-latte"])
def test_a_recipe_asks_the_hub_for_its_splits(monkeypatch, name):
    calls, module = [], types.ModuleType("datasets")

    def load_dataset(*args, **kwargs):
        calls.append((*args, kwargs["split"]))
        return Rows({"text": text} for text in ("", " = Title = \n", "Some text.\n"))

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    data = TrainConfig.from_file(recipe_path(name)).data
    assert documents(data.path) == [("row 1", " = Title = \n"), ("row 2", "Some text.\n")]
    if data.held_out_path is not None:
        assert len(documents(data.held_out_path)) == 2
    wikitext = [("Salesforce/wikitext", "wikitext-103-raw-v1", split) for split in ("train", "test")]
    assert (
        calls
        == {
            "wikitext103-llp": wikitext,
            "wikitext103-perceiver-ar": wikitext,
            "pg19-llp": [("emozilla/pg19", None, "train"), ("emozilla/pg19", None, "test")],
            "openwebtext-latte": [("Skylion007/openwebtext", None, "train")],
        }[name]
    )


PAPER = {
    "wikitext103-llp": (12, 6, 768, 2048),
    "wikitext103-perceiver-ar": (6, 6, 768, 2048),
    "pg19-llp": (24, 6, 768, 2048),
    "openwebtext-latte": (12, 12, 516, 1024),
    "enwik8-latte": (12, 12, 516, 2000),
}
"""Layers, heads, width and window, as the papers' tables have them."""


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_recipe_has_its_papers_sizes(name):
    values = read_mapping(recipe_path(name))
    model = values["model"]
    sizes = (model["num_layers"], model["num_heads"], model["dim"], values["batch"]["length"])
    assert sizes == PAPER[name]
    if name.endswith("latte"):
        assert model["options"]["latte"]["num_latents"] == model["dim"]
        assert (values["optimizer"]["lr"], values["schedule"]["warmup"]) == (6e-4, 2000)
        assert (values["run"]["steps"], values["batch"]["size"]) == (60_000, 8)
