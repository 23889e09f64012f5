"""Data sets that are read: every layout, cutting, choosing, and what is said of files that are wrong."""

import json
import lzma
import sys

import numpy as np
import pytest
from PIL import Image

from subquad.data.config import LabelledConfig
from subquad.data.labelled import labelled_corpus
from subquad.data.lra.read_images import grey
from subquad.data.lra.store import choose

REVIEWS = {("train", "pos"): 12, ("train", "neg"): 18, ("test", "pos"): 3, ("test", "neg"): 5}


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def read(cache, dataset, path, length=50, **changes):
    return labelled_corpus(LabelledConfig(dataset=dataset, path=str(path), cache=cache, **changes), length)


def texts(part) -> list[str]:
    return sorted(part.sequence(i).tobytes().decode() for i in range(len(part)))


def sizes(corpus) -> list[int]:
    return [len(corpus.train), len(corpus.held_out), len(corpus.test)]


def reviews(root, kind="txt"):
    for (side, name), count in REVIEWS.items():
        for i in range(count):
            text = f"é {side} {name} {i} " + "x" * i
            if kind == "txt":
                (root / side / name).mkdir(parents=True, exist_ok=True)
                (root / side / name / f"{i}_7.txt").write_text(text, encoding="utf-8")
            else:
                with lzma.open(root / f"imdb_{side}.tsv.xz", "at", encoding="utf-8") as file:
                    file.write(f"{int(name == 'pos')}\t{i}\t7\t{text}\n")
    return root


# --- text


def test_reviews_in_folders_and_in_tables_are_the_same(tmp_path, cache):
    for kind in ("txt", "tsv"):
        (tmp_path / kind).mkdir()
    (tmp_path / "txt" / "train" / "unsup").mkdir(parents=True)
    folders, tables = (read(cache, "text", reviews(tmp_path / kind, kind)) for kind in ("txt", "tsv"))
    assert folders.classes == tables.classes == ("negative", "positive")
    assert folders.vocab_size == 256
    for name in ("train", "held_out", "test"):
        assert texts(getattr(folders, name)) == texts(getattr(tables, name))
    assert len(folders.train) + len(folders.held_out) == 30
    assert len(folders.held_out) >= 1
    assert not set(texts(folders.train)) & set(texts(folders.held_out))
    for i in range(len(folders.test)):
        assert folders.classes[int(folders.test[i]["labels"])][:3] in folders.test.sequence(i).tobytes().decode()


def test_long_range_arena_s_own_validation_is_the_test_part(tmp_path, cache):
    corpus = read(cache, "text", reviews(tmp_path), validation="test")
    assert sizes(corpus) == [30, 8, 8]
    assert texts(corpus.held_out) == texts(corpus.test)


def test_long_sequences_are_cut_and_counted_or_refused(tmp_path, cache, caplog):
    caplog.set_level("INFO", "subquad")  # whatever a command has set before
    corpus = read(cache, "text", reviews(tmp_path), length=20, validation="test")
    whole = read(cache, "text", tmp_path, length=99, validation="test")
    lengths = whole.train.full_lengths
    assert corpus.train.cut == (lengths > 20).sum() > 0
    assert f"{corpus.train.cut} of 30 sequences in the part train are cut to 20 tokens; the longest has" in caplog.text
    assert texts(corpus.train) == sorted(text.encode()[:20].decode(errors="replace") for text in texts(whole.train))
    with pytest.raises(ValueError, match=r"part train, example \d+ has \d+ tokens, above batch.length=20: raise it"):
        read(cache, "text", tmp_path, length=20, too_long="refuse")
    with pytest.raises(ValueError, match="sequences have at least one token, got length=0"):
        read(cache, "text", tmp_path, length=0)


