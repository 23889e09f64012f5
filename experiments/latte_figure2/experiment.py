"""Time and memory of Latte and attention over the length, side by side in one process, and where Latte becomes faster.

Shape letters: B batch, H heads, T tokens, D channels of a head, L latents of a head.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.memory import peak_bytes
from benchmarks.operators import unfused_attention
from experiments.harness.curves import crossover, means
from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit
from subquad.memory import keep_freed_memory
from subquad.ops import block_attention, running_softmax
from subquad.ops.patterns import Causal

BASE, PLAIN, OURS = "attention, fused", "attention, unfused", "latte, chunked"
Calls = dict[tuple[str, int], Callable[[], Tensor]]


def operators(s: dict[str, Any], T: int) -> Calls:
    """Return a forward call on random inputs for each form and number of latents (0 for attention)."""
    torch.manual_seed(0)
    H, D, device, dtype = s["heads"], s["channels"], s["device"], getattr(torch, s["dtype"])
    q, k, v = (torch.randn(s["batch"], H, T, D, device=device, dtype=dtype) for _ in range(3))
    calls: Calls = {
        (BASE, 0): lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (PLAIN, 0): lambda: unfused_attention(q, k, v),
        ("attention, Rabe-Staats", 0): lambda: block_attention(q, k, v, Causal(), backend="sequential"),
    }
    for latents in s["latents"]:
        logits, p = (torch.randn(s["batch"], H, T, latents // H, device=device, dtype=dtype) for _ in range(2))
        p = p.softmax(-1)
        calls |= {
            (OURS, latents): partial(latte, p, logits, v, None),
            ("latte, token by token", latents): partial(latte, p, logits, v, "sequential"),
            ("latte, bidirectional", latents): partial(bidirectional, p, logits, v),
            ("latte, naive", latents): partial(naive, p, logits, v),
        }
    too_long = {form for form, longest in s["longest"].items() if longest < T}
    return {key: call for key, call in calls.items() if key[0] not in too_long}


def latte(p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTD: Tensor, backend: str | None) -> Tensor:
    """Return causal Latte with a running maximum."""
    return running_softmax(p_BHTL, logits_BHTL, v_BHTD, backend=backend).out


def bidirectional(p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTD: Tensor) -> Tensor:
    """Return bidirectional Latte (equation 9)."""
    return p_BHTL @ (logits_BHTL.softmax(-2).mT @ v_BHTD)


def naive(p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTD: Tensor) -> Tensor:
    """Return causal Latte by equations 15 to 17 in float32, without a maximum, keeping all `[T, L, D]` sums."""
    e_BHTL = logits_BHTL.float().exp()
    beta_BHTLD = (e_BHTL[..., None] * v_BHTD.float()[..., None, :]).cumsum(2)
    return ((p_BHTL / e_BHTL.cumsum(-2))[..., None, :] @ beta_BHTLD).squeeze(-2).to(v_BHTD.dtype)


@torch.no_grad()
def run(unit: Unit) -> list[dict[str, Any]]:
    """Time all forms in turns at each length."""
    s, rows = unit.settings, []
    keep_freed_memory()
    for T in s["tokens"]:
        calls = operators(s, T)
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
        for _ in range(s["repeats"] + 1):
            for key, call in calls.items():
                begin = time.perf_counter()
                if call().is_cuda:
                    torch.cuda.synchronize()
                seconds[key].append(time.perf_counter() - begin)
        base = statistics.median(seconds[BASE, 0][1:])
        for (form, latents), taken in seconds.items():
            low, *_, high = statistics.quantiles(taken[1:], n=5, method="inclusive")
            rows.append({"form": form, "latents": latents, "tokens": T, "ms": 1e3 * statistics.median(taken[1:])})
            rows[-1] |= {"p20_ms": 1e3 * low, "p80_ms": 1e3 * high, "times_faster": base / statistics.median(taken[1:])}
            rows[-1]["peak_mib"] = peak_bytes(calls[form, latents], s["device"]) / 2**20
    return rows


def mean(rows: list[dict[str, Any]], form: str, latents: int, name: str = "times_faster") -> dict[int, float]:
    """Return the mean of a column over the seeds, by length."""
    return means(rows, "tokens", name, form=form, latents=latents)


def latents_of(rows: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of latents without attention's 0."""
    return sorted({row["latents"] for row in rows} - {0})


def faster(rows: list[dict[str, Any]], than: str) -> dict[int, dict[int, float]]:
    """Return how many times as fast as a form of attention causal Latte is, by latents and length."""
    base = mean(rows, than, 0, "ms")
    return {n: {T: base[T] / ms for T, ms in mean(rows, OURS, n, "ms").items() if T in base} for n in latents_of(rows)}


def claim_crossover(rows: list[dict[str, Any]], than: str = BASE) -> tuple[str, str] | None:
    """Find the length from which causal Latte beats a form of attention, for each number of latents."""
    found = faster(rows, than)
    if not all(found.values()):
        return None
    shown = "; ".join(f"L {latents}: {crossover(ratios)}" for latents, ratios in found.items())
    return (HOLDS if all(ratios[max(ratios)] > 1 for ratios in found.values()) else FAILS), shown


claim_crossover_unfused = partial(claim_crossover, than=PLAIN)


def claim_beats_rabe_staats(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Compare with Rabe and Staats's attention at every length and number of latents."""
    found = faster(rows, "attention, Rabe-Staats")
    ratios = {(n, T): ratio for n, by_length in found.items() for T, ratio in by_length.items()}
    if not ratios:
        return None
    worst = min(ratios, key=lambda key: ratios[key])
    best = max(ratios, key=lambda key: ratios[key])
    shown = [f"{ratios[key]:.2f} times as fast at L {key[0]}, T {key[1]:,}" for key in (worst, best)]
    return (HOLDS if ratios[worst] > 1 else FAILS), " to ".join(shown)


def claim_linear(rows: list[dict[str, Any]], name: str = "ms") -> tuple[str, str] | None:
    """Check that a column's exponents over the longest lengths are 1 (Latte) and 2 (attention), within 0.25."""
    attention = {PLAIN, BASE} if name == "ms" else {PLAIN}
    if not attention <= {row["form"] for row in rows}:
        return None
    shown, holds = [], True
    orders = [(OURS, min(latents_of(rows)), 1), (OURS, max(latents_of(rows)), 1)]
    for form, latents, order in orders + [(form, 0, 2) for form in sorted(attention)]:
        values = mean(rows, form, latents, name)
        a, b = sorted(values)[-2:]
        slope = math.log(values[b] / values[a]) / math.log(b / a)
        shown.append(f"{form}{f', L {latents}' if latents else ''}: T^{slope:.2f} ({a:,} to {b:,})")
        holds = holds and abs(slope - order) <= 0.25
    return (HOLDS if holds else FAILS), "; ".join(shown)


claim_memory = partial(claim_linear, name="peak_mib")


def claim_naive_memory(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that the naive form needs over twice the memory of chunks and scan at the longest common length."""
    latents = max(latents_of(rows))
    peaks = [mean(rows, f"latte, {name}", latents, "peak_mib") for name in ("naive", "chunked", "token by token")]
    T = max(set(peaks[0]) & set(peaks[1]) & set(peaks[2]))
    shown = f"{peaks[0][T]:,.0f} MiB, chunks {peaks[1][T]:,.1f}, scan {peaks[2][T]:,.1f} (L {latents}, T {T:,})"
    return (HOLDS if peaks[0][T] > 2 * max(peaks[1][T], peaks[2][T]) else FAILS), shown
