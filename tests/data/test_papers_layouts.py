"""The papers' own data sets load in their public layouts, and the recipes have the papers' sizes."""

import io
import lzma
import tarfile
import zipfile

import pytest

from subquad.config import read_mapping
from subquad.data import DataConfig, prepare
from subquad.data.sources import cut, open_source
from subquad.recipes import recipe_path
from subquad.training import TrainConfig

ARTICLE = " \n = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . \n \n"


def documents(path):
    return [(document.name, document.text.decode()) for document in open_source(str(path)).documents()]


def corpus(path, held_out_path=None, **options):
    """A corpus of bytes, and its training and held-out text."""
    held = None if held_out_path is None else str(held_out_path)
    cache = str(path.parent / "cache")
    made = prepare(DataConfig(path=str(path), held_out_path=held, tokenizer="bytes", cache=cache, **options))
    return made, *(made.tokenizer.decode(shard.tokens.tolist()) for shard in (made.train, made.held_out))


def test_wikitext_is_a_file_for_each_split(tmp_path):
    (tmp_path / "wikitext-103").mkdir()
    train, test = (tmp_path / "wikitext-103" / f"wiki.{split}.raw" for split in ("train", "test"))
    train.write_text(ARTICLE * 20, encoding="utf-8")
    test.write_text(ARTICLE, encoding="utf-8")
    made, *texts = corpus(train, test)
    assert texts == [ARTICLE * 20, ARTICLE]
    assert made.held_out.words == len(ARTICLE.split())


def test_pg19_is_a_folder_of_numbered_books_for_each_split(tmp_path):
    for book in ("train/10", "train/9", "validation/11", "test/1023"):
        (tmp_path / "pg19" / book).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pg19" / f"{book}.txt").write_text(f"Book {book}.\n" * 60)
    made, train, held_out = corpus(tmp_path / "pg19/train", tmp_path / "pg19/test")
    assert made.train_files == ("10.txt", "9.txt")
    assert train.count("Book train/9.") == train.count("Book train/10.") == 60
    assert held_out == "Book test/1023.\n" * 60


def test_openwebtext_is_archives_named_xz_of_tar_archives(tmp_path):
    for number in range(2):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for page in range(3):
                member, content = (
                    tarfile.TarInfo(f"{number:07}-{page:032x}.txt"),
                    f"Page {page} of {number}.\n".encode(),
                )
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        (tmp_path / f"urlsf_subset{number:02}-1_data.xz").write_bytes(lzma.compress(stream.getvalue()))
    found = documents(tmp_path)
    assert [text for _, text in found] == [f"Page {page} of {number}.\n" for number in range(2) for page in range(3)]
    assert found[0][0].startswith("urlsf_subset00-1_data.xz/0000000-")


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


WIKITEXT = [("Salesforce/wikitext", "wikitext-103-raw-v1", split) for split in ("train", "test")]
RECIPES = {
    "wikitext103-llp": ((12, 6, 768, 2048), WIKITEXT),
    "wikitext103-perceiver-ar": ((6, 6, 768, 2048), WIKITEXT),
    "pg19-llp": ((24, 6, 768, 2048), [("emozilla/pg19", None, "train"), ("emozilla/pg19", None, "test")]),
    "openwebtext-latte": ((12, 12, 516, 1024), [("Skylion007/openwebtext", None, "train")]),
    "enwik8-latte": ((12, 12, 516, 2000), []),
}
"""Layers, heads, width and window in the papers' tables, and what a recipe loads from the hub."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_papers_sizes_and_asks_the_hub_for_its_splits(hub, name):
    hub.rows = [{"title": "x", "text": text} for text in ("", " = Title = \n", "Some text.\n")]
    values, (sizes, asked) = read_mapping(recipe_path(name)), RECIPES[name]
    model, data = values["model"], TrainConfig.from_file(recipe_path(name)).data
    assert (model["num_layers"], model["num_heads"], model["dim"], values["batch"]["length"]) == sizes
    if name.endswith("latte"):
        assert model["options"]["latte"]["num_latents"] == model["dim"]
        assert (values["optimizer"]["lr"], values["schedule"]["warmup"]) == (6e-4, 2000)
        assert (values["run"]["steps"], values["batch"]["size"]) == (60_000, 8)
    for path in (data.path, data.held_out_path)[: len(asked)]:
        assert documents(path) == [("row 1", " = Title = \n"), ("row 2", "Some text.\n")]
    assert hub.asked == asked
