"""Data sets that are read: every layout, cutting, choosing, and errors that name the file and the line."""

import lzma
import shutil

import numpy as np
import pytest
from PIL import Image

from subquad.data.config import LabelledConfig
from subquad.data.labelled import labelled_corpus
from subquad.data.lra.read_images import grey
from subquad.data.lra.store import choose, pieces
from tests.data.lra.layouts import DATASETS, HOME, expressions, papers, pathfinder, pictures, put, release, reviews

PARTS = ("train", "held_out", "test")
META, IMAGE = f"{HOME}/metadata/0.npy", f"{HOME}/imgs/0/sample_3.png"


@pytest.fixture
def read(tmp_path):
    def read(dataset, path, length=50, **changes):
        config = LabelledConfig(dataset=dataset, path=str(path), cache=str(tmp_path / "cache"), **changes)
        return labelled_corpus(config, length)

    return read


def texts(part) -> list[str]:
    return sorted(part.sequence(i).tobytes().decode() for i in range(len(part)))


def sizes(corpus) -> list[int]:
    return [len(getattr(corpus, part)) for part in PARTS]


def test_reviews_in_folders_and_in_tables_are_the_same(tmp_path, read):
    folders = read("text", reviews(tmp_path / "txt"))
    for side in ("train", "test"):
        files = sorted((tmp_path / "txt" / side).glob("*/*.txt"))
        rows = [f"{int(f.parent.name == 'pos')}\t3\t7\t{f.read_text('utf-8')}\n" for f in files]
        put(tmp_path / "tsv", f"imdb_{side}.tsv.xz", lzma.compress("".join(rows).encode()))
    table = read("text", tmp_path / "tsv")
    assert folders.classes == table.classes == ("negative", "positive")
    assert folders.vocab_size == 256
    for part in PARTS:
        assert texts(getattr(folders, part)) == texts(getattr(table, part))
    assert sum(sizes(folders)[:2]) == 30
    assert len(folders.held_out) >= 1
    assert not set(texts(folders.train)) & set(texts(folders.held_out))
    for i in range(len(folders.test)):
        assert folders.classes[int(folders.test[i]["labels"])][:3] in folders.test.sequence(i).tobytes().decode()


def test_long_sequences_are_cut_and_counted_or_refused(tmp_path, read, caplog):
    caplog.set_level("INFO", "subquad")  # whatever a command has set before
    corpus = read("text", reviews(tmp_path / "d"), length=20, validation="test")
    whole = read("text", tmp_path / "d", length=99, validation="test")
    assert sizes(whole) == [30, 8, 8]
    assert texts(whole.held_out) == texts(whole.test), "validation=test, as Long Range Arena does"
    assert corpus.train.cut == (whole.train.full_lengths > 20).sum() > 0
    assert f"{corpus.train.cut} of 30 sequences in the part train are truncated to 20 tokens; the lon" in caplog.text
    assert texts(corpus.train) == sorted(text.encode()[:20].decode(errors="replace") for text in texts(whole.train))
    with pytest.raises(ValueError, match=r"part train, example \d+ has \d+ tokens, more than batch.length=20: rai"):
        read("text", tmp_path / "d", length=20, too_long="refuse")
    with pytest.raises(ValueError, match="length must be at least 1 token, got length=0"):
        read("text", tmp_path / "d", length=0)


def test_fewer_examples_are_chosen_by_seed_in_their_shares(tmp_path, read):
    asked = {"validation": "test", "examples": 10, "held_out": 4}
    first, other = (read("text", path, **asked, seed=i) for i, path in enumerate([reviews(tmp_path / "d")] * 2))
    assert sizes(first) == [10, 4, 4]
    assert np.bincount(first.train.labels).tolist() == np.bincount(other.train.labels).tolist() == [6, 4]
    assert texts(first.train) != texts(other.train)
    assert first.fingerprint != other.fingerprint
    assert (np.diff(choose(np.arange(40) % 2, 10, 0)) > 0).all(), "in their order"
    for name, count, most in (("examples", 31, 30), ("held_out", 9, 8)):
        message = rf"classify.{name}={count} is too many for .*: the data set has {most} such examples, not {count}"
        with pytest.raises(ValueError, match=message):
            read("text", tmp_path / "d", **(asked | {name: count}))


def test_listops_of_the_release(tmp_path, read):
    corpus = read("listops", expressions(tmp_path / "d"))
    assert (sizes(corpus), corpus.vocab_size) == ([30, 3, 4], 15)
    assert corpus.train.sequence(25).tolist() == [11, 5, 5, 14]
    assert int(corpus.train[25]["labels"]) == 5


