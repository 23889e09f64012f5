"""How cache, time and memory of a token grow with the context; whether long inputs are finite in bfloat16."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from subquad.evaluation.audit._case import Case, compare, fails
from subquad.evaluation.audit._checks import Tokens, not_finite
from subquad.evaluation.audit._probe import Probe, Refused
from subquad.evaluation.audit._shrink import shrink
from subquad.evaluation.audit.adapter import tensors_in
from subquad.evaluation.audit.report import Check

LEVEL = 0.05
"""Values that differ by less than this part are called level."""
BF16_BUDGET = 40
"""Cases tried to shorten an input that is not finite in bfloat16."""


def growth(probe: Probe, source: Tokens, contexts: Sequence[int], repeats: int) -> list[Check]:
    """Findings about the cache, the time and the memory, of the model in its own dtype."""
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
    """Bytes of the cache after the rows, and the median seconds of the next tokens."""
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
    """In words how the last values go on."""
    contexts = sorted(values)
    last = values[contexts[-1]]
    if all(value == last for value in values.values()):
        return "constant"
    level = contexts[-1]
    for n in reversed(contexts):  # a window holds a token more or less where its border falls
        if abs(values[n] - last) > LEVEL * last:
            break
        level = n
    return f"level from {level:,} on" if level < contexts[-1] else f"about tokens^{power:.2f}"


def exponent(values: dict[int, float]) -> float:
    """The slope of log(value) over log(tokens), by least squares; 0 where a value is 0."""
    if min(values.values()) <= 0:
        return 0.0
    xs, ys = [math.log(n) for n in values], [math.log(value) for value in values.values()]
    x, y = statistics.fmean(xs), statistics.fmean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def cache_bytes(cache: Any, probe: Probe) -> int:
    """Bytes of all tensors in a cache, each storage once, the model's own left out."""
    own = {t.untyped_storage().data_ptr() for t in (*probe.model.parameters(), *probe.model.buffers())}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(cache)}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in own)


def largest_tensor(f: Callable[[], object], device: torch.device) -> int:
    """Bytes of the largest tensor that `f` makes, inside custom operations too."""
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds, profile_memory=True) as record:
        f()
    name = "self_device_memory_usage" if cuda else "self_cpu_memory_usage"
    return max((int(getattr(event, name)) for event in record.events()), default=0)


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


def bf16(make: Callable[[], Probe], source: Tokens, tokens: int, most: int | None, narrower: list[int]) -> Check:
    """A long input in bfloat16: finite, not finite (a violation), or the model's error (a finding)."""
    if not tokens:
        return Check("bf16", "not checked", "long is 0")
    length = tokens if most is None else min(tokens, most)
    try:
        probe = make()
    except Refused as error:
        return Check("bf16", "finding", f"the model does not go to bfloat16: {error}")
    refused = ""
    for n in (length, *reversed(narrower)):  # a model may take some lengths alone
        if n > length:
            continue
        case = Case("finite", (source.row(n),), dtype="bfloat16")
        try:
            found = compare(probe, case)
        except Refused as error:
            refused = refused or str(error)
            continue
        if found.worst == 0:
            return Check("bf16", "pass", f"{n:,} tokens: all logits are finite", None, {"length": n})
        short = shrink(case, lambda smaller: fails(probe, smaller, 0.0), BF16_BUDGET)
        where = {**compare(probe, short).first(0.0), "length": len(short.tokens[0]), "first_length": n}
        what = not_finite(probe, short, where)
        detail = f"output {where['output']} of {where['length']:,} tokens {what}; tried: {n:,} tokens"
        return Check("bf16", "violation", detail, None, where, short.to_dict())
    return Check("bf16", "finding", f"the model does not run in bfloat16: {refused}")
