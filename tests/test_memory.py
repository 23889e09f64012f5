"""What the machine has, and keeping what was freed."""

import ctypes
import subprocess
import sys

import pytest

from subquad import memory
from subquad.memory import free_bytes, keep_freed_memory, total_bytes

GROWS = """
import resource, sys, torch
from subquad.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
cache = torch.ones(3000, 1000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for row in range(80):
    cache = torch.cat((cache, torch.ones(10, 1000)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Page faults of a cache that grows."""


def test_what_is_free_is_part_of_what_there_is():
    assert 0 < free_bytes("cpu") <= total_bytes("cpu")


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