def test_pairs_of_the_release(tmp_path, read):
    corpus = read("retrieval", release(tmp_path / "d"), length=6)
    assert corpus.pairs
    assert corpus.classes == ("unrelated", "cited")
    item = {name: values.tolist() for name, values in corpus.train[1].items()}
    assert item == {
        "input_ids": list(b"three\0"), "attention_mask": [1, 1, 1, 1, 1, 0], "labels": 1,
        "pair_input_ids": list(b'two "2'), "pair_attention_mask": [1] * 6,
    }  # fmt: skip
    assert corpus.train.full_lengths.tolist() == [[3, 7], [5, 7]]
    assert corpus.train.cut == 2


def test_pairs_and_papers_apart_and_documents_kept_once(tmp_path, read):
    corpus = read("retrieval", papers(tmp_path / "d"), length=99)
    assert corpus.train.sequence(0, 1).tobytes() == b"paper 1 paper 1 "
    assert corpus.train.sequence(1, 0).tobytes() == b"paper 2 " * 3
    assert [int(corpus.test[i]["labels"]) for i in range(2)] == [1, 0]
    assert len(corpus.train.shard.documents) == 4  # three papers, each kept once
    for name in ("train", "eval", "test"):
        put(tmp_path / "e", f"new_aan_pairs.{name}.tsv", "1\ta\tb\tone\ttwo\n0\ta\tb\tthree\ttwo\n")
    train = read("retrieval", tmp_path / "e").train
    assert train.index.tolist() == [[0, 1], [2, 1]], "a name with another text is another document"


def test_images_of_a_folder_become_grey_as_pillows(tmp_path, read):
    corpus = read("image", pictures(tmp_path / "d", side=64), length=4096)
    assert (sizes(corpus), corpus.classes) == ([18, 2, 4], ("cat", "dog"))
    assert np.bincount(corpus.held_out.labels).tolist() == [1, 1]
    image = Image.open(tmp_path / "d/test/cat/0.png")
    assert corpus.test.sequence(0).tolist() == np.asarray(image.convert("L")).ravel().tolist()
    assert (grey(np.asarray(image)[None, ..., :1])[0] == np.asarray(image)[..., 0]).all()
    assert sizes(read("image", tmp_path / "d", length=4096, validation="test")) == [20, 4, 4]


@pytest.mark.parametrize("kind", [None, "U", "S"], ids=["text", "array", "bytes"])
def test_pathfinder_of_the_release(tmp_path, read, kind):
    home = pathfinder(tmp_path / "d", kind) / HOME
    put(home, "imgs/0/sample_3.png", b"")
    corpus = read("pathfinder32", tmp_path / "d", length=1024)
    assert sizes(corpus) == [15, 2, 2]
    assert [corpus.train.sequence(i)[0] for i in range(4)] == [0, 1, 2, 4], "the empty file is left out"
    assert corpus.train.labels[:4].tolist() == [0, 1, 0, 0]
    assert sizes(read("pathfinder32", home, length=1024)) == [15, 2, 2]


def tables(root):
    for side in ("train", "test"):
        put(root, f"x_{side}.tsv", "0\t1\t2\tgood\n")


def row(name, line):
    return lambda root: put(root, name, (root / name).read_bytes() + line)


