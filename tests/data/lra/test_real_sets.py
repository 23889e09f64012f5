"""The public data sets as they are."""

import numpy as np
import pytest

from subquad.data.config import LabelledConfig
from subquad.data.labelled import labelled_corpus

pytestmark = pytest.mark.slow


def read(path, cache, dataset, length, **changes):
    return labelled_corpus(LabelledConfig(dataset=dataset, path=str(path), cache=str(cache), **changes), length)


def test_reviews(data_folder, tmp_path):
    corpus = read(data_folder / "imdb", tmp_path, "text", 4000)
    assert len(corpus.train) + len(corpus.held_out) == len(corpus.test) == 25_000
    assert np.bincount(corpus.test.labels).tolist() == [12_500, 12_500]
    assert 2300 < len(corpus.held_out) < 2700
    assert int(np.median(corpus.test.full_lengths)) == 963
    assert corpus.test.full_lengths.max() == 12_988


def test_papers(data_folder, tmp_path):
    corpus = read(data_folder / "acl_pairs", tmp_path, "retrieval", 4000)
    assert [len(corpus.train), len(corpus.held_out), len(corpus.test)] == [4152, 548, 836]
    for part in (corpus.train, corpus.held_out, corpus.test):
        assert part.labels.mean() == 0.5
        assert part.full_lengths.min() >= 2000


def test_pictures(data_folder, tmp_path):
    (file,) = (data_folder / "cifar10").glob("*.npz*")
    corpus = read(file, tmp_path, "image", 1024)
    assert [len(corpus.train), len(corpus.held_out), len(corpus.test)] == [45_000, 5_000, 10_000]
    assert set(np.bincount(corpus.held_out.labels)) == {500}
    pixels = corpus.train.shard.tokens
    assert abs(pixels.mean() / 255 - (0.299 * 0.4914 + 0.587 * 0.4822 + 0.114 * 0.4465)) < 0.002  # the known means


def test_digits(data_folder, tmp_path):
    corpus = read(data_folder / "mnist", tmp_path, "image", 784)
    assert [len(corpus.train), len(corpus.held_out), len(corpus.test)] == [54_000, 6_000, 10_000]
    counts = np.bincount(corpus.train.labels) + np.bincount(corpus.held_out.labels)
    assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
