"""Large results on a CPU: most of what a linear-time engine spends on them is the kernel handing out pages.

A fresh tensor of 32 MiB costs about 13 ms in faults of 4 KiB pages, as long as half of linear attention over it; in
pages of 2 MiB it costs 3 ms. Linux gives those on advice alone (`transparent_hugepage/enabled` is `madvise` on most
machines), and the advice changes no content.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

from torch import Tensor

LEAST_BYTES = 4 << 20
"""Smaller tensors come from memory that the process holds already."""


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's `madvise`, where there are huge pages to ask for."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # a C library without it
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def empty(like: Tensor, *shape: int) -> Tensor:
    """`like.new_empty(shape)`; on a CPU a large one asks for huge pages."""
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
    """`empty` of the shape of x, contiguous."""
    return empty(x, *x.shape)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros in the shape of x, contiguous."""
    return empty(x, *x.shape).zero_()
