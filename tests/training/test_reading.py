"""Who sees which window: one order for any number of processes and any resume; lost readers are named."""

import os
import time
from itertools import chain, islice

import pytest
import torch
from accelerate.data_loader import SkipBatchSampler
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from subquad.data import TokenSet, order, windows_of
from subquad.data.order import epoch_order
from subquad.training import train
from subquad.training.errors import ReadError
from subquad.training.reading import DealtBatches, HeldOutBatches, NumberedWindows, RunOrder, naming
from tests.data.sets import make_set
from tests.training.helpers import assert_same_weights

GLOBAL = 8
"""Windows in a step of all processes."""
SIZES = [(1, 8), (1, 2), (2, 4), (2, 2), (4, 2), (4, 1)]
"""Numbers of processes, and of windows in a batch of each."""


def steps(windows, seed, total, readers, size, skipped):
    """Return the windows of each step after the first `skipped`, as they are dealt to `readers` processes."""
    each, shares = GLOBAL // (readers * size), []
    for reader in range(readers):
        mine = DealtBatches(RunOrder(windows, seed, total), size, reader, readers)
        assert len(mine) == total // (readers * size)
        shares.append(iter(SkipBatchSampler(mine, skipped * each)))
    found = []
    while True:
        step = [list(islice(share, each)) for share in shares]
        if not step[0]:
            return found
        # The batches of a step in the order of the run: one of each process, in turn.
        found.append(list(chain.from_iterable(chain.from_iterable(zip(*step, strict=True)))))


@hypothesis_settings(max_examples=50)
@given(
    windows=st.integers(1, 27),
    seed=st.integers(0, 2**40),
    runs=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(SIZES)), max_size=4),
    last=st.sampled_from(SIZES),
    large=st.booleans(),
)
def test_a_run_resumed_by_other_processes_sees_the_next_windows_of_one_order(windows, seed, runs, last, large):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "LARGE", 1 if large else order.LARGE)
        whole = list(RunOrder(windows, seed, 10 * GLOBAL))
        stream = []
        for ran, (readers, size) in [*runs, (10, last)]:
            stream += steps(windows, seed, 10 * GLOBAL, readers, size, len(stream))[:ran]
    assert list(chain.from_iterable(stream)) == whole


def test_a_run_is_its_epochs_and_a_longer_run_begins_with_a_shorter_one(monkeypatch):
    whole = list(RunOrder(5, 3, 12))
    assert whole == [*epoch_order(5, 3, 0), *epoch_order(5, 3, 1), *list(epoch_order(5, 3, 2))[:2]]
    assert sorted(whole[:5]) == sorted(whole[5:10]) == list(range(5))
    assert whole[:5] != whole[5:10]
    assert len(RunOrder(5, 3, 12)) == len(whole) == 12
    assert list(RunOrder(5, 3, 40))[:12] == whole != list(RunOrder(5, 4, 12))
    monkeypatch.setattr(order, "LARGE", 5)
    large = list(RunOrder(5, 3, 12))
    assert large == [*order.LargeOrder(5, 3, 0), *order.LargeOrder(5, 3, 1), *list(order.LargeOrder(5, 3, 2))[:2]]


