"""Interleaved repeats: every case once, then every case again, so that a slow moment of the machine affects all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.memory import return_scarce_memory
from subquad.memory import keep_freed_memory

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
LEAST, LEAST_SLOW, MOST = 5, 3, 25
"""Repeats: at least 5, or 3 if one call takes longer than `SLOW` seconds; at most 25."""
SLOW = 2.0
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
"""Messages of the allocators of a GPU, of a CPU, and of the system."""
FLUSHED_BYTES = 256 * 2**20
"""Bytes written before each call on a GPU, more than its last-level cache, so that inputs come from memory."""
HEAD_START = 10_000_000
"""Cycles, about 5 ms, that a GPU waits before each call, so that Python launches kernels ahead as in training."""


@dataclass(frozen=True)
class Run:
    """A case to time: `call(before())`, without the time of `before`."""

    call: Callable[[Any], object]
    before: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Seconds of the repeats in chronological order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.seconds)

    @property
    def p20(self) -> float:
        """Return the 20th percentile."""
        return self._cut(0)

    @property
    def p80(self) -> float:
        """Return the 80th percentile."""
        return self._cut(-1)

    def relative_to(self, base: Timing) -> float:
        """Return the median of the ratios to `base` in the same round; noise that lasts longer than a round cancels."""
        return statistics.median(time / other for time, other in zip(self.seconds, base.seconds, strict=True))

    def _cut(self, which: int) -> float:
        if len(self.seconds) == 1:
            return self.seconds[0]
        return statistics.quantiles(self.seconds, n=5, method="inclusive")[which]


@dataclass(frozen=True)
class Failure:
    """The reason why a case has no time; `status` is `out of memory`, `failed` or `skipped`."""

    status: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make a failure from an exception, and recognise a lack of memory by its type or message."""
        text = (str(error).strip() or type(error).__name__).partition("\n")[0]
        memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        memory = memory or (isinstance(error, RuntimeError) and any(m in str(error).lower() for m in OUT_OF_MEMORY))
        return cls("out of memory" if memory else "failed", text if memory else f"{type(error).__name__}: {text}")


def attempt(f: Callable[..., Result], *arguments: Any, **options: Any) -> Result | Failure:
    """Return the call's result, or a `Failure` after releasing the memory of the failed call."""
    try:
        return f(*arguments, **options)
    except Exception as error:
        failure = Failure.of(error)
    # Not inside the handler, where the traceback keeps every frame's tensors alive.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return failure


def wall_clock(run: Run) -> float:
    """Return the wall time in seconds until the result is ready."""
    given = run.before()
    _wait()
    start = time.perf_counter()
    run.call(given)
    _wait()
    return time.perf_counter() - start


def gpu_clock(run: Run) -> float:
    """Return the seconds between two events in the GPU's stream, while Python runs ahead of it as in training."""
    given = run.before()
    torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda").zero_()
    torch.cuda._sleep(HEAD_START)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run.call(given)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def clock_of(device: torch.device | str) -> Callable[[Run], float]:
    """Return the clock for operators and training steps on a device."""
    return gpu_clock if torch.device(device).type == "cuda" else wall_clock


def interleave(
    runs: Mapping[Key, Run],
    *,
    clock: Callable[[Run], float] = wall_clock,
    repeats: int | None = None,
    seconds: float = 20.0,
    most: int = MOST,
) -> dict[Key, Timing | Failure]:
    """Time each run `repeats` times in turns, after one uncounted call of each.

    If `repeats` is None, as many rounds run as fit into `seconds`: at least 5, or 3 if a call takes more than 2 s, and
    at most `most`. A run that fails isn't called again. The process keeps freed memory, unless it becomes scarce.
    """
    keep_freed_memory()
    taken: dict[Key, list[float]] = {key: [] for key in runs}
    failed: dict[Key, Failure] = {}

    def turn(*, counts: bool) -> None:
        for key, run in runs.items():
            if key in failed:
                continue
            result = attempt(clock, run)
            return_scarce_memory()
            if isinstance(result, Failure):
                failed[key] = result
            elif counts:
                taken[key].append(result)

    turn(counts=False)
    turn(counts=True)
    firsts = [found[0] for key, found in taken.items() if key not in failed]
    for _ in range(1, rounds(firsts, seconds, most) if repeats is None else repeats):
        turn(counts=True)
    gc.collect()  # garbage freed while memory is measured would lower the peak
    return {key: failed.get(key) or Timing(tuple(taken[key])) for key in runs}


def rounds(firsts: list[float], seconds: float, most: int = MOST) -> int:
    """Return the number of repeats for calls whose first times are `firsts`."""
    least = LEAST_SLOW if max(firsts, default=0.0) > SLOW else LEAST
    return max(least, min(most, int(seconds / max(sum(firsts), 1e-9))))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


COPIED = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Bytes of the copy, far beyond any cache."""
MULTIPLIED = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the multiplied matrices."""


def ceilings(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """Measure the bytes/s that a copy reads and writes, and the FLOP/s of a matrix product."""
    kind = torch.device(device).type
    source = torch.ones(COPIED[kind] // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    n = MULTIPLIED[kind]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    runs = {
        "copy_bytes_per_s": Run(lambda _: target.copy_(source)),
        "matmul_flops_per_s": Run(lambda _: torch.mm(a, b, out=product)),
    }
    work = {"copy_bytes_per_s": 2 * source.nbytes, "matmul_flops_per_s": 2 * n**3}
    found = interleave(runs, clock=clock_of(device), repeats=5)
    return {name: work[name] / timing.median for name, timing in found.items() if isinstance(timing, Timing)}
