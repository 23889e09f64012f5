"""Choose a backend: explicit requests never fall back, and the default is logged once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from subquad.config import suggest
from subquad.extras import is_installed
from subquad.program import install
from subquad.tracing import beyond_backward

logger = logging.getLogger(__name__)

BACKENDS = ("reference", "torch", "sequential", "flex", "triton")
P = ParamSpec("P")
R = TypeVar("R")

HAS_TRITON = is_installed("triton")
TENSOR_CORES = 8
"""Least major compute capability for tensor cores with bfloat16 and tf32, without which the kernels are slow."""
_requested: ContextVar[str | None] = ContextVar("subquad_backend", default=None)
_open: list[str] = []
"""Backends of the open `use_backend` blocks, the innermost last. torch.compile can read a list, but no `ContextVar`."""
_watching: list[dict[str, str]] = []
"""The dictionaries of open `defaults_taken` blocks."""


def no_kernels(device: torch.device) -> str:
    """Return why kernels are not the default on a device, and nothing if they are."""
    if device.type != "cuda":
        return "kernels are for GPUs"
    if not HAS_TRITON:
        return "the package triton is missing"
    return "" if has_tensor_cores(device) else f"compute capability below {TENSOR_CORES}.0: no tensor cores"


@contextmanager
def defaults_taken() -> Iterator[dict[str, str]]:
    """Yield a dictionary that collects the default backend of each engine that runs within the block, by its name."""
    taken: dict[str, str] = {}
    _watching.append(taken)
    try:
        yield taken
    finally:
        _watching.remove(taken)


def has_tensor_cores(device: torch.device) -> bool:
    """Return True for a GPU for which kernels are the default."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major >= TENSOR_CORES


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every engine whose `backend` is None on this one within the block; an engine without it raises.

    A compiled function is compiled once more for each backend; it obeys a block that any thread has entered.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; {suggest(backend, BACKENDS)}")
    token = None if torch.compiler.is_dynamo_compiling() else _requested.set(backend)
    _open.append(backend)
    try:
        yield
    finally:
        del _open[len(_open) - 1 - _open[::-1].index(backend)]  # the innermost: other threads open blocks too
        if token is not None:
            _requested.reset(token)


def choose(
    op: str,
    backend: str | None,
    available: tuple[str, ...],
    default: str | None,
    tensors: Sequence[Tensor] = (),
    state: Sequence[Tensor | None] = (),
    sizes: Mapping[str, tuple[int, int]] | None = None,
) -> str:
    """Return the backend for `op`: the argument, else the one of `use_backend`, else a default, which is logged once.

    For derivatives that only `reference` has (`beyond_backward`) the default is `reference`. Otherwise it is `default`,
    and if that is None, `triton` on a GPU whose kernels take the tensors and sizes, else `torch`. `sizes` maps the name
    of each size of a head to the size and the kernels' limit. Raises `ValueError` for an unknown name, a backend that
    `op` lacks, and `triton` if its package is missing or a size is above the limit, and `NotImplementedError` for such
    derivatives with another backend than `reference`.
    """
    beyond = beyond_backward(*tensors, *state)
    if backend is None:
        if torch.compiler.is_dynamo_compiling():
            backend = _open[-1] if _open else None
        else:
            backend = _requested.get()
    if backend is None:
        if default is None:
            default = "triton" if tensors[0].device.type == "cuda" and _kernels_suit(tensors, sizes or {}) else "torch"
        backend = "reference" if beyond else default
        if not torch.compiler.is_compiling():
            _log_once(op, backend)
            for taken in _watching:
                taken[op] = backend
        return backend
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r} for {op}; {suggest(backend, available)}")
    if backend not in available:
        raise ValueError(f"{op} has no backend {backend!r} here; it has {', '.join(available)}")
    if backend == "triton" and not HAS_TRITON:
        raise ValueError(f"backend 'triton' of {op} needs the package triton: {install('subquad[triton]')}")
    if beyond and backend != "reference":
        raise NotImplementedError(
            f"backend {backend!r} of {op} has no forward-mode derivative, and none by torch.func.grad; "
            "leave backend out, or take 'reference'"
        )
    for what, (size, most) in (sizes or {}).items() if backend == "triton" else ():
        if size > most:
            raise ValueError(f"backend 'triton' of {op} holds at most {most} {what} per head, got {size}")
    return backend


def _kernels_suit(tensors: Sequence[Tensor], sizes: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether the kernels of a scan suit the GPU, dtypes and sizes."""
    fitting = all(x.dtype != torch.float64 for x in tensors) and all(size <= most for size, most in sizes.values())
    return fitting and not no_kernels(tensors[0].device)


@functools.cache
def _log_once(op: str, backend: str) -> None:
    logger.info("%s runs on the %s backend", op, backend)


def autocast_enabled(device: str) -> bool:
    """Return True if autocast is on for this kind of device; torch itself raises for a kind that has none."""
    if torch.compiler.is_dynamo_compiling():
        # torch 2.11 cannot trace `is_autocast_available`; of the kinds it compiles for, meta alone has no autocast.
        return device != "meta" and torch.is_autocast_enabled(device)
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap `fn` to run with autocast off: engines widen their inputs and choose their precision themselves."""

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        if not autocast_enabled(device):
            return fn(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return fn(*args, **kwargs)

    return wrapped
