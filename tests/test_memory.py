"""What a call holds at its worst moment, and what the machine has."""

import ctypes
import subprocess
import sys

import pytest
import torch

from subquad import memory
from subquad.memory import check_room, free_bytes, keep_freed_memory, peak_bytes, total_bytes

GROWS = """
import resource, sys, torch
from subquad.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
cache = torch.ones(9000, 1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for row in range(20):
    cache = torch.cat((cache, torch.ones(10, 1000)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Page faults of a cache that grows."""


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
    assert 0 < free_bytes("cpu") <= total_bytes("cpu")
    check_room(1, "cpu")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**30)
    with pytest.raises(torch.OutOfMemoryError, match=r"needs about 3\.0 GiB, 1\.0 GiB are free"):
        check_room(3 * 2**30, "cpu")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="an option of glibc's allocator")
def test_a_cache_that_grows_gets_the_memory_that_was_freed():
    def faults(way):
        command = [sys.executable, "-c", GROWS, way]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)

    assert 2 * faults("kept") < faults("given back")


def test_another_allocator_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not keep_freed_memory()
