"""Measure LLP's receptive field at each depth, and compare its gain from depth with that of full attention."""

from __future__ import annotations

import torch

from experiments.harness.noise import FAILS, HOLDS, Difference, Row, compare, select
from experiments.harness.units import Unit
from subquad.models import Decoder, DecoderConfig
from subquad.training import RunResult


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


def claim_depth_up_to_all_tokens(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that LLP, which sees part of the tokens with 4 layers and all with 8, gains more than full attention."""
    gains = []
    for few in select(rows, {"layers": 4}):
        for many in select(rows, {"layers": 8, "mechanism": few["mechanism"], "seed": few["seed"]}):
            blocks = zip(few.get("loss_blocks", ()), many.get("loss_blocks", ()), strict=True)
            gain = {"gain": few["loss"] - many["loss"], "gain_blocks": [a - b for a, b in blocks]}
            gains.append({"arm": few["mechanism"], "seed": few["seed"], "text": few.get("text"), **gain})
    found = compare(gains, {"arm": "LLP"}, {"arm": "full"}, "gain")
    return None if found is None else ([found], f"gains of {found} nats per token")
