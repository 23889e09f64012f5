"""The receptive field of each depth, measured, and what depth is worth to LLP beyond its worth to full attention."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from experiments.harness.noise import FAILS, HOLDS, Margin, judge, number, pooled, select
from experiments.harness.units import Unit
from subquad.models import Decoder, DecoderConfig
from subquad.training import RunResult

Row = dict[str, Any]


def measure(result: RunResult, unit: Unit) -> Row:
    """The earliest token that the last output depends on, with random weights of this depth and pattern."""
    length = result.config.batch.length
    segment = result.config.model.options.get("llp", {}).get("segment")
    needed = {} if segment is None else {"needed": 2 * length // segment - 1}
    return {"first_token_seen": first_token_seen(result.config.model, length), **needed}


@torch.no_grad()
def first_token_seen(config: DecoderConfig, tokens: int) -> int:
    """By halving: a token is seen where changing all tokens up to it changes the last output, in float64.

    Large weights keep what comes through many layers above rounding.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        model = Decoder(config.replace(dim=32, num_heads=2, vocab_size=256, init_std=0.4)).double().eval()
        text_1T, other_1T = torch.randint(256, (2, 1, tokens))
    plain_V = model.logits(model.vectors(text_1T))[0, -1]

    def changes(count: int) -> bool:
        mixed_1T = torch.cat([other_1T[:, :count], text_1T[:, count:]], 1)
        return not torch.equal(model.logits(model.vectors(mixed_1T))[0, -1], plain_V)

    low, high = 0, tokens  # changing `low` tokens changes nothing, changing `high` does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if changes(middle) else (middle, high)
    return low


def claim_whole_context_from_depth(rows: list[Row]) -> tuple[str, str] | None:
    """From 2n/s - 1 layers on the last output depends on token 0, and from fewer it does not."""
    llp = [row for row in rows if row["mechanism"].startswith("LLP") and "needed" in row]
    if not llp:
        return None
    right = all((row["first_token_seen"] == 0) == (row["layers"] >= row["needed"]) for row in llp)
    seen = sorted({(row["layers"], row["first_token_seen"]) for row in llp})
    shown = ", ".join(f"{layers} layers: token {token}" for layers, token in seen)
    return (HOLDS if right else FAILS), f"{llp[0]['needed']} needed; {shown}"


def claim_depth_up_to_all_tokens(rows: list[Row]) -> tuple[str, str] | None:
    """From 4 to 8 layers, where 7 are needed to see all tokens."""
    return _more_than_full(rows, 4, 8)


def claim_depth_beyond(rows: list[Row]) -> tuple[str, str] | None:
    """From 8 to 12 layers, both of which see all tokens."""
    return _more_than_full(rows, 8, 12)


def _more_than_full(rows: list[Row], few: int, many: int) -> tuple[str, str] | None:
    """Whether LLP gains more than full attention does from this depth to that."""
    cells = [
        [row["loss"] for row in select(rows, {"mechanism": mechanism, "layers": layers})]
        for mechanism in ("LLP", "full")
        for layers in (few, many)
    ]
    if not all(cells):
        return None
    llp_few, llp_many, full_few, full_many = map(statistics.mean, cells)
    llp, full = llp_few - llp_many, full_few - full_many
    noise = pooled(rows, "loss")
    error = noise.deviation * math.sqrt(sum(1 / len(cell) for cell in cells))
    ours = f"LLP gains {number(llp)}, full attention {number(full)} nats a token; difference {llp - full:+.3g}"
    shown = f"{ours}, one seed each" if math.isnan(error) else f"{ours} ± {number(error)}"
    return judge([Margin(llp - full, error, noise.freedom)]), shown
