"""What a call holds at its worst moment, and the refusal of what does not fit."""

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import check_room, peak_bytes


def test_the_peak_is_that_of_the_worst_moment():
    def call():
        a, b = torch.empty(1000), torch.empty(1000)
        del a
        c = torch.empty(2000)
        del b
        return c

    assert peak_bytes(call, "cpu") == 4 * 3000


def test_what_was_there_before_does_not_count_and_results_do():
    before = torch.ones(500)
    assert peak_bytes(before.clone, "cpu") == 4 * 500
    assert peak_bytes(before.zero_, "cpu") == 0


def test_more_memory_than_there_is_is_refused_before_it_is_taken(monkeypatch):
    check_room(1, "cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**30)
    with pytest.raises(torch.OutOfMemoryError, match=r"needs about 3\.0 GiB, 1\.0 GiB are free"):
        check_room(3 * 2**30, "cpu")
