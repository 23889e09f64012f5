"""Interleaved repeats: every case once, then every case again, so that a slow moment of the machine hits all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from subquad.memory import keep_freed_memory

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
LEAST, LEAST_SLOW, MOST = 5, 3, 25
"""Repeats: at least 5, or 3 where one call takes longer than `SLOW`; at most 25."""
SLOW = 2.0
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
"""Messages of the allocators: on a GPU, on a CPU, and of the system."""
FLUSHED_BYTES = 256 * 2**20
"""More than the last-level cache of a GPU: written before each call, so that inputs come from memory."""
HEAD_START = 10_000_000
"""Cycles, about 5 ms, that a GPU waits before each call: Python launches kernels meanwhile, as it does in training."""


@dataclass(frozen=True)
class Run:
    """One thing to time: `call(before())`, without the time of `before`."""

    call: Callable[[Any], object]
    before: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Seconds of the repeats, in the order in which they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def p20(self) -> float:
        """The 20th percentile."""
        return self._cut(0)

    @property
    def p80(self) -> float:
        """The 80th percentile."""
        return self._cut(-1)

    def _cut(self, which: int) -> float:
        if len(self.seconds) == 1:
            return self.seconds[0]
        return statistics.quantiles(self.seconds, n=5, method="inclusive")[which]


@dataclass(frozen=True)
class Failure:
    """Why there is no time: `status` is `out of memory`, `failed` or `skipped`."""

    status: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Tell a lack of memory from other exceptions."""
        text = (str(error).strip() or type(error).__name__).partition("\n")[0]
        memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        memory = memory or (isinstance(error, RuntimeError) and any(m in str(error).lower() for m in OUT_OF_MEMORY))
        return cls("out of memory" if memory else "failed", text if memory else f"{type(error).__name__}: {text}")


def attempt(f: Callable[..., Result], *arguments: Any, **options: Any) -> Result | Failure:
    """Return what the call returns, or a `Failure`; the memory of a failed call is given back."""
    try:
        return f(*arguments, **options)
    except Exception as error:
        failure = Failure.of(error)
    # Outside of the handler, since the traceback keeps the tensors of every frame.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return failure


def wall_clock(run: Run) -> float:
    """Seconds until the result is there."""
    given = run.before()
    _wait()
    start = time.perf_counter()
    run.call(given)
    _wait()
    return time.perf_counter() - start


def gpu_clock(run: Run) -> float:
    """Seconds between two events of the GPU's stream: its own time, where Python runs ahead of it as in training."""
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
    """The clock for operators and training steps on a device."""
    return gpu_clock if torch.device(device).type == "cuda" else wall_clock


def interleave(
    runs: Mapping[Key, Run],
    *,
    clock: Callable[[Run], float] = wall_clock,
    repeats: int | None = None,
    seconds: float = 20.0,
    most: int = MOST,
    told: Callable[[Key], None] = lambda _: None,
) -> dict[Key, Timing | Failure]:
    """Time each run `repeats` times, one after another in turns; the first call of each warms up and does not count.

    `repeats` None: as many rounds as fit into `seconds`, at least 5, or 3 where a call takes longer than two seconds,
    and at `most` so many.
    A run that fails is left out from there on. `told` hears of each call. The process keeps the memory that is freed.
    """
    keep_freed_memory()
    taken: dict[Key, list[float]] = {key: [] for key in runs}
    failed: dict[Key, Failure] = {}

    def turn(*, counts: bool) -> None:
        for key, run in runs.items():
            if key in failed:
                continue
            told(key)
            result = attempt(clock, run)
            if isinstance(result, Failure):
                failed[key] = result
            elif counts:
                taken[key].append(result)

    turn(counts=False)
    turn(counts=True)
    firsts = [found[0] for key, found in taken.items() if key not in failed]
    for _ in range(1, rounds(firsts, seconds, most) if repeats is None else repeats):
        turn(counts=True)
    gc.collect()  # what is released while memory is measured would count against what is taken
    return {key: failed.get(key) or Timing(tuple(taken[key])) for key in runs}


def rounds(firsts: list[float], seconds: float, most: int = MOST) -> int:
    """Return the number of repeats for calls whose first times are `firsts`."""
    least = LEAST_SLOW if max(firsts, default=0.0) > SLOW else LEAST
    return max(least, min(most, int(seconds / max(sum(firsts), 1e-9))))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


COPIED = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Bytes: far beyond any cache."""
MULTIPLIED = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices."""


def ceilings(device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second that a copy reads and writes, and FLOP a second of a matrix product, of the same run."""
    kind = torch.device(device).type
    source = torch.ones(COPIED[kind] // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    n = MULTIPLIED[kind]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    runs = {
        "copy": Run(lambda _: target.copy_(source)),
        "matmul": Run(lambda _: torch.mm(a, b, out=product)),
    }
    found = interleave(runs, clock=clock_of(device), repeats=5)
    times = {name: timing.median for name, timing in found.items() if isinstance(timing, Timing)}
    moved, done = 2 * source.nbytes, 2 * n**3
    return {
        **({"copy_bytes_per_s": moved / times["copy"]} if "copy" in times else {}),
        **({"matmul_flops_per_s": done / times["matmul"]} if "matmul" in times else {}),
    }
