"""A copy of the model in a given dtype: its calls, the effect of rounding on its logits, the growth of its costs.

Shape letters: B batch, T tokens, M outputs, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.evaluation.audit.adapters import Adapter, tensors_in
from subquad.evaluation.audit.report import Check
from subquad.inference import device_of

logger = logging.getLogger(__name__)

REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, ArithmeticError)
"""Exceptions by which a model may refuse an input."""
MARGIN = 32
"""Width of the band, in roundings of every weight, since every layer and sum rounds its activations too."""
STEP = 256
"""Size of a weight perturbation, in roundings: large against the rounding of the pass itself, small enough that an
expert router seldom switches experts."""
DRAWS = 5
"""Perturbations, of which the median counts."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "own": None}


class Refused(Exception):  # noqa: N818 (not an error of the audit: the model refuses the input)
    """The model raised an error for an input; the message is the model's."""


class Probe:
    """A copy of a model in eval mode and `dtype` (None: its own), with the calls that the checks make."""

    def __init__(self, model: nn.Module, adapter: Adapter, dtype: torch.dtype | None) -> None:
        try:
            self.model = copy.deepcopy(model).eval()
        except REFUSALS as error:
            raise ValueError(f"an audit works on a copy of the model, and it can't be copied: {error}") from error
        self.original = model
        self.adapter = adapter
        self.device = device_of(model)
        try:
            self.model = self.model if dtype is None else self.model.to(dtype)
        except REFUSALS as error:
            raise Refused(_text(error)) from error
        weights = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        self.dtype = weights[0] if weights else torch.get_default_dtype()
        self.logits_seen = 0
        """Width V of the logits of the last call, 0 before the first."""

    def full(self, rows: Sequence[Sequence[int]] | Tensor, mask_BT: Tensor | None = None) -> Tensor:
        """Return the logits `[B, M, V]` of one pass; `Refused` if the model raises."""
        tokens_BT = self.tensor(rows)
        mask_BT = None if mask_BT is None else mask_BT.to(self.device)
        with computing(self.device), refusing():
            logits_BMV = self.adapter.full(self.model, tokens_BT, mask_BT)
        return self.checked(logits_BMV, tokens_BT)

    def step(self, rows: Sequence[Sequence[int]] | Tensor, cache: Any, mask_BS: Tensor | None) -> tuple[Tensor, Any]:
        """Continue from a cache; return logits `[B, M, V]` and the new cache; `Refused` if the model raises."""
        tokens_BT = self.tensor(rows)
        mask_BS = None if mask_BS is None else mask_BS.to(self.device)
        with computing(self.device), refusing():
            logits_BMV, cache = self.adapter.step(self.model, tokens_BT, cache, mask_BS)
        return self.checked(logits_BMV, tokens_BT), cache

    def tensor(self, rows: Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Return tokens `[B, T]` on the model's device."""
        return torch.as_tensor(rows, dtype=torch.int64, device=self.device)

    def checked(self, logits_BMV: Tensor, tokens_BT: Tensor) -> Tensor:
        """Return the detached logits; `Refused` if their shape doesn't fit the tokens."""
        (B, T), (rows, outputs) = tokens_BT.shape, logits_BMV.shape[:2]
        if rows != B or outputs > T:
            raise Refused(f"the logits have shape {list(logits_BMV.shape)} for tokens {[B, T]}")
        self.logits_seen = logits_BMV.shape[2]
        return logits_BMV.detach()

    def narrowest(self, rows: Sequence[Sequence[int]]) -> torch.dtype:
        """Return the least precise floating dtype that any operation of a pass returns."""
        with _Dtypes() as seen:
            self.full(rows)
        return max(seen.dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=self.dtype)

    def unit(self, narrowest: torch.dtype) -> float:
        """Return one relative rounding; 2^-8 for float32 on a GPU whose matmuls may use TF32 or bfloat16."""
        fewer = self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        eps = torch.finfo(narrowest).eps
        return max(eps, 2.0**-8) if fewer and narrowest == torch.float32 else eps

    def band(self, rows: Sequence[Sequence[int]], narrowest: torch.dtype, seed: int) -> tuple[float, float]:
        """Return the band, how far rounding alone may move a logit, and the largest logit.

        The band is `MARGIN` times the effect of one rounding of every weight on the logit that moves most. To measure
        it, weights are multiplied by 1 + s d with random signs s and d = `STEP` roundings; the largest change (median
        of `DRAWS` draws) is divided by `STEP`. The band is at least `MARGIN` roundings of the largest logit, and 0 if a
        logit is not finite.
        """
        unit = self.unit(narrowest)
        before = wide(self.full(rows))
        scale = before.abs().max().item()
        if not math.isfinite(scale):
            return 0.0, scale
        changes = []
        for draw in range(DRAWS):
            with self._perturbed(STEP * unit, seed + draw):
                changes.append((wide(self.full(rows)) - before).abs().max().item() / STEP)
        one = statistics.median(changes)
        return MARGIN * max(one if math.isfinite(one) else 0.0, unit * scale), scale

    @contextmanager
    def _perturbed(self, size: float, seed: int) -> Iterator[None]:
        """Perturb every weight by the relative `size`, with random signs, within the block."""
        weights = [p for p in self.model.parameters() if p.is_floating_point()]
        generator = torch.Generator().manual_seed(seed)
        kept = [p.detach().clone() for p in weights]
        try:
            with torch.no_grad():
                for p in weights:
                    signs = torch.randint(0, 2, p.shape, generator=generator).mul_(2).sub_(1)
                    p.mul_(1 + size * signs.to(p.device, p.dtype))
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(weights, kept, strict=True):
                    p.copy_(value)


def make_probe(model: nn.Module, adapter: Adapter, dtype: str, lengths: Sequence[int]) -> tuple[Probe, list[int]]:
    """Return a probe in the widest dtype that takes one of `lengths`, and those; else the model's own `ValueError`."""
    tried: dict[str, str] = {}
    for name in ("float64", "float32", "own") if dtype == "auto" else (dtype,):
        try:
            probe = Probe(model, adapter, DTYPES[name])
        except Refused as error:
            tried[name] = str(error)
            continue
        taken = []
        for length in lengths:
            try:
                probe.full([[0] * length])
                taken.append(length)
            except Refused as error:
                tried.setdefault(name, str(error))
        if taken:
            return probe, taken
        logger.info("the model does not run in %s: %s", name, tried[name])
    reasons = "; ".join(f"in {name}: {text}" for name, text in tried.items())
    raise ValueError(f"the model takes no sequence of {', '.join(map(str, lengths))} tokens: {reasons}")


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Disable gradients and autocast within the block."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def refusing() -> Iterator[None]:
    """Turn an exception of the model within the block into `Refused`."""
    try:
        yield
    except REFUSALS as error:
        raise Refused(_text(error)) from error


def wide(logits: Tensor) -> Tensor:
    """Return the logits in float64, on the CPU."""
    return logits.detach().cpu().double()


def _text(error: BaseException) -> str:
    """Return the type and the first 300 characters of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


class _Dtypes(TorchDispatchMode):
    """Record the floating dtypes that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                self.dtypes.add(tensor.dtype)
        return result


LEVEL = 0.05
"""Largest relative difference between values that are reported as level."""


class Tokens:
    """A source of random tokens, or of pieces of a text."""

    def __init__(self, vocab_size: int, seed: int, text: Sequence[int] | None) -> None:
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.text = None if text is None else [int(token) for token in text]
        if self.text is not None and not self.text:
            raise ValueError("text must hold at least one token, got none; omit it for random tokens")
        if self.text is not None and not all(0 <= token < vocab_size for token in self.text):
            raise ValueError(
                f"text must hold tokens between 0 and {vocab_size - 1}, got {min(self.text)} to {max(self.text)}"
            )

    def row(self, length: int) -> tuple[int, ...]:
        """Return one sequence; one of a text starts at a random place and wraps around at the end."""
        if self.text is not None:
            start = int(torch.randint(len(self.text), (), generator=self.generator))
            return tuple(self.text[(start + i) % len(self.text)] for i in range(length))
        return tuple(torch.randint(self.vocab_size, (length,), generator=self.generator).tolist())

    def rows(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        """Return `batch` sequences."""
        return tuple(self.row(length) for _ in range(batch))

    def other(self, row: Sequence[int]) -> tuple[int, ...]:
        """Return a different token in each place."""
        steps = torch.randint(1, self.vocab_size, (len(row),), generator=self.generator).tolist()
        return tuple((token + step) % self.vocab_size for token, step in zip(row, steps, strict=True))


def growth(probe: Probe, source: Tokens, contexts: Sequence[int], repeats: int) -> list[Check]:
    """Return findings on the growth of cache, time and memory with the context."""
    most = probe.adapter.max_tokens(probe.model)
    room = [n for n in sorted(set(contexts)) if most is None or n + repeats + 2 <= most]
    names = ("state growth", "time growth", "memory growth")
    if len(room) < 2:
        reason = "contexts is empty" if not contexts else "the model has positions for fewer than two of the contexts"
        return [Check(name, "not checked", reason) for name in names]
    no_cache = probe.adapter.no_cache(probe.model)
    states, times, memory = dict[int, float](), dict[int, float](), dict[int, float]()
    refused = no_cache
    for n in room:
        rows = [source.row(n)]
        try:
            memory[n] = largest_tensor(partial(probe.full, rows), probe.device)
            if no_cache:
                times[n] = _seconds(partial(probe.full, rows), repeats, probe.device) / n
            else:
                states[n], times[n] = _step(probe, source, rows, repeats)
        except Refused as error:
            refused = str(error)
    per = "of a full pass a token (no cache)" if no_cache else "of a token after the cache"
    return [
        _finding("state growth", states, _bytes, "the cache of one sequence", refused),
        _finding("time growth", times, lambda s: f"{1e3 * s:.3g} ms", per, refused),
        _finding("memory growth", memory, _bytes, "the largest tensor of a full pass", refused),
    ]


def _step(probe: Probe, source: Tokens, rows: Sequence[Sequence[int]], repeats: int) -> tuple[int, float]:
    """Return the bytes of the cache after `rows` and the median seconds of a next token."""
    cache = probe.step(rows, None, None)[1]
    nbytes = cache_bytes(cache, probe)
    seconds = []
    for _ in range(repeats + 2):
        token = [[source.row(1)[0]]]
        begin = _now(probe.device)
        cache = probe.step(token, cache, None)[1]
        seconds.append(_now(probe.device) - begin)
    return nbytes, statistics.median(seconds[2:])


def _seconds(f: Callable[[], object], repeats: int, device: torch.device) -> float:
    found = []
    for _ in range(repeats):
        begin = _now(device)
        f()
        found.append(_now(device) - begin)
    return statistics.median(found)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _finding(
    name: str, values: dict[int, float], unit: Callable[[float], str], what: str, refused: str | None
) -> Check:
    if len(values) < 2:
        return Check(name, "not checked", refused or "fewer than two contexts could be measured")
    power = exponent(values)
    where = {"values": {str(context): value for context, value in values.items()}, "exponent": power}
    shown = ", ".join(f"{unit(value)} at {context:,}" for context, value in values.items())
    return Check(name, "finding", f"{what}: {shown} tokens: {_grows(values, power)}", None, where)


def _grows(values: dict[int, float], power: float) -> str:
    """Describe the growth of values with the context: constant, level from some context on, or a power."""
    contexts = sorted(values)
    last = values[contexts[-1]]
    if all(value == last for value in values.values()):
        return "constant"
    level = contexts[-1]
    for n in reversed(contexts):  # LEVEL allows for a window that holds a token more or less
        if abs(values[n] - last) > LEVEL * last:
            break
        level = n
    return f"level from {level:,} on" if level < contexts[-1] else f"about tokens^{power:.2f}"


def exponent(values: dict[int, float]) -> float:
    """Return the least-squares slope of log(value) over log(tokens); 0 if a value is 0."""
    if min(values.values()) <= 0:
        return 0.0
    xs, ys = [math.log(n) for n in values], [math.log(value) for value in values.values()]
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def cache_bytes(cache: Any, probe: Probe) -> int:
    """Return the bytes of a cache's storages, each counted once, excluding the model's parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*probe.model.parameters(), *probe.model.buffers())}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(cache)}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in own)


def largest_tensor(f: Callable[[], object], device: torch.device) -> int:
    """Return the bytes of the largest tensor that `f` allocates, also within custom operations."""
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    # `acc_events`: torch 2.11 warns of cycles without it, of which there is one.
    with profile(activities=kinds, profile_memory=True, acc_events=True) as record:
        f()
    name = "self_device_memory_usage" if cuda else "self_cpu_memory_usage"
    return max((int(getattr(event, name)) for event in record.events()), default=0)


def _bytes(number: float) -> str:
    power = min(3, int(math.log(max(1, number), 1024)))
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
