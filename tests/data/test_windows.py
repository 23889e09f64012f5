"""Windows of a shard: each token is predicted once, and packed windows say which documents they hold."""

import numpy as np
import pytest
import torch

from subquad.data.packing import pack
from subquad.data.windows import PackedWindows, WindowParts, Windows
from tests.data.sets import make_set


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    return make_set(tmp_path_factory.mktemp("shard"), [[101]]).shard(0)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return PackedWindows(make_set(tmp_path_factory.mktemp("packed"), [[3, 2, 8, 1]]).shard(0), 6)


@pytest.mark.parametrize(("length", "stride"), [
    (2, None), (3, None), (10, None), (26, None), (100, None), (101, None), (10, 1), (10, 3), (10, 9), (26, 7),
    (100, 1), (101, 50), (3, 2),
])  # fmt: skip
def test_windows_predict_each_token_once(shard, length, stride):
    windows = Windows(shard, length, stride=stride)
    stride = length - 1 if stride is None else stride
    predicted = [int(token) for window in windows for token in window["labels"][-stride:]]
    first = length - stride
    assert predicted == list(range(first, first + len(windows) * stride))
    assert len(shard) - (length - stride) - len(predicted) < stride
    assert all(len(window["input_ids"]) == length for window in windows)
    window = windows[0]
    assert window["input_ids"].dtype == torch.int64
    assert window["input_ids"].tolist() == window["labels"].tolist()
    window["labels"][0] = -100
    assert window["input_ids"][0] == 0, "the labels are a copy"


@pytest.mark.parametrize(("length", "parts"), [(10, 1), (5, 2), (4, 3), (2, 9)])
def test_parts_of_a_window_predict_its_tokens(shard, length, parts):
    whole = Windows(shard, 10)
    cut = WindowParts(whole, length, parts)
    assert len(cut) == parts * len(whole)
    for i in range(len(whole)):
        predicted = [int(token) for part in range(parts) for token in cut[i * parts + part]["labels"][1:]]
        assert predicted == whole[i]["labels"][1 : 1 + parts * (length - 1)].tolist()
        assert all(len(cut[i * parts + part]["input_ids"]) == length for part in range(parts))


def test_a_packed_item_says_which_documents_it_holds(packed):
    items = [packed[i] for i in range(len(packed))]
    assert [{name: values.tolist() for name, values in item.items()} for item in items] == [
        {"input_ids": [0, 1, 2, 3, 4, 13], "labels": [-100, 1, 2, -100, 4, -100], "doc_ids": [0, 0, 0, 1, 1, 2]},
        {"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, 6, 7, 8, 9, 10], "doc_ids": [0] * 6},
        {"input_ids": [10, 11, 12, 0, 0, 0], "labels": [-100, 11, 12, *[-100] * 3], "doc_ids": [0] * 3 + [-1] * 3},
    ]
    assert {values.dtype for item in items for values in item.values()} == {torch.int64}
    assert packed.padding == 3 / 18


@pytest.mark.parametrize(("call", "message"), [
    (lambda shard, packed: Windows(shard, 1), "a window needs at least 2 tokens, one to read and one to predict, got"),
    (lambda shard, packed: Windows(shard, 102), r"a window of 102 tokens is longer than .*0\.tokens, which has 101"),
    (lambda shard, packed: Windows(shard, 10, stride=0), "stride must lie between 1 and 9 for windows of 10 .* got 0"),
    (lambda shard, packed: Windows(shard, 10, stride=10), "stride must lie between 1 and 9 for windows of 10 .*got 10"),
    (lambda shard, packed: Windows(shard, 10)[-1], "window -1 is out of range: there are 11"),
    (lambda shard, packed: Windows(shard, 10)[11], "window 11 is out of range: there are 11"),
    (lambda shard, packed: WindowParts(Windows(shard, 10), 6, 2), "windows of 10 tokens can't be cut into 2 of 6"),
    (lambda shard, packed: WindowParts(Windows(shard, 10), 5, 2)[22], "part 22 is out of range: there are 22"),
    (lambda shard, packed: packed[3], "window 3 is out of range: there are 3"),
    (lambda shard, packed: PackedWindows(packed.shard, 1), "a window needs at least 2 tokens"),
    (lambda shard, packed: PackedWindows(packed.shard, 6, pack(np.zeros(1, int), 6)), r"0\.tokens holds no document"),
])  # fmt: skip
def test_windows_that_cannot_be_are_refused(shard, packed, call, message):
    with pytest.raises((ValueError, IndexError), match=message):
        call(shard, packed)
