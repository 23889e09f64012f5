"""What the machine has, and keeping what was freed."""

import ctypes
import subprocess
import sys

import pytest

from subquad import memory
from subquad.memory import free_bytes, keep_freed_memory, total_bytes

GROWS = """
import resource, torch
from subquad.memory import keep_freed_memory

def faults():
    cache = torch.ones(3000, 1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for row in range(80):
        cache = torch.cat((cache, torch.ones(10, 1000)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
assert keep_freed_memory()
print(given_back, faults())
"""
"""Page faults of a cache that grows, first where freed memory goes back, then where it is kept."""


def test_what_is_free_is_part_of_what_there_is():
    assert 0 < free_bytes("cpu") <= total_bytes("cpu")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="an option of glibc's allocator")
def test_a_cache_that_grows_gets_the_memory_that_was_freed():
    done = subprocess.run([sys.executable, "-c", GROWS], check=True, capture_output=True, text=True, timeout=60)
    given_back, kept = map(int, done.stdout.split())
    assert 2 * kept < given_back


def test_another_allocator_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not keep_freed_memory()
