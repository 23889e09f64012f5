"""Peak memory of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(f: Callable[[], object], device: torch.device | str) -> int:
    """Return the peak bytes of tensors that `f` holds, results included, beyond those held before.

    On a GPU this is the allocator's peak; on a CPU it is summed from the profiler's records of each allocation and
    release, which include custom operations.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = f()
        torch.cuda.synchronize()
        del kept
        return max(0, torch.cuda.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = f()
    del kept
    profiler: Any = record.profiler
    moves = [(e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, nbytes in sorted(moves, key=lambda move: move[0]):
        held += nbytes
        peak = max(peak, held)
    return peak
