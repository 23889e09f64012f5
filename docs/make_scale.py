"""Write the cost tables of docs/scale.md: measured constants, and their prediction for 10^6 to 10^9 tokens.

python -m benchmarks.scale && python docs/make_scale.py    # the first measures: two free cores, minutes
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pages

from benchmarks.report import described
from benchmarks.scale import DEPTHS, DIM, HEADS, LAYERS, PROOF, bytes_of, ranks_for, seconds_of, sent_by_layer
from subquad.cli.tables import size

SIZES = (2**20, 2**23, 2**27, 2**30)


def blocks(found: dict[str, Any]) -> pages.Blocks:
    """Return a function for each block of the page."""
    return {make.__name__: partial(make, found) for make in (constants, alone, together, proof)}


def constants(found: dict[str, Any]) -> str:
    """Return the table of measured constants."""
    lines = []
    for name, of in found["mechanisms"].items():
        grows = f"{1e9 * of['layer_s_per_token']:.3f} T" if of["layer_s_per_token"] else "-"
        layer, rest = f"{1e9 * of['layer_s']:,.0f}", f"{1e9 * of['rest_s']:,.0f}"
        lines.append([f"`{name}`", layer, grows, rest, f"{of['layer_bytes']:,.0f}", f"{of['rest_bytes']:,.0f}"])
    headers = ["", "layer: ns per token", "growth with T: ns per token", "rest of the model: ns per token"]
    headers += ["layer: bytes per token", "rest: bytes per token"]
    link = found["link"]
    return (
        f"{pages.table(headers, lines)}\n\nMeasured on {described(found['machine'])}, PyTorch "
        f"{found['versions']['torch']}: one thread per process, width {DIM}, {HEADS} heads, float32, activation "
        f"checkpointing. Two processes exchange {link['bytes_per_s'] / 2**30:.1f} GiB/s with a latency of "
        f"{1e6 * link['latency_s']:.0f} µs (gloo, one machine)."
    )


def _by_size(found: dict[str, Any], cell: Callable[[str, int], str]) -> str:
    lines = [[f"`{name}`", *(cell(name, tokens) for tokens in SIZES)] for name in found["mechanisms"]]
    return pages.table(["", *(f"2^{tokens.bit_length() - 1} ({tokens / 1e6:,.0f} M)" for tokens in SIZES)], lines)


def _both(seconds: float, held: float) -> str:
    return f"{_time(seconds)}, {size(round(held))}"


def alone(found: dict[str, Any]) -> str:
    """Return the time and memory of a step on one process, as if its memory were unlimited."""

    def cell(name: str, tokens: int) -> str:
        of = found["mechanisms"][name]
        return _both(seconds_of(of, tokens, 1, LAYERS), bytes_of(of, tokens, 1, LAYERS))

    return _by_size(found, cell)


def together(found: dict[str, Any]) -> str:
    """Return the processes needed, the time of a step, and the bytes and seconds of communication."""

    def cell(name: str, tokens: int) -> str:
        of = found["mechanisms"][name]
        ranks = ranks_for(of, tokens)
        sent = LAYERS * sent_by_layer(name, tokens, ranks)
        moving = sent / found["link"]["bytes_per_s"]
        return f"{ranks:,} × {_time(seconds_of(of, tokens, ranks, LAYERS))}; {size(sent)} in {_time(moving)}"

    return _by_size(found, cell)


def proof(found: dict[str, Any]) -> str:
    """Return the predicted and the measured step on two processes."""
    lines = []
    for name, seen in found["proof"].items():
        of = found["mechanisms"][name]
        expected = _both(seconds_of(of, PROOF, 2, DEPTHS[1]), bytes_of(of, PROOF, 2, DEPTHS[1]))
        lines.append([f"`{name}`", expected, _both(seen["seconds"], seen["bytes"])])
    return pages.table(["", "predicted", "measured"], lines)


def _time(seconds: float) -> str:
    for unit, length in (("years", 31557600.0), ("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 1.5 * length:
            number = seconds / length
            return f"{number:,.0f} {unit}" if number >= 9.95 else f"{number:.1f} {unit}"
    return f"{1000 * seconds:.2g} ms"


if __name__ == "__main__":
    pages.rewrite("scale.md", blocks(pages.result("cpu_scale")))