def test_fewer_examples_are_chosen_by_seed_in_their_shares(tmp_path, cache):
    first, other = (
        read(cache, "text", reviews(tmp_path), examples=10, held_out=4, validation="test", seed=seed) for seed in (0, 1)
    )
    assert sizes(first) == [10, 4, 4]
    assert np.bincount(first.train.labels).tolist() == np.bincount(other.train.labels).tolist() == [6, 4]
    assert texts(first.train) != texts(other.train)
    assert first.fingerprint != other.fingerprint
    with pytest.raises(ValueError, match=r"classify.examples=31 is too many for .*: the data set has 30 such examples"):
        read(cache, "text", tmp_path, examples=31, validation="test")
    with pytest.raises(ValueError, match=r"classify.held_out=9 is too many for .*: the data set has 8 such examples"):
        read(cache, "text", tmp_path, held_out=9, validation="test")


def test_all_or_some_of_the_labels_are_chosen():
    labels = np.array([0] * 30 + [1] * 60 + [2] * 10)
    assert choose(labels, None, 0).tolist() == choose(labels, 100, 0).tolist() == list(range(100))
    for wanted in (10, 20, 50):
        assert np.bincount(labels[choose(labels, wanted, 3)]).tolist() == [
            wanted * 3 // 10,
            wanted * 6 // 10,
            wanted // 10,
        ]


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda root: (root / "train/pos/3_7.txt").write_bytes(b"ab\xff"), r"3_7.txt is not text: byte 2 is 0xff"),
    (lambda root: (root / "test/neg/0_7.txt").write_bytes(b""), r"0_7.txt holds no text"),
    (lambda root: [f.unlink() for f in (root / "train/pos").iterdir()], r"class 'pos' has no example: there is no"),
    (lambda root: [f.unlink() for f in (root / "test/pos").iterdir()], r"class 'pos' has no example: .*test"),
    (lambda root: (root / "test").rename(root / "tests"), r"there is no folder .*test"),
    (lambda root: (root / "test/pos").rename(root / "test/good"), r"0_7.txt has the label 'good'; valid: neg, pos"),
])  # fmt: skip
def test_folders_of_texts_that_are_wrong(tmp_path, cache, spoil, message):
    spoil(reviews(tmp_path / "r"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(cache, "text", tmp_path / "r")


@pytest.mark.parametrize(("line", "message"), [
    (b"1 text without a tab", r"x_train.tsv, line 2 has no tab: it must have the label first"),
    (b"\t3\t4\ttext", r"x_train.tsv, line 2 has no label; valid: 0"),
    (b"1\t3\t4\t\xfe", r"x_train.tsv, line 2 is not text: byte 0 is 0xfe"),
    (b"1\t3\t4\t", r"x_train.tsv, line 2 holds no text"),
])  # fmt: skip
def test_tables_of_texts_that_are_wrong(tmp_path, cache, line, message):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x_train.tsv").write_bytes(b"0\t1\t2\tgood\n" + line + b"\n")
    (tmp_path / "d/x_test.tsv").write_bytes(b"0\t1\t2\tgood\n")
    with pytest.raises(ValueError, match=message):
        read(cache, "text", tmp_path / "d")


def test_a_table_that_is_missing(tmp_path, cache):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x_train.tsv").write_bytes(b"0\t1\t2\tgood\n")
    with pytest.raises(FileNotFoundError, match=r"neither the folders train and test nor a file that ends in test.tsv"):
        read(cache, "text", tmp_path / "d")


def test_a_folder_without_classes(tmp_path, cache):
    (tmp_path / "d/train").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no folder for a class, such as pos and neg"):
        read(cache, "text", tmp_path / "d")


def test_a_dataset_of_the_hub(tmp_path, cache, monkeypatch):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = {
        side: datasets.Dataset.from_dict({"text": [f"{side} {i}" for i in range(20)], "label": [0, 1] * 10}, features)
        for side in ("train", "test")
    }
    given = datasets.DatasetDict(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: {("imdb", None): given}[name, config])
    corpus = read(cache, "text", "hf:imdb", validation="test")
    assert sizes(corpus) == [20, 20, 20]
    assert corpus.classes == ("negative", "positive")
    assert "train 7" in texts(corpus.train)
    given["test"] = given["test"].rename_column("label", "stars")
    with pytest.raises(ValueError, match="'hf:imdb' has no column 'label'; valid: stars, text"):
        read(cache, "text", "hf:imdb")
    del given["test"]
    with pytest.raises(ValueError, match="'hf:imdb' has no part 'test'; valid: train"):
        read(cache, "text", "hf:imdb")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'hf:imdb' needs the package datasets.*subquad\[datasets\]"):
        read(cache, "text", "hf:imdb")


# --- listops


def listops(root, **bad):
    for name, count in (("train", 20), ("val", 3), ("test", 4)):
        rows = [f"( ( ( [MIN {i % 10} ) {(i + 3) % 10} ) ] )\t{min(i % 10, (i + 3) % 10)}" for i in range(count)]
        (root / f"basic_{name}.tsv").write_text("\n".join(["Source\tTarget", *rows, *bad.get(name, [])]) + "\n")
    return root


def test_listops_of_the_release(tmp_path, cache):
    rows = [f"( ( ( [MAX {i} ) {i} ) ] )\t{i}" for i in range(10)]
    corpus = read(cache, "listops", listops(tmp_path, train=rows))
    assert sizes(corpus) == [30, 3, 4]
    assert corpus.vocab_size == 15
    assert corpus.train.sequence(25).tolist() == [11, 5, 5, 14]
    assert int(corpus.train[25]["labels"]) == 5


@pytest.mark.parametrize(("rows", "message"), [
    (["( [MIN 3 ] )\t12"], r"basic_train.tsv, line 22 has the label '12'; valid: 0, 1"),
    (["( [MIN 3 ] )\t"], r"basic_train.tsv, line 22 has no label"),
    (["( [MIN 3 ] )"], r"basic_train.tsv, line 22 has 1 columns between tabs, not the 2: Source, Target"),
    (["( [AVG 3 ] )\t1"], r"basic_train.tsv, line 22: '\[AVG' is no word of ListOps"),
    ([], r"no example to learn from has the class '7', '8', '9'"),
])  # fmt: skip
def test_listops_that_is_wrong(tmp_path, cache, rows, message):
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=message):
        read(cache, "listops", listops(tmp_path / "d", train=rows))


def test_listops_without_a_head_or_a_file_and_with_nothing_in_it(tmp_path, cache):
    folder = tmp_path / "d"
    folder.mkdir()
    listops(folder, train=[f"( [MAX {i} {i} ] )\t{i}" for i in range(10)])
    (folder / "basic_test.tsv").write_text("Source\tTarget\n")
    with pytest.raises(ValueError, match="part 'test', has no example"):
        read(cache, "listops", folder)
    (folder / "basic_val.tsv").write_text("( [MAX 3 3 ] )\t3\n")
    with pytest.raises(ValueError, match=r"basic_val.tsv, line 1 must be 'Source<TAB>Target'"):
        read(cache, "listops", folder)
    (folder / "basic_val.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no basic_val.tsv \(or .xz, .gz, .bz2\) in"):
        read(cache, "listops", folder)
    (folder / "basic_val.tsv.xz").write_bytes(lzma.compress(b"Source\tTarget\n")[:-20])
    with pytest.raises(ValueError, match=r"basic_val.tsv.xz is damaged and does not unpack"):
        read(cache, "listops", folder)


# --- retrieval


def release(root, texts):
    root.mkdir()
    for name in ("train", "eval", "test"):
        lines = [
            b'"%s"\t"a%d"\t"b"\t"%s"\t"two ""2"""' % (b"1.0" if i % 2 else b"0.0", i, t) for i, t in enumerate(texts)
        ]
        (root / f"new_aan_pairs.{name}.tsv").write_bytes(b"\n".join(lines) + b"\n")
    return root


def papers(root):
    root.mkdir()
    rows = [{"id": f"P{i}", "text": f"paper {i} " * (i + 1)} for i in range(4)]
    (root / "papers.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    for name in ("train", "val", "test"):
        (root / f"pairs_{name}.tsv").write_text("1\tP0\tP1\n0\tP2\tP1\n")
    return root


def test_pairs_of_the_release(tmp_path, cache):
    corpus = read(cache, "retrieval", release(tmp_path / "d", [b"one", b"three"]), length=6)
    assert corpus.pairs
    assert corpus.classes == ("unrelated", "cited")
    item = corpus.train[1]
    assert set(item) == {"input_ids", "attention_mask", "pair_input_ids", "pair_attention_mask", "labels"}
    assert bytes(item["input_ids"].tolist()) == b"three\0"
    assert item["attention_mask"].tolist() == [1, 1, 1, 1, 1, 0]
    assert bytes(item["pair_input_ids"].tolist()) == b'two "2'
    assert int(item["labels"]) == 1
    assert corpus.train.full_lengths.tolist() == [[3, 7], [5, 7]]
    assert corpus.train.cut == 2


def test_pairs_and_papers_apart(tmp_path, cache):
    corpus = read(cache, "retrieval", papers(tmp_path / "d"), length=99)
    assert corpus.train.sequence(0, 1).tobytes() == b"paper 1 paper 1 "
    assert corpus.train.sequence(1, 0).tobytes() == b"paper 2 " * 3
    assert [int(corpus.test[i]["labels"]) for i in range(2)] == [1, 0]
    assert len(corpus.train.shard.documents) == 4  # three papers, each kept once


@pytest.mark.parametrize(("name", "text", "message"), [
    ("pairs_val.tsv", "1\tP0\tP9\n", r"pairs_val.tsv, line 1: papers.jsonl has no paper 'P9'"),
    ("pairs_val.tsv", "2\tP0\tP1\n", r"pairs_val.tsv, line 1 has the label '2'; valid: 0, 1"),
    ("pairs_val.tsv", "1\tP0\n", r"pairs_val.tsv, line 1 has 2 columns between tabs, not the 3: label, first, second"),
    ("pairs_train.tsv", "1\tP0\tP1\n", r"no example to learn from has the class 'unrelated'"),
    ("papers.jsonl", '{"id": "P0"}\n', r"papers.jsonl, line 1 is not JSON with an id and a text: KeyError"),
    ("papers.jsonl", '{"id": "P0", "text": "a"}\n' * 2, r"line 2: the paper 'P0' stands there for the second time"),
    ("papers.jsonl", b'{"id": "P0", "text": "\xff"}', r"papers.jsonl, line 1 is not UTF-8 text: byte 22 is 0xff"),
])  # fmt: skip
def test_pairs_that_are_wrong(tmp_path, cache, name, text, message):
    folder = papers(tmp_path / "d")
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read(cache, "retrieval", folder)


def test_pairs_without_their_files(tmp_path, cache):
    (tmp_path / "d").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds neither papers.jsonl with pairs_train.tsv nor new_aan_pairs"):
        read(cache, "retrieval", tmp_path / "d")
    with pytest.raises(ValueError, match=r"new_aan_pairs.train.tsv, line 1, text 1 is not text: byte 1 is 0xff"):
        read(cache, "retrieval", release(tmp_path / "e", [b"a\xff"]))


# --- images


def test_grey_is_pillow_s():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 256, 256, 3), dtype=np.uint8)
    expected = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in pixels])
    assert (grey(pixels) == expected).all()
    assert (grey(pixels[..., :1]) == pixels[..., 0]).all()


