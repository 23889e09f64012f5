"""Time and peak memory of each form of the paper's Table 1 over tokens T and latents L, and their slopes.

Shape letters: H heads, T tokens, D channels of a head, L latents of a head.
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
from experiments.harness.curves import exponent
from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit
from subquad.attention import build
from subquad.memory import keep_freed_memory
from subquad.ops import block_attention, running_softmax
from subquad.ops.patterns import Causal

FITTED, WITHIN = 3, 0.25
"""Number of largest sizes that a slope is fitted to, and by how much it may exceed the printed order."""


def operator(form: str, H: int, T: int, D: int, L: int, device: str) -> Callable[[], Tensor]:
    """Return a forward call of a form on random float32 inputs. Linformer and Performer are whole layers."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, T, D, device=device) for _ in range(3))
    p, logits = torch.randn(1, H, T, L, device=device).softmax(-1), torch.randn(1, H, T, L, device=device)
    z = torch.randn(1, H, L, D, device=device)
    x = torch.randn(1, T, H * D, device=device)
    if form in ("linformer", "performer"):
        size = {"linformer": {"max_tokens": T, "projected": L}, "performer": {"features": L}}[form]
        layer = build(form, dim=H * D, num_heads=H, **size).to(device).eval()
        return lambda: layer(x)[0]
    calls: dict[str, Callable[[], Tensor]] = {
        "latte, vectorised": partial(vectorised, p, logits, v),
        "latte, chunked": lambda: running_softmax(p, logits, v).out,
        "latte, sequential": lambda: running_softmax(p, logits, v, backend="sequential").out,
        "latte, bidirectional": lambda: p @ (logits.softmax(-2).mT @ v),
        "attention, as defined": lambda: soft(q, k, v),
        "attention, fused": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "attention, Rabe-Staats": lambda: block_attention(q, k, v, Causal(), backend="sequential"),
        "perceiver": lambda: soft(z, read := soft(z, k, v), read),
    }
    return calls[form]


def vectorised(p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTD: Tensor) -> Tensor:
    """Compute equations 15 to 17 with all sums `[T, L, D]` at once, after subtracting the whole sequence's maximum."""
    e_BHTL = (logits_BHTL - logits_BHTL.amax(-2, keepdim=True)).exp()
    gamma_BHTL = p_BHTL / e_BHTL.cumsum(-2)
    beta_BHTLD = (e_BHTL[..., None] * v_BHTD[..., None, :]).cumsum(2)
    return (gamma_BHTL[..., None, :] @ beta_BHTLD).squeeze(-2)


def soft(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with its whole matrix of weights."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def run(unit: Unit) -> list[dict[str, Any]]:
    """Return the points of both sweeps and the slopes over the largest sizes."""
    s, rows = unit.settings, []
    keep_freed_memory()
    for sweep, sizes in s["sweeps"].items():
        shapes = [(n, s["latents"]) if sweep == "T" else (s["tokens"], n) for n in sizes]
        calls = [operator(unit.arm, s["heads"], T, s["channels"], L, s["device"]) for T, L in shapes]
        points = [
            {"row": "point", "sweep": sweep, "tokens": T, "latents": L, **timed, "peak_mib": memory(call, s["device"])}
            for (T, L), call, timed in zip(shapes, calls, times(calls, s["repeats"]), strict=True)
        ]
        largest = sizes[-FITTED:]
        slopes = {name: exponent(largest, [point[name] for point in points[-FITTED:]]) for name in ("ms", "peak_mib")}
        rows += points
        rows.append({"row": "fit", "sweep": sweep, "time_slope": slopes["ms"], "memory_slope": slopes["peak_mib"]})
        rows[-1]["range"] = f"{largest[0]:,} to {largest[-1]:,}"
    return rows


@torch.no_grad()
def times(calls: list[Callable[[], Tensor]], repeats: int) -> list[dict[str, float]]:
    """Return median, 20th and 80th percentile of each call's time; the calls take turns, after one uncounted turn."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, taken in zip(calls, seconds, strict=True):
            begin = time.perf_counter()
            if call().is_cuda:
                torch.cuda.synchronize()
            taken.append(1e3 * (time.perf_counter() - begin))
    cuts = [statistics.quantiles(taken[1:], n=5, method="inclusive") for taken in seconds]
    return [
        {"ms": statistics.median(taken[1:]), "p20_ms": low, "p80_ms": high}
        for taken, (low, *_, high) in zip(seconds, cuts, strict=True)
    ]


@torch.no_grad()
def memory(call: Callable[[], Tensor], device: str) -> float:
    """Return the peak memory of a call in MiB, with its result and without its inputs."""
    return peak_bytes(call, device) / 2**20


def judged(rows: list[dict[str, Any]], form: str, **orders: tuple[float, float]) -> tuple[str, str] | None:
    """Check that the mean slopes stay within the printed orders, given as (time, memory) in T and in L."""
    shown, holds = [], True
    for sweep, printed in orders.items():
        fits = [row for row in rows if row["arm"] == form and row["row"] == "fit" and row["sweep"] == sweep]
        if not fits:
            return None
        found = [statistics.mean(fit[name] for fit in fits) for name in ("time_slope", "memory_slope")]
        shown.append(f"time {sweep}^{found[0]:.2f}, memory {sweep}^{found[1]:.2f} ({sweep} = {fits[0]['range']})")
        holds = holds and all(a - b <= WITHIN for a, b in zip(found, printed, strict=True))
    return (HOLDS if holds else FAILS), "; ".join(shown)


claim_vectorised = partial(judged, form="latte, vectorised", T=(1, 1), L=(1, 1))
claim_sequential = partial(judged, form="latte, sequential", T=(1, 1), L=(1, 1))
claim_bidirectional = partial(judged, form="latte, bidirectional", T=(1, 1), L=(1, 1))
claim_chunked = partial(judged, form="latte, chunked", T=(1, 1), L=(1, 0))
claim_attention = partial(judged, form="attention, as defined", T=(2, 2))
claim_fused = partial(judged, form="attention, fused", T=(2, 1))
claim_rabe_staats = partial(judged, form="attention, Rabe-Staats", T=(2, 1))
claim_linformer = partial(judged, form="linformer", T=(1, 1), L=(1, 1))
claim_perceiver = partial(judged, form="perceiver", T=(1, 1), L=(1, 1))
claim_performer = partial(judged, form="performer", T=(1, 1), L=(1, 1))
