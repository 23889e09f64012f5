"""Peak memory of a call, and freed memory that has become scarce."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from subquad.memory import free_bytes, total_bytes


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


def return_scarce_memory() -> bool:
    """Give freed memory back to the system if less than half of all is left; return whether it did.

    Tensors of many sizes leave holes in a heap that keeps all of it. transformers' delta rule, whose loop saves 63 of
    growing size, holds 0.9 GiB at 16,384 tokens and took 24 GiB after a few calls.
    """
    free, total = free_bytes("cpu"), total_bytes("cpu")
    if sys.platform != "linux" or free is None or total is None or free > total // 2:
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