def pictures(root, train=20):
    rng = np.random.default_rng(0)
    for side, count in (("train", train), ("test", 4)):
        for name in ("cat", "dog"):
            (root / side / name).mkdir(parents=True, exist_ok=True)
            for i in range(count // 2):
                Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(root / side / name / f"{i}.png")
    return root


def test_images_of_a_folder(tmp_path, cache):
    corpus = read(cache, "image", pictures(tmp_path / "d"), length=16)
    assert sizes(corpus) == [18, 2, 4]
    assert corpus.classes == ("cat", "dog")
    assert np.bincount(corpus.held_out.labels).tolist() == [1, 1]
    expected = np.asarray(Image.open(tmp_path / "d/test/cat/0.png").convert("L"))
    assert corpus.test.sequence(0).tolist() == expected.ravel().tolist()
    assert sizes(read(cache, "image", tmp_path / "d", length=16, validation="test")) == [20, 4, 4]


def test_too_few_images_to_hold_some_out(tmp_path, cache):
    with pytest.raises(ValueError, match="6 training images are too few to hold out a tenth"):
        read(cache, "image", pictures(tmp_path / "d", train=6), length=16)


# --- pathfinder


def pathfinder(root, kind="text", images=20):
    folder = root / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs/0").mkdir(parents=True)
    rows = []
    for i in range(images):
        Image.fromarray(np.full((32, 32), i, dtype=np.uint8)).save(folder / f"imgs/0/sample_{i}.png")
        rows.append(["imgs/0", f"sample_{i}.png", str(i), str(i % 2), "1.8", "14"])
    if kind == "text":
        (folder / "metadata/0.npy").write_text("\n".join(map(" ".join, rows)) + "\n")
    else:
        np.save(folder / "metadata/0.npy", np.array(rows, dtype="S" if kind == "bytes" else None))
    return folder


@pytest.mark.parametrize("kind", ["text", "array", "bytes"])
def test_pathfinder_of_the_release(tmp_path, cache, kind):
    folder = pathfinder(tmp_path / "d", kind)
    (folder / "imgs/0/sample_3.png").write_bytes(b"")
    corpus = read(cache, "pathfinder32", tmp_path / "d", length=1024)
    assert sizes(corpus) == [15, 2, 2]
    assert [corpus.train.sequence(i)[0] for i in range(4)] == [0, 1, 2, 4]
    assert corpus.train.labels[:4].tolist() == [0, 1, 0, 0]
    assert sizes(read(cache, "pathfinder32", folder, length=1024)) == [15, 2, 2]


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda f: (f / "imgs/0/sample_3.png").unlink(), r"0.npy, line 4 names .*sample_3.png, which is not there"),
    (lambda f: (f / "imgs/0/sample_3.png").write_bytes(b"GIF"), r"sample_3.png is damaged or no image"),
    (lambda f: Image.new("L", (16, 32)).save(f / "imgs/0/sample_3.png"), r"has 16 x 32 pixels, not 32 x 32"),
    (lambda f: (f / "metadata/0.npy").write_text("imgs/0 sample_0.png 0"), r"0.npy, line 1 has 3 columns: folder"),
    (lambda f: (f / "metadata/0.npy").write_text("imgs/0 sample_0.png 0 7"), r"0.npy, line 1 has the label '7'"),
    (lambda f: np.save(f / "metadata/0.npy", np.array([["imgs/0", None]])), r"0.npy is no .*nothing pickled"),
    (lambda f: (f / "metadata/0.npy").unlink(), r"there is no metadata/\*.npy in"),
])  # fmt: skip
def test_pathfinder_that_is_wrong(tmp_path, cache, spoil, message):
    spoil(pathfinder(tmp_path / "d"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(cache, "pathfinder32", tmp_path / "d")


# --- paths and settings


def test_a_path_that_is_not_there(tmp_path, cache):
    (tmp_path / "imdb").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder '.*imbd'; did you mean '.*imdb'\?"):
        read(cache, "text", tmp_path / "imbd")


@pytest.mark.parametrize(("values", "message"), [
    ({"path": "x"}, "classify.path='x' has no effect with dataset=toy"),
    ({"dataset": "text", "path": ""}, "classify.path='' must name a folder, a file or hf:NAME"),
    ({"dataset": "text", "path": "x", "listops": {"max_args": 3}}, "classify.listops has no effect with dataset=text"),
    ({"dataset": "listops", "path": "x", "listops": {"max_args": 3}}, "no effect with dataset=listops and path='x'"),
    ({"dataset": "listops", "pathfinder": {"difficulty": "easy"}}, "classify.pathfinder has no effect with dataset=li"),
    ({"examples": 0}, "classify.examples must be at least 1, got 0"),
])  # fmt: skip
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LabelledConfig.from_dict(values)


def test_a_data_set_that_is_read_needs_a_path(cache):
    with pytest.raises(ValueError, match=r"dataset=text is read, not made: give its path.*; toy, listops"):
        labelled_corpus(LabelledConfig(dataset="text", cache=cache), 9)
