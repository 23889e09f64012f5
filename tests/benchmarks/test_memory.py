"""The peak memory of a call."""

import torch

from benchmarks.memory import peak_bytes


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
