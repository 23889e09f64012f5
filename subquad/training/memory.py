"""Models and steps that run out of memory: errors with the sizes that were tried and sizes that would fit."""

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
from subquad.training.processes import device_type, world_size

GIB = 2**30
SHORTEST = 16
"""Shortest window that an error suggests, in tokens."""


def check_fits(model: nn.Module, config: TrainConfig) -> None:
    """Raise `ValueError` for a `model`, made on the device meta, that exceeds the machine's memory by itself.

    Each process keeps the weights and, unless LoRA freezes them, as many gradients, in float32.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    need = parameters * (4 if config.lora.rank else 8) / (world_size() if config.parallel.shard else 1)
    total = memory.total_bytes(device_type(config.run.device))
    if total is not None and need > total:
        raise ValueError(
            f"out of memory: {parameters:,} parameters take {need / GIB:,.1f} GiB in training by themselves, "
            f"and the machine has {total / GIB:,.1f} GiB; lower model.dim={config.model.dim} or "
            f"model.num_layers={config.model.num_layers}"
        )


def give_back(error: BaseException, model: nn.Module) -> None:
    """Free the memory of a failed step: the frames that `error` and its causes keep, and the gradients of `model`."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
    model.zero_grad()
    gc.collect()


WindowBytes = Callable[[TrainConfig, int], float | None]
"""Activation bytes that training keeps for one window of a length, by the model's own estimate; None without one."""


def explained(
    error: BaseException, config: TrainConfig, device: torch.device, window_bytes: WindowBytes
) -> StepMemoryError:
    """Return an error that names the step's sizes and smaller ones that see the same windows and fit."""
    batch = config.batch
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = (
        f"out of memory in a step of batch.size={batch.size} windows of batch.length={batch.length} tokens ({reason}). "
    )
    need, free = part_bytes(config, batch.length, window_bytes), free_bytes(device)
    known = need is not None and free is not None
    if need is not None and free is not None:
        text += f"Training keeps about {need / GIB:.2f} GiB per window in float32, and {free / GIB:.2f} GiB are free. "
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
        text += "Fewer windows at a time don't help: try " if known else "Try "
    recompute = "" if config.run.activation_checkpointing else "run.activation_checkpointing=true, "
    shorter = None if free is None else _length_that_fits(config, free, window_bytes)
    length = "a shorter batch.length" if shorter is None else f"batch.length={shorter}, which should fit,"
    return StepMemoryError(f"{text}{recompute}{length} or more processes (parallel.context)")


def largest_fit(size: int, need: float, free: float) -> int | None:
    """Return the largest proper divisor `n` of `size` with `n * need <= free`, both in bytes, or None."""
    return max((part for part in range(1, size) if size % part == 0 and part * need <= free), default=None)


def _length_that_fits(config: TrainConfig, free: float, window_bytes: WindowBytes) -> int | None:
    """Return the first of batch.length / 2, / 4, ... at which a single window fits into `free` bytes, or None."""
    length = config.batch.length // 2
    while length >= max(SHORTEST, config.parallel.context) and length % config.parallel.context == 0:
        need = part_bytes(config, length, window_bytes)
        if need is None or need <= free:
            return None if need is None else length
        length //= 2
    return None


def part_bytes(config: TrainConfig, length: int, window_bytes: WindowBytes) -> float | None:
    """Return a process's activation bytes for its part of a window; None without an estimate or with recomputation."""
    kept = None if config.run.activation_checkpointing else window_bytes(config, length)
    return None if kept is None else kept / config.parallel.context


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a step may still allocate, or None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = memory.free_bytes(device)
    return None if available is None else min(available, _limit_left())


def _limit_left() -> int:
    """Return the bytes of address space left under RLIMIT_AS (`ulimit -v`)."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 2**63
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - pages * resource.getpagesize())