@given(windows=st.integers(1, 9), together=st.integers(1, 4), total=st.integers(0, 60))
def test_what_belongs_together_follows_one_another(windows, together, total):
    found = list(RunOrder(windows * together, 3, total, together))
    whole = list(RunOrder(windows, 3, -(-total // together)))
    assert found == [together * window + part for window in whole for part in range(together)][:total]


@given(total=st.integers(0, 30), size=st.integers(1, 4), ranks=st.integers(1, 4))
def test_a_rest_without_a_whole_batch_for_each_process_is_left_out(total, size, ranks):
    dealt = [list(DealtBatches(RunOrder(9, 0, total), size, rank, ranks)) for rank in range(ranks)]
    whole = total // (size * ranks)
    assert all(len(batches) == whole and all(len(batch) == size for batch in batches) for batches in dealt)


@given(count=st.integers(1, 40), size=st.integers(1, 5), ranks=st.integers(1, 5))
def test_every_held_out_item_counts_once_and_all_processes_have_as_many_batches(count, size, ranks):
    dealt = [list(HeldOutBatches(count, size, rank, ranks)) for rank in range(ranks)]
    sampler = HeldOutBatches(count, size, 0, ranks)
    assert {len(batches) for batches in dealt} == {len(sampler)}
    assert all(batch for batches in dealt for batch in batches)
    places = [(step, rank) for step in range(len(sampler)) for rank in range(ranks)]
    counted = [item for step, rank in places for item in dealt[rank][step][: sampler.counts(step)[rank]]]
    assert counted == list(range(count))


@pytest.mark.parametrize("pack", ["stream", "documents"])
def test_readers_open_only_the_shards_of_their_own_windows(tmp_path, pack, monkeypatch):
    folder = tmp_path / "set"
    make_set(folder, [[40, 17], [63], [9, 9, 30], [25]])
    made = windows_of(TokenSet(folder), 16, pack=pack, cache=str(tmp_path))
    whole = [made[i]["input_ids"].tolist() for i in RunOrder(len(made), 1, 2 * GLOBAL)]
    read, dealt = {}, steps(len(made), 1, 2 * GLOBAL, 4, 2, 0)
    for reader in range(4):
        windows = windows_of(TokenSet(folder), 16, pack=pack, cache=str(tmp_path))
        opened, shard = set(), windows.tokens.shard
        monkeypatch.setattr(windows.tokens, "shard", lambda n, o=opened, real=shard: (o.add(n), real(n))[1])
        mine = [(step, place) for step in range(2) for place in (2 * reader, 2 * reader + 1)]
        read |= {GLOBAL * step + place: windows[dealt[step][place]]["input_ids"].tolist() for step, place in mine}
        assert opened == {windows.place(dealt[step][place])[0] for step, place in mine}
    assert [read[place] for place in range(2 * GLOBAL)] == whole


class Spoiled:
    """Windows of which one ends the process that reads it, or keeps it waiting."""

    def __init__(self, windows, bad, spoil):
        self.windows, self.bad, self.spoil = windows, bad, spoil
        self.tokens, self.place = windows.tokens, windows.place

    def __getitem__(self, index):
        if index == self.bad:
            self.spoil()
        return self.windows[index]


@pytest.mark.parametrize(("spoil", "seconds", "said"), [
    (lambda: os._exit(1), 60, "died"),
    (lambda: time.sleep(600), 2, r"did not answer for 2 s \(data\.worker_timeout\)"),
])  # fmt: skip
def test_a_lost_worker_is_named_with_what_it_read(tmp_path, spoil, seconds, said, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # or it waits for the hung one
    make_set(tmp_path / "set", [[20], [30]])
    windows = NumberedWindows(Spoiled(windows_of(TokenSet(tmp_path / "set"), 5), 6, spoil), 1)
    loader = DataLoader(windows, batch_size=1, sampler=[6, 0], num_workers=1, timeout=seconds)
    message = rf"a data worker {said}: worker 0 was reading window 6 \(number 2 of .*00001\.tokens\)"
    with pytest.raises(ReadError, match=message), naming(windows, seconds):
        list(loader)


def test_other_errors_of_reading_are_unchanged():
    windows = NumberedWindows([{"input_ids": torch.tensor([1])}], 1)
    with pytest.raises(RuntimeError, match=r"^something else$"), naming(windows, 1):
        raise RuntimeError("something else")
    for lost in (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), ConnectionResetError("reset")):
        with pytest.raises(ReadError, match="died: no worker was reading a window"), naming(windows, 1):
            raise lost
    with pytest.raises(ConnectionResetError, match="reset"), naming(NumberedWindows([]), 1):
        raise ConnectionResetError("reset")
    assert windows.where(0) == "window 0"


def test_neither_workers_nor_evaluations_change_a_bit(make_config, finished):
    """Though the model has dropout."""
    assert_same_weights(finished.folder, train(make_config({"data.workers": 1}, eval_every=0)).folder)
