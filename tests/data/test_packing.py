from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.data import TokenShard, packing
from subquad.data.packing import pack, pieces
from subquad.data.shards import ShardWriter
from subquad.data.windows import PackedWindows


def offsets(lengths):
    return np.cumsum([0, *lengths])


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(2, 20), st.integers(1, 5))
def test_nothing_is_lost_and_nothing_is_predicted_twice(lengths, length, open_windows):
    documents = offsets(lengths)
    before, packing.OPEN_WINDOWS = packing.OPEN_WINDOWS, open_windows
    try:
        found = pack(documents, length)
    finally:
        packing.OPEN_WINDOWS = before
    predicted, read = [], []
    for first, last in pairwise(found.firsts):
        assert first < last, "no window is empty"
        sizes = found.stops[first:last] - found.starts[first:last]
        assert sizes.sum() <= length
        assert (np.diff(found.starts[first:last]) > 0).all(), "in order of their tokens"
    for start, stop in zip(found.starts.tolist(), found.stops.tolist(), strict=True):
        predicted += range(start + 1, stop)
        read += range(start, stop)
    firsts = {start for start, stop in pairwise(documents) if stop > start}
    assert set(read) == set(range(documents[-1]))
    assert sorted(predicted) == [token for token in range(documents[-1]) if token not in firsts]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(2, 20))
def test_a_piece_stays_in_its_document_and_fits_documents_stay_whole(lengths, length):
    starts, stops = pieces(offsets(lengths), length)
    documents = offsets(lengths)
    for start, stop in zip(starts, stops, strict=True):
        number = np.searchsorted(documents, start, side="right") - 1
        assert documents[number] <= start < stop <= documents[number + 1]
    whole = set(zip(starts.tolist(), stops.tolist(), strict=True))
    assert all((d, d + n) in whole for d, n in zip(documents.tolist(), lengths, strict=False) if n <= length)


def test_neighbours_fill_windows():
    found = pack(offsets([5, 3, 9, 2, 8]), 8)
    windows = [
        list(zip(found.starts[a:b].tolist(), found.stops[a:b].tolist(), strict=True)) for a, b in pairwise(found.firsts)
    ]
    assert windows == [[(0, 5), (5, 8)], [(8, 16)], [(15, 17), (17, 19)], [(19, 27)]]


def test_little_is_padding():
    lengths = np.exp(np.random.default_rng(0).normal(5, 1, 2000)).astype(int) + 1
    found = pack(offsets(lengths), 512)
    used = (found.stops - found.starts).sum()
    assert used > 0.98 * 512 * (len(found.firsts) - 1)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("shard") / "s.tokens"
    with ShardWriter(path, vocab_size=300, tokenizer_hash="t") as writer:
        for ids in ((1, 2, 3), (4, 5), (6, 7, 8, 9, 10, 11, 12, 13), (14,)):
            writer.add(np.array(ids))
            writer.end_document(text_bytes=1, words=1)
    return TokenShard(path)


def test_an_item_says_which_documents_it_holds(shard):
    windows = PackedWindows(shard, 6)
    items = [windows[i] for i in range(len(windows))]
    assert all(set(item) == {"input_ids", "labels", "doc_ids"} for item in items)
    assert [item["input_ids"].tolist() for item in items] == [
        [1, 2, 3, 4, 5, 14],
        [6, 7, 8, 9, 10, 11],
        [11, 12, 13, 0, 0, 0],
    ]
    assert [item["labels"].tolist() for item in items] == [
        [-100, 2, 3, -100, 5, -100],
        [-100, 7, 8, 9, 10, 11],
        [-100, 12, 13, -100, -100, -100],
    ]
    assert [item["doc_ids"].tolist() for item in items] == [[0, 0, 0, 1, 1, 2], [0] * 6, [0, 0, 0, -1, -1, -1]]
    assert {item[name].dtype for item in items for name in item} == {torch.int64}
    assert windows.padding == 3 / 18


@pytest.mark.parametrize("index", [-1, 3])
def test_a_window_that_is_not_there(shard, index):
    with pytest.raises(IndexError, match=f"window {index} is out of range: there are 3"):
        PackedWindows(shard, 6)[index]


def test_a_window_without_a_prediction(shard):
    with pytest.raises(ValueError, match="a window needs at least 2 tokens, one to read and one to predict, got"):
        PackedWindows(shard, 1)


def test_no_document_at_all(shard):
    empty = pack(np.zeros(1, dtype=np.int64), 6)
    assert len(empty.firsts) == 1
    with pytest.raises(ValueError, match=r"s\.tokens holds no document to pack"):
        PackedWindows(shard, 6, empty)
