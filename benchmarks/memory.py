"""The most memory that a call holds, and a refusal before it takes more than there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from subquad.memory import free_bytes


def peak_bytes(f: Callable[[], object], device: torch.device | str) -> int:
    """Bytes of tensors that `f` holds at the worst moment, its results among them, beyond those held before.

    On a GPU by the allocator's own peak, on a CPU by what the profiler says of every allocation and release, those
    inside custom operations too.
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


def check_room(needed: int, device: torch.device | str) -> None:
    """Raise `torch.OutOfMemoryError` where `needed` bytes are not free.

    A CPU's allocator grants more than there is, and the system ends the process when it is used.
    """
    free = free_bytes(device)
    if free is not None and needed > free:
        raise torch.OutOfMemoryError(f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
