"""Labelled data that says less than it seems to, and settings that would change nothing: each is refused by name."""

import numpy as np
import pytest

from subquad.data.config import LabelledConfig
from subquad.data.labelled import labelled_corpus


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def read(cache, dataset, path, length=50, **changes):
    return labelled_corpus(LabelledConfig(dataset=dataset, path=str(path), cache=cache, **changes), length)


def test_one_class_is_nothing_to_tell_apart(tmp_path, cache):
    for i in range(6):
        for side in ("train", "test"):
            (tmp_path / side / "pos").mkdir(parents=True, exist_ok=True)
            (tmp_path / side / "pos" / f"{i}.txt").write_text(f"good {i}")
    with pytest.raises(ValueError, match="there is nothing to tell apart, the only class is 'positive'"):
        read(cache, "text", tmp_path)


def test_an_expression_without_words(tmp_path, cache):
    for name in ("train", "val", "test"):
        rows = [f"{digit}\t{digit}" for digit in range(10)]
        (tmp_path / f"basic_{name}.tsv").write_text("\n".join(["Source\tTarget", *rows, "( )\t5"]))
    with pytest.raises(ValueError, match=r"basic_train.tsv, line 12 has no expression before the tab"):
        read(cache, "listops", tmp_path)


@pytest.mark.parametrize("table", [np.array("x"), np.array(["imgs/0", "a.png", "0", "1"])])
def test_metadata_that_is_no_table(tmp_path, cache, table):
    (tmp_path / "metadata").mkdir()
    np.save(tmp_path / "metadata/0.npy", table)
    with pytest.raises(ValueError, match=r"0.npy must be a table, a row for each image, got an array of shape"):
        read(cache, "pathfinder32", tmp_path)


def test_a_name_with_another_text_is_another_document(tmp_path, cache):
    for name in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("1\ta\tb\tone\ttwo\n0\ta\tb\tthree\ttwo\n")
    train = read(cache, "retrieval", tmp_path).train
    assert [train.sequence(i).tobytes() for i in range(2)] == [b"one", b"three"]
    assert train.index.tolist() == [[0, 1], [2, 1]]


@pytest.mark.parametrize("absent", [-1, None])
def test_a_row_of_a_dataset_without_a_label(cache, monkeypatch, absent):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = {side: datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features) for side in ("train",)}
    rows["test"] = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, absent]}, features)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: datasets.DatasetDict(rows))
    with pytest.raises(ValueError, match="hf:sst2, test, row 1 has no label; valid: neg, pos"):
        read(cache, "text", "hf:sst2")


@pytest.mark.parametrize(("values", "message"), [
    ({"dataset": "listops", "path": "hf:listops"}, "listops is read from a folder; text and image can be read from"),
    ({"dataset": "text", "path": "hf::plain"}, "'hf::plain' names no dataset; it must be hf:NAME or hf:NAME:CONFIG"),
    ({"dataset": "retrieval", "path": "x", "validation": "test"}, "validation=test has no effect with dataset=retriev"),
    ({"validation": "test"}, "validation=test has no effect with dataset=toy, which has a part for it; text and"),
])  # fmt: skip
def test_settings_without_an_effect(values, message):
    with pytest.raises(ValueError, match=message):
        LabelledConfig.from_dict(values)
