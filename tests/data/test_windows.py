import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from subquad.data import TokenShard
from subquad.data.order import EpochOrder
from subquad.data.shards import ShardWriter
from subquad.data.windows import WindowParts, Windows


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("shard") / "s.tokens"
    with ShardWriter(path, vocab_size=70000, tokenizer_hash="t") as writer:
        writer.add(np.arange(60000, 60101))
        writer.end_document(text_bytes=1, words=1)
    return TokenShard(path)


@pytest.mark.parametrize("length", [2, 3, 10, 26, 50, 100, 101])
def test_every_token_but_the_first_is_predicted_once(shard, length):
    windows = Windows(shard, length)
    predicted = [int(token) for window in windows for token in window["labels"][1:]]
    assert predicted == list(range(60001, 60001 + len(predicted)))
    assert len(shard) - 1 - len(predicted) <= length - 2
    assert len(predicted) == len(windows) * (length - 1)


@pytest.mark.parametrize(("length", "stride"), [(10, 1), (10, 3), (10, 9), (26, 7), (100, 1), (101, 50), (3, 2)])
def test_windows_predict_each_token_once_by_their_last_ones(shard, length, stride):
    windows = Windows(shard, length, stride=stride)
    predicted = [int(token) for window in windows for token in window["labels"][-stride:]]
    first = 60000 + length - stride
    assert predicted == list(range(first, first + len(windows) * stride))
    assert len(shard) - (length - stride) - len(predicted) < stride
    assert all(len(window["input_ids"]) == length for window in windows)


@pytest.mark.parametrize("stride", [0, 10, -1])
def test_a_stride_that_no_window_has(shard, stride):
    match = rf"windows of 10 tokens predict 9 each: stride must be between 1 and 9, got {stride}"
    with pytest.raises(ValueError, match=match):
        Windows(shard, 10, stride=stride)


def test_an_item_is_tokens_and_as_many_labels_apart(shard):
    window = Windows(shard, 10)[3]
    assert window["input_ids"].dtype == torch.int64
    assert window["input_ids"].tolist() == window["labels"].tolist() == list(range(60027, 60037))
    window["labels"][0] = -100
    assert window["input_ids"][0] == 60027


@pytest.mark.parametrize("index", [-1, 11])
def test_a_window_that_is_not_there(shard, index):
    with pytest.raises(IndexError, match=f"window {index} is out of range: there are 11"):
        Windows(shard, 10)[index]


@pytest.mark.parametrize(("length", "parts"), [(10, 1), (5, 2), (4, 3), (2, 9)])
def test_parts_of_a_window_predict_its_tokens(shard, length, parts):
    whole = Windows(shard, 10)
    cut = WindowParts(whole, length, parts)
    assert len(cut) == parts * len(whole)
    for i in range(len(whole)):
        predicted = [int(token) for part in range(parts) for token in cut[i * parts + part]["labels"][1:]]
        assert predicted == whole[i]["labels"][1 : 1 + parts * (length - 1)].tolist()
        assert all(len(cut[i * parts + part]["input_ids"]) == length for part in range(parts))


def test_parts_that_are_not_there(shard):
    with pytest.raises(ValueError, match="windows of 10 tokens can't be cut into 2 of 6"):
        WindowParts(Windows(shard, 10), 6, 2)
    with pytest.raises(IndexError, match="part 22 is out of range: there are 22"):
        WindowParts(Windows(shard, 10), 5, 2)[22]


def test_a_window_longer_than_the_shard(shard):
    with pytest.raises(ValueError, match=r"a window of 102 tokens is longer than .*s\.tokens, which has 101"):
        Windows(shard, 102)


def test_a_window_without_a_prediction(shard):
    with pytest.raises(
        ValueError, match="a window needs at least 2 tokens, one to read and one to predict, got length=1"
    ):
        Windows(shard, 1)


def test_a_loader_with_workers_reads_the_shard(shard):
    loader = DataLoader(Windows(shard, 26), batch_size=2, sampler=EpochOrder(4, seed=3), num_workers=1)
    starts = [int(row[0]) for batch in loader for row in batch["input_ids"]]
    assert starts == [60000 + 25 * int(i) for i in EpochOrder(4, seed=3).permutation()]


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 9))
def test_an_order_is_a_permutation_that_seed_and_epoch_fix(n, seed, epoch):
    order = list(EpochOrder(n, seed, epoch))
    assert sorted(order) == list(range(n))
    assert list(EpochOrder(n, seed, epoch)) == order
    assert len(EpochOrder(n, seed, epoch)) == n


def test_seeds_and_epochs_differ():
    orders = {tuple(EpochOrder(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_is_pinned():
    assert list(EpochOrder(10, seed=0, epoch=0)) == [6, 0, 1, 2, 4, 8, 9, 5, 7, 3]


@given(st.data())
def test_a_stopped_order_goes_on_exactly(data):
    n = data.draw(st.integers(1, 60))
    stop = data.draw(st.integers(0, n))
    order = EpochOrder(n, seed=5, epoch=2)
    iterator = iter(order)
    first = [next(iterator) for _ in range(stop)]
    resumed = EpochOrder(n, seed=5)
    resumed.load_state_dict(order.state_dict())
    resumed.set_epoch(2)
    rest = list(resumed)
    assert first + rest == list(EpochOrder(n, seed=5, epoch=2))
    assert resumed.position == n
    assert sorted(resumed) == list(range(n)), "the iteration after the resumed one begins at the start"


def test_another_epoch_begins_at_its_start():
    order = EpochOrder(10, seed=1)
    order.load_state_dict({"n": 10, "seed": 1, "epoch": 0, "position": 4})
    order.set_epoch(1)
    assert list(order) == list(EpochOrder(10, seed=1, epoch=1))


def test_iterators_do_not_disturb_each_other():
    order = EpochOrder(10)
    pairs = list(zip(order, order, strict=True))
    assert [a for a, _ in pairs] == [b for _, b in pairs] == order.permutation().tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 11}, "the saved order has n=11, this one n=10: data or seed have changed"),
        ({"seed": 2}, "the saved order has seed=2, this one seed=1"),
        ({"position": 11}, r"the saved position must lie in 0\.\.10, got 11"),
    ],
)
def test_a_state_of_another_order(change, message):
    order = EpochOrder(10, seed=1)
    with pytest.raises(ValueError, match=message):
        order.load_state_dict(order.state_dict() | change)


def test_an_order_of_nothing():
    with pytest.raises(ValueError, match="an order needs at least one item, got n=0"):
        EpochOrder(0)
