"""Measure LLP's receptive field at each depth, and compare its gain from depth with that of full attention."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any

import torch

from experiments.harness.noise import FAILS, HOLDS, Difference, number, pooled, select
from experiments.harness.units import Unit
from subquad.models import Decoder, DecoderConfig
from subquad.training import RunResult

Row = dict[str, Any]


def measure(result: RunResult, unit: Unit) -> Row:
    """Return the earliest token that the last output depends on, for random weights of this depth and pattern."""
    length = result.config.batch.length
    segment = result.config.model.options.get("llp", {}).get("segment")
    needed = {} if segment is None else {"needed": 2 * length // segment - 1}
    return {"first_token_seen": first_token_seen(result.config.model, length), **needed}


@torch.no_grad()
def first_token_seen(config: DecoderConfig, tokens: int) -> int:
    """Find by bisection the first token that changes the last output, together with those before it, in float64.

    Large weights keep signals through many layers above the rounding.
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
    """Check that the last output depends on token 0 with 2n/s - 1 or more layers, and not with fewer."""
    llp = [row for row in rows if row["mechanism"].startswith("LLP") and "needed" in row]
    if not llp:
        return None
    right = all((row["first_token_seen"] == 0) == (row["layers"] >= row["needed"]) for row in llp)
    seen = sorted({(row["layers"], row["first_token_seen"]) for row in llp})
    shown = ", ".join(f"{layers} layers: token {token}" for layers, token in seen)
    return (HOLDS if right else FAILS), f"{llp[0]['needed']} needed; {shown}"


def _more_than_full(rows: list[Row], few: int, many: int) -> tuple[list[Difference], str] | None:
    """Check that LLP gains more than full attention from `few` to `many` layers."""
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
    ours = f"LLP gains {number(llp)}, full attention {number(full)} nats per token; difference {llp - full:+.3g}"
    shown = f"{ours}, one seed each" if math.isnan(error) else f"{ours} ± {number(error)}"
    return [Difference(llp - full, error, noise.freedom, min(map(len, cells)))], shown


# With 4 layers LLP sees part of the tokens; with 8 and 12, all of them (7 are needed).
claim_depth_up_to_all_tokens = partial(_more_than_full, few=4, many=8)
claim_depth_beyond = partial(_more_than_full, few=8, many=12)
