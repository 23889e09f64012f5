"""Memory: total and free bytes, freed memory kept by the process, errors of too little, huge pages."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

TRIM_THRESHOLD, MMAP_MAX = -1, -4
ALLOCATOR = ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1))
"""Settings of glibc's `mallopt`: take every block from the heap, and never give free heap back."""
_TEXTS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
"""Texts of the RuntimeErrors that PyTorch raises when the CPU is out of memory."""
LEAST_BYTES = 4 << 20
"""Smaller tensors come from memory that the process already holds, so no huge pages are requested."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that the GPU or the CPU is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory for the rest of the process; return False if that can't be set.

    By default large blocks go back to the system when they are freed, 32 MiB and more always, and the pages of the next
    block are zeroed one by one. A cache that grows at each step is a new block each time, which takes more than half of
    the time of drawing with a cache on a CPU. So is each tensor of a long sequence: causal linear attention over 16,384
    tokens, 8 heads of 64 channels, takes 1.8 times as long.
    """
    if sys.platform != "linux":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and all(set_option(*option) for option in ALLOCATOR)


def free_threads(seconds: float = 0.2) -> int:
    """Return PyTorch's number of threads, limited to the cores that other processes leave free; at least 1.

    Threads of one operation wait for each other: if one of two cores is busy, two threads train half as fast as one.
    Sleeps for `seconds` to measure the cores. Returns PyTorch's number if the system doesn't tell.
    """
    threads = torch.get_num_threads()
    before = _busy_seconds()
    if before is None:
        return threads
    time.sleep(seconds)
    busy = round((sum((_busy_seconds() or before).values()) - sum(before.values())) / seconds)
    return max(1, min(threads, len(before) - busy))


def _busy_seconds() -> dict[int, float] | None:
    """Return the seconds that each core of this process has been busy since the system started; None if unknown."""
    file = Path("/proc/stat")
    if not file.is_file() or not hasattr(os, "sched_getaffinity"):
        return None
    found: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for line in file.read_text(encoding="ascii").splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in os.sched_getaffinity(0):
            user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, numbers[:8])
            found[int(name[3:])] = (user + nice + system + interrupts + soft + stolen) / tick
    return found or None


def free_bytes(device: torch.device | str) -> int | None:
    """Return the free bytes of the device; None if the system doesn't tell."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return _meminfo("MemAvailable")


def total_bytes(device: torch.device | str) -> int | None:
    """Return the total bytes of the device; None if the system doesn't tell."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int | None:
    file = Path("/proc/meminfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's `madvise`, or None without huge pages."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # a C library without it
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return `like.new_empty(shape)`, with huge pages for a large tensor on a CPU.

    A fresh tensor of 32 MiB costs about 13 ms in faults of 4 KiB pages, as long as half of linear attention over it; in
    pages of 2 MiB it costs 3 ms. Linux gives them only if advised (`transparent_hugepage/enabled` is `madvise` on most
    machines); the advice does not change the content.
    """
    x = like.new_empty(shape)
    if x.device.type != "cpu" or x.nbytes < LEAST_BYTES:
        return x
    advise = _madvise()
    if advise is not None:
        page = mmap.PAGESIZE
        start = -(-x.data_ptr() // page) * page
        advise(start, (x.data_ptr() + x.nbytes - start) // page * page, mmap.MADV_HUGEPAGE)
    return x


def empty_like(x: Tensor) -> Tensor:
    """Return `empty` in the shape of x, contiguous."""
    return empty(x, *x.shape)


def zeros_like(x: Tensor) -> Tensor:
    """Return zeros in the shape of x, contiguous."""
    return empty(x, *x.shape).zero_()
