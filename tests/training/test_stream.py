"""The windows of a run are one stream, whatever the number of processes and wherever it was interrupted."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path

import pytest
from accelerate.data_loader import SkipBatchSampler
from hypothesis import given
from hypothesis import strategies as st

from subquad.data import TokenSet, order, windows_of
from subquad.data.order import EpochOrder
from subquad.training.reading import DealtBatches, RunOrder
from tests.data.sets import make_set

SHARDS = [[40, 17], [63], [9, 9, 30], [25]]
GLOBAL = 8
"""Windows in a step of all processes."""
SIZES = [(1, 8), (1, 2), (2, 4), (2, 2), (4, 2), (4, 1)]
"""Processes, and the windows in a batch of each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream") / "set"
    make_set(folder, SHARDS)
    return folder


def steps(windows: int, seed: int, total: int, readers: int, size: int, skipped: int) -> list[list[int]]:
    """The windows of each step after the first `skipped`, as they are dealt to so many processes."""
    shares = []
    for reader in range(readers):
        mine = DealtBatches(RunOrder(windows, seed, total), size, reader, readers)
        shares.append(iter(SkipBatchSampler(mine, skipped * GLOBAL // (readers * size))))
    found = []
    while True:
        step = [list(islice(share, GLOBAL // (readers * size))) for share in shares]
        if not step[0]:
            return found
        # The batches of a step in the order of the stream: one of each process, in turn.
        found.append(list(chain.from_iterable(chain.from_iterable(zip(*step, strict=True)))))


@given(
    seed=st.integers(0, 2**40),
    runs=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(SIZES)), max_size=4),
    last=st.sampled_from([(1, 4), (2, 1), (4, 2)]),
    large=st.booleans(),
)
def test_a_run_with_other_processes_goes_on_with_the_same_windows(seed, runs, last, large):
    before, order.LARGE = order.LARGE, 1 if large else order.LARGE
    try:
        whole = list(RunOrder(27, seed, 10 * GLOBAL))
        stream, done = [], 0
        for ran, (readers, size) in [*runs, (10, last)]:
            stream += steps(27, seed, 10 * GLOBAL, readers, size, done)[:ran]
            done = len(stream)
    finally:
        order.LARGE = before
    assert list(chain.from_iterable(stream)) == whole


def test_a_run_is_its_epochs(monkeypatch):
    assert list(RunOrder(5, 3, 12)) == [*EpochOrder(5, 3, 0), *EpochOrder(5, 3, 1), *list(EpochOrder(5, 3, 2))[:2]]
    monkeypatch.setattr(order, "LARGE", 5)
    large = list(RunOrder(5, 3, 12))
    assert large == [*order.LargeOrder(5, 3, 0), *order.LargeOrder(5, 3, 1), *list(order.LargeOrder(5, 3, 2))[:2]]


@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_readers_open_the_shards_of_their_own_windows(folder, tmp_path, pack, monkeypatch):
    made = windows_of(TokenSet(folder), 16, pack=pack, cache=str(tmp_path))
    whole = [made[i]["input_ids"].tolist() for i in RunOrder(len(made), 1, 2 * GLOBAL)]
    stream: list[list[int]] = []
    for reader in range(4):
        windows = windows_of(TokenSet(folder), 16, pack=pack, cache=str(tmp_path))
        opened: list[int] = []
        real = windows.tokens.shard
        monkeypatch.setattr(windows.tokens, "shard", lambda number, o=opened, r=real: o.append(number) or r(number))
        mine = [step[2 * reader : 2 * reader + 2] for step in steps(len(windows), 1, 2 * GLOBAL, 4, 2, 0)]
        found = [windows[index]["input_ids"].tolist() for index in chain.from_iterable(mine)]
        assert set(opened) == {windows.place(index)[0] for index in chain.from_iterable(mine)}
        stream += found
    order_of = [8 * step + 2 * reader + i for reader in range(4) for step in range(2) for i in range(2)]
    assert [stream[order_of.index(place)] for place in range(2 * GLOBAL)] == whole
