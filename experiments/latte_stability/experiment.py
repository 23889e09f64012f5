"""Compare ways to sum exponentials of growing logits with the definition in float64: errors, gradients, causality.

Shape letters: B batch, H heads, T tokens, S summed tokens, D channels, L latents.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.harness.noise import FAILS, HOLDS
from experiments.harness.units import Unit
from subquad.ops import running_softmax

Method = Callable[[Tensor, Tensor, Tensor], Tensor]
LARGEST = 10_000.0
"""Largest logits that the search for a method's limit tries."""
ROUNDINGS = 32
"""Error that counts as exact, in roundings of the dtype relative to the largest output."""


def sums(p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTD: Tensor, *, maximum: bool) -> Tensor:
    """Compute equations 15 to 17 by cumulative sums in the dtype; `maximum` first subtracts the whole sequence's."""
    if maximum:
        logits_BHTL = logits_BHTL - logits_BHTL.amax(-2, keepdim=True)
    e_BHTL = logits_BHTL.exp()
    beta_BHTLD = (e_BHTL[..., None] * v_BHTD[..., None, :]).cumsum(2)
    return ((p_BHTL / e_BHTL.cumsum(2))[..., None, :] @ beta_BHTLD).squeeze(-2)


def running(p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTD: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute the library's sums with a running maximum."""
    return running_softmax(p_BHTL, logits_BHTL, v_BHTD, backend=backend).out


def defined(p_BHTL: Tensor, logits_BHTL: Tensor, v_BHTD: Tensor) -> Tensor:
    """Compute `sum_l p(l | t) sum_s softmax_{s <= t}(logits_sl) v_s` from every single weight."""
    T = logits_BHTL.shape[2]
    future_TS1 = torch.ones(T, T, dtype=torch.bool, device=v_BHTD.device).triu(1)[..., None]
    weights_BHTSL = logits_BHTL[:, :, None].expand(-1, -1, T, -1, -1).masked_fill(future_TS1, -torch.inf).softmax(-2)
    return torch.einsum("bhtl,bhtsl,bhsd->bhtd", p_BHTL, weights_BHTSL, v_BHTD)


METHODS: dict[str, Method] = {
    "no maximum": partial(sums, maximum=False),
    "global maximum": partial(sums, maximum=True),
    "running, in chunks": running,
    "running, token by token": partial(running, backend="sequential"),
}


def inputs(s: dict[str, Any], shape: str, size: float, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return p, logits and values; the logits rise from -size to size, fall, are all low, or are random."""
    torch.manual_seed(seed)
    T, L, device = s["tokens"], s["latents"], s["device"]
    p, noise, v = (torch.randn(1, 2, T, n, device=device, dtype=torch.float64) for n in (L, L, s["channels"]))
    ramp = torch.linspace(-size, size, T, device=device, dtype=torch.float64)[:, None]
    centre = {"rising": ramp, "falling": -ramp, "low": -size + 0 * ramp, "random": (size / 3 - 1) * noise}[shape]
    return [x.to(dtype).requires_grad_() for x in (p.softmax(-1), (centre + noise).clamp(-size, size), v)]


def run(unit: Unit) -> list[dict[str, Any]]:
    """Return a row for each kind and size of logits, dtype and method, and each method's limit."""
    s, rows = unit.settings, []
    for dtype in s["dtypes"]:
        for name, method in METHODS.items():
            label = {"method": name, "dtype": dtype}
            for shape in s["shapes"]:
                make = partial(inputs, s, shape, dtype=getattr(torch, dtype), seed=unit.seed)
                rows.append({"row": "limit", "logits": shape, **label, "limit": limit(make, method)})
                for size in s["sizes"]:
                    found = judged(make(size=size), method)
                    rows.append({"row": "case", "logits": shape, "size": size, **label, **found})
    return rows


def judged(given: list[Tensor], method: Method) -> dict[str, Any]:
    """Return errors of outputs and gradients relative to the largest value (None if not finite), and causality."""
    wide = [x.detach().double().requires_grad_() for x in given]
    exact, out = defined(*wide), method(*given)
    g = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.device)
    right = torch.autograd.grad(exact, wide, g)
    found = torch.autograd.grad(out, given, g.to(out.dtype))
    errors = [error(a, b) for a, b in zip(found, right, strict=True)]
    changed = [x.detach().clone() for x in given]
    changed[1][:, :, -1] = changed[1].abs().amax() * 2
    past, again = out.detach()[:, :, :-1], method(*changed).detach()[:, :, :-1]
    return {
        "finite": out.isfinite().double().mean().item(),
        "error": error(out.detach(), exact.detach()),
        "gradient_error": None if None in errors else max(e for e in errors if e is not None),
        "past_unchanged": torch.equal(past.nan_to_num(), again.nan_to_num()),
        "past_change": error(again, past),
        "roundings": torch.finfo(out.dtype).eps,
    }


def error(found: Tensor, right: Tensor) -> float | None:
    """Return the largest error relative to the largest value, or None if it is not finite."""
    worst = (found.double() - right.double()).abs().amax() / right.double().abs().amax()
    return worst.item() if worst.isfinite() else None


@torch.no_grad()
def limit(make: Callable[..., list[Tensor]], method: Method) -> float | None:
    """Find by bisection the size of logits at which outputs stop being finite; None if they are up to `LARGEST`."""

    def works(size: float) -> bool:
        return bool(method(*make(size=size)).isfinite().all())

    low, high = 1.0, LARGEST
    if works(high):
        return None
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return high


def cases(rows: list[dict[str, Any]], kind: str, **labels: Any) -> list[dict[str, Any]]:
    """Return the rows of a kind with these labels."""
    return [row for row in rows if row["row"] == kind and all(row[name] == value for name, value in labels.items())]


def limits(rows: list[dict[str, Any]], method: str, logits: str) -> str:
    """Format the mean limits of a method by dtype."""
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        found = [row["limit"] for row in cases(rows, "limit", method=method, logits=logits, dtype=dtype)]
        known = [size for size in found if size is not None]
        parts.append(f"{dtype}: {f'{statistics.mean(known):.0f}' if known else f'none up to {LARGEST:,.0f}'}")
    return ", ".join(parts)


def claim_overflow(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that without a maximum, rising logits in float32 fail between 78 and 89."""
    found = [row["limit"] for row in cases(rows, "limit", method="no maximum", logits="rising", dtype="float32")]
    if not found:
        return None
    holds = all(size is not None and 78 <= size <= 89 for size in found)
    low = limits(rows, "no maximum", "low")
    return (HOLDS if holds else FAILS), f"{limits(rows, 'no maximum', 'rising')}; all low: {low}"


def claim_global_underflow(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that with the whole sequence's maximum, rising logits fail: the first tokens are far below it."""
    found = cases(rows, "limit", method="global maximum", logits="rising")
    if not found:
        return None
    holds = all(row["limit"] is not None for row in found)
    return (HOLDS if holds else FAILS), f"from -x to x, x = {limits(rows, 'global maximum', 'rising')}"


def claim_running_is_exact(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that outputs are within `ROUNDINGS` and gradients finite for all kinds and sizes of logits and dtypes."""
    found = [row for row in cases(rows, "case") if row["method"].startswith("running")]
    if not found:
        return None
    holds = all(row["error"] is not None and row["error"] <= ROUNDINGS * row["roundings"] for row in found)
    holds = holds and all(row["gradient_error"] is not None for row in found)
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in found):
        same = [row for row in found if row["dtype"] == dtype]
        worst = [max((row[n] for row in same if row[n] is not None), default=0.0) for n in ("error", "gradient_error")]
        parts.append(f"{dtype}: {worst[0]:.1e}, gradients {worst[1]:.1e}")
    return (HOLDS if holds else FAILS), "largest error, " + "; ".join(parts)


def claim_past(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Count the cases in which doubling the largest logit, at the last token, leaves every earlier bit unchanged."""
    shown, same = [], {}
    for name in METHODS:
        found = cases(rows, "case", method=name)
        if not found:
            return None
        kept = sum(row["past_unchanged"] for row in found)
        broken = sum(row["past_change"] is None and row["error"] is not None for row in found)
        same[name] = kept == len(found)
        shown.append(f"{name}: same in {kept} of {len(found)}" + (f", made NaN in {broken}" if broken else ""))
    holds = not same["global maximum"] and all(same[name] for name in METHODS if name.startswith("running"))
    return (HOLDS if holds else FAILS), "; ".join(shown)
