"""The peak memory of a call, and freed memory that goes back to the system."""

import sys

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import peak_bytes, return_scarce_memory


def test_the_peak_counts_results_and_nothing_allocated_before():
    def call():
        a, b = torch.empty(1000), torch.empty(1000)
        del a
        c = torch.empty(2000)
        del b
        return c

    assert peak_bytes(call, "cpu") == 4 * 3000
    before = torch.ones(500)
    assert peak_bytes(before.clone, "cpu") == 4 * 500
    assert peak_bytes(before.zero_, "cpu") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_freed_memory_goes_back_to_the_system_only_when_it_is_scarce(monkeypatch):
    asked = []
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: type("C", (), {"malloc_trim": asked.append}))
    monkeypatch.setattr(memory, "total_bytes", lambda device: 100)
    for free in (100, 51, 50, 1, None):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        return_scarce_memory()
    assert asked == [0, 0]
