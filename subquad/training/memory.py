"""A step that needs more memory than there is: what was tried, and what would fit."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from subquad import memory
from subquad.training.config import TrainConfig
from subquad.training.errors import StepMemoryError

_TEXTS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
"""Texts of PyTorch's RuntimeErrors where the CPU has no memory left."""
GIB = 2**30
SHORTEST = 16
"""Tokens of a window that is still worth a try."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def give_back(error: BaseException, model: nn.Module) -> None:
    """Let go of what a step that failed holds: its frames, which the error keeps, and the gradients."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
    model.zero_grad()
    gc.collect()


WindowBytes = Callable[[TrainConfig, int], float | None]
"""Bytes that training keeps of one window of this length, by the account of the task's model; None without one."""


def explained(
    error: BaseException, config: TrainConfig, device: torch.device, window_bytes: WindowBytes
) -> StepMemoryError:
    """Return the error that says which step was too large, and which smaller one sees the same windows and fits."""
    batch = config.batch
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = (
        f"out of memory in a step of batch.size={batch.size} windows of batch.length={batch.length} tokens ({reason}). "
    )
    need, free = part_bytes(config, batch.length, window_bytes), free_bytes(device)
    known = need is not None and free is not None
    if need is not None and free is not None:
        text += f"Training keeps about {need / GIB:.2f} GiB a window, in float32, and {free / GIB:.2f} GiB are free. "
        size = largest_fit(batch.size, need, free)
    else:
        size = largest_fit(batch.size, 1, batch.size // 2)
    if size is not None:
        accumulation = batch.accumulation * batch.size // size
        text += (
            f"batch.size={size} with batch.accumulation={accumulation} sees the same windows in each step and "
            f"{'should fit' if known else 'needs less'}; else try "
        )
    else:
        text += "Fewer windows at a time do not help: try " if known else "Try "
    recompute = "" if config.run.activation_checkpointing else "run.activation_checkpointing=true, "
    shorter = None if free is None else _length_that_fits(config, free, window_bytes)
    length = "a shorter batch.length" if shorter is None else f"batch.length={shorter}, of which a window should fit,"
    return StepMemoryError(f"{text}{recompute}{length} or more processes (parallel.context)")


def largest_fit(size: int, need: float, free: float) -> int | None:
    """The largest proper divisor of `size` so that as many windows of `need` bytes fit into `free`; None for none."""
    return max((part for part in range(1, size) if size % part == 0 and part * need <= free), default=None)


def _length_that_fits(config: TrainConfig, free: float, window_bytes: WindowBytes) -> int | None:
    """The longest window, a half, a quarter and so on of the one that is too long, that fits by itself."""
    length = config.batch.length // 2
    while length >= max(SHORTEST, config.parallel.context) and length % config.parallel.context == 0:
        need = part_bytes(config, length, window_bytes)
        if need is None or need <= free:
            return None if need is None else length
        length //= 2
    return None


def part_bytes(config: TrainConfig, length: int, window_bytes: WindowBytes) -> float | None:
    """Return the bytes that training keeps of a process's part of one window of `length` tokens.

    None for a model without an account, and where layers are computed again (`run.activation_checkpointing`).
    """
    kept = None if config.run.activation_checkpointing else window_bytes(config, length)
    return None if kept is None else kept / config.parallel.context


def free_bytes(device: torch.device) -> int | None:
    """Bytes of memory that a step may still take; None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = memory.free_bytes(device)
    return None if available is None else min(available, _limit_left())


def _limit_left() -> int:
    """Bytes of address space that the process may still take (ulimit -v)."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 2**63
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - pages * resource.getpagesize())
