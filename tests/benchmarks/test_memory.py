"""The peak memory of a call, and the check of free memory."""

import pytest
import torch

from benchmarks import memory


def test_the_peak_counts_results_and_nothing_allocated_before():
    def call():
        a, b = torch.empty(1000), torch.empty(1000)
        del a
        c = torch.empty(2000)
        del b
        return c

    assert memory.peak_bytes(call, "cpu") == 4 * 3000
    before = torch.ones(500)
    assert memory.peak_bytes(before.clone, "cpu") == 4 * 500
    assert memory.peak_bytes(before.zero_, "cpu") == 0


def test_more_memory_than_there_is_is_refused_before_it_is_taken(monkeypatch):
    memory.check_room(1, "cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**30)
    with pytest.raises(torch.OutOfMemoryError, match=r"needs about 3\.0 GiB, 1\.0 GiB are free"):
        memory.check_room(3 * 2**30, "cpu")