@pytest.mark.parametrize(("make", "spoil", "message"), [
    (reviews, ("train/pos/3_7.txt", b"ab\xff"), r"3_7.txt is not text: byte 2 is 0xff"),
    (reviews, ("test/neg/0_7.txt", b""), r"0_7.txt holds no text"),
    (reviews, ("train/pos/*", None), r"class 'pos' has no example: there is no"),
    (reviews, ("test", None), r"there is no folder .*test"),
    (reviews, ("test/good/a.txt", "x"), r"a.txt has the label 'good'; valid: neg, pos"),
    (reviews, ("*/pos", None), "at least two classes are needed, got 'negative'"),
    (tables, lambda root: (root / "train").mkdir(), "has no folder for a class, such as pos"),
    (tables, row("x_train.tsv", b"1 text without a tab"), r"x_train.tsv, line 2 has no tab: it must be a label"),
    (tables, row("x_train.tsv", b"\t3\t4\ttext"), r"x_train.tsv, line 2 has no label; valid: 0"),
    (tables, ("x_test.tsv", None), r"holds neither the folders train and test nor a file \*test.tsv"),
    (tables, lambda root: root.rename(root.with_name("dd")), r"no file or folder '.*/d'; did you mean '.*/dd'"),
    (expressions, row("basic_train.tsv", b"( 3 )\t12"), r"train.tsv, line 32 has the label '12'; valid: 0, 1"),
    (expressions, row("basic_train.tsv", b"3"), r"line 32 has 1 columns between tabs, not 2: Source, Target"),
    (expressions, row("basic_train.tsv", b"[AVG\t1"), r"line 32: '\[AVG' is not a word of ListOps; valid: 0 1"),
    (expressions, row("basic_train.tsv", b"( )\t5"), r"line 32 has no expression before the tab"),
    (expressions, ("basic_train.tsv", "Source\tTarget\n1\t1"), r"no training example has the class '0', "),
    (expressions, ("basic_test.tsv", "Source\tTarget\n"), "part 'test', has no example"),
    (expressions, ("basic_val.tsv", "3\t3\n"), r"basic_val.tsv, line 1 must be 'Source<TAB>Target'"),
    (expressions, ("basic_val.tsv", None), r"there is no basic_val.tsv \(or .xz, .gz, .bz2\) in"),
    (release, ("new_aan_pairs.train.tsv", b"1\ta\tb\ta\xff\tc"), r"line 1, text 1 is not text: byte 1 i"),
    (release, ("*train*", None), r"holds neither papers.jsonl nor new_aan_pairs.train.tsv, plain or"),
    (papers, ("pairs_val.tsv", "1\tP0\tP9"), r"pairs_val.tsv, line 1: papers.jsonl has no paper 'P9'"),
    (papers, ("pairs_val.tsv", "2\tP0\tP1"), r"pairs_val.tsv, line 1 has the label '2'; valid: 0, 1"),
    (papers, ("papers.jsonl", '{"id": "P0"}'), r"line 1 is not JSON with an id and a text: KeyError"),
    (papers, ("papers.jsonl", '{"id": "P0", "text": "a"}\n' * 2), r"line 2: the paper 'P0' occurs for "),
    (papers, ("papers.jsonl", b'{"id": "P0", "text": "\xff"}'), r"line 1 is not UTF-8 text: byte 22 i"),
    (papers, ("papers.jsonl.xz", b"x"), r"papers.jsonl.xz is damaged and does not unpack"),
    (pictures, ("train/*/[3-9].png", None), "6 training images are too few to hold out a tenth"),
    (pathfinder, ("**/sample_3.png", None), r"0.npy, line 4 names .*sample_3.png, which does not exist"),
    (pathfinder, (IMAGE, b"GIF"), r"sample_3.png is damaged or not an image"),
    (pathfinder, lambda root: Image.new("L", (16, 32)).save(root / IMAGE), "16 x 32 pixels, not 32 x 32"),
    (pathfinder, (META, "imgs/0 sample_0.png 0"), r"0.npy, line 1 has 3 columns, but needs folder"),
    (pathfinder, (META, "imgs/0 sample_0.png 0 7"), r"0.npy, line 1 has the label '7'"),
    (pathfinder, (META, "../x sample_0.png 0 1"), r"line 1 names ../x/sample_0.png, which is outside"),
    (pathfinder, lambda root: np.save(root / META, [[None]]), r"0.npy is not .*nothing pickled"),
    (pathfinder, lambda root: np.save(root / META, np.array(["imgs"])), r"0.npy must be a table with a"),
    (pathfinder, ("**/0.npy", None), r"holds no metadata/\*.npy or curv_contour_length_14/metadata/\*.npy"),
])  # fmt: skip
def test_wrong_files_are_named_with_the_line(tmp_path, read, make, spoil, message):
    make(tmp_path / "d")
    if callable(spoil):
        spoil(tmp_path / "d")
    elif spoil[1] is not None:
        put(tmp_path / "d", *spoil)
    else:
        for place in list((tmp_path / "d").glob(spoil[0])):
            place.unlink() if place.is_file() else shutil.rmtree(place)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(DATASETS.get(make, "text"), tmp_path / "d")


def test_a_dataset_of_the_hub(read, monkeypatch):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})

    def rows(side, labels=(0, 1)):
        values = {"text": [f"{side} {i}" for i in range(20)], "label": [*labels] * 10}
        return datasets.Dataset.from_dict(values, features)

    given = datasets.DatasetDict({side: rows(side) for side in ("train", "test")})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: {("imdb", None): given}[name, config])
    corpus = read("text", "hf:imdb", validation="test")
    assert (sizes(corpus), corpus.classes) == ([20, 20, 20], ("negative", "positive"))
    assert "train 7" in texts(corpus.train)
    for wrong, message in (
        (rows("test", [0, -1]), "hf:imdb, test, row 1 has no label; valid: neg, pos"),
        (rows("test", [0, None]), "hf:imdb, test, row 1 has no label; valid: neg, pos"),
        (rows("test").rename_column("label", "stars"), "'hf:imdb' has no column 'label'; valid: stars, text"),
        (None, "'hf:imdb' has no part 'test'; valid: train"),
    ):
        given.pop("test")
        given |= {} if wrong is None else {"test": wrong}
        with pytest.raises(ValueError, match=message):
            read("text", "hf:imdb")


def test_pieces_end_with_the_sequence_that_fills_them(monkeypatch):
    monkeypatch.setattr("subquad.data.lra.store.PIECE", 5)
    found = pieces((np.full(size, label), label) for label, size in ((7, 3), (8, 2), (9, 4)))
    expected = [([7, 7, 7, 8, 8], [3, 2], [7, 8]), ([9, 9, 9, 9], [4], [9])]
    assert [tuple(part.tolist() for part in piece) for piece in found] == expected
