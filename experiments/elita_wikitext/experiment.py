"""ELiTA on 100,000 tokens forward and backward, and the README's counts of parameters.

Shape letters: B batch, T tokens.
"""

import math
import time
from typing import Any

import torch

from experiments.harness.noise import FAILS, HOLDS, Difference, compare
from experiments.harness.units import Unit
from subquad.models import Decoder, DecoderConfig
from subquad.training.run import RunResult

Row = dict[str, Any]
SAME = 0.02
"""Difference in nats per token up to which two losses count as the same, from the README's own test."""
WIDTH = 256
"""Width of the layers whose parameters are counted; the ratios hardly depend on it."""


def measure(result: RunResult, unit: Unit) -> Row | list[Row]:
    """Return the number of parameters; for an arm with the label `tokens`, a pass over that many in two precisions."""
    tokens = unit.labels.get("tokens")
    if tokens is None:
        return {"parameters": sum(p.numel() for p in result.model.parameters())}
    model = result.model.model
    held_T = torch.from_numpy(result.corpus.held_out.tokens[: tokens + 1].astype("int64"))
    held_T = held_T.repeat(-(-(tokens + 1) // len(held_T)))[: tokens + 1]
    return [long(model, held_T[None], precision) for precision in ("float32", "bfloat16")]


def long(model: Decoder, tokens_BT: torch.Tensor, precision: str) -> Row:
    """Run one training pass over the whole sequence; return its loss, its time and whether all gradients are finite."""
    device = next(model.parameters()).device
    tokens_BT = tokens_BT.to(device)
    model.train().zero_grad()
    begin = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        loss = model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients)
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return {
        "precision": precision,
        "finite": finite,
        "long_loss": loss.item(),
        "long_seconds": seconds,
        "gradient_norm": math.sqrt(sum(g.double().square().sum().item() for g in gradients)),
    }


def claim_long(rows: list[Row]) -> tuple[str, str] | None:
    """Check that loss and gradients are finite in both precisions."""
    found = [row for row in rows if "finite" in row]
    if not found:
        return None
    shown = "; ".join(
        f"{row['precision']}: {'finite' if row['finite'] else 'not finite'}, {row['long_seconds']:.1f} s"
        for row in found
    )
    finite = all(row["finite"] for row in found)
    return HOLDS if finite else FAILS, f"{found[0]['tokens']:,} tokens, {shown}"


def claim_same_if_not_better(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that ELiTA's loss is at most `SAME` above the transformer's, beyond the noise."""
    found = compare(rows, {"arm": "elita"}, {"arm": "transformer"}, "loss")
    return None if found is None else ([found.toward(-1, SAME)], str(found))


def claim_ff2_parameters(rows: list[Row]) -> tuple[str, str]:
    """Count the parameters of the feed-forward networks."""
    more = _count("full", "bilinear", ff=True) / _count("full", "gelu", ff=True) - 1
    return HOLDS if round(100 * more) == 13 else FAILS, f"{100 * more:+.1f} % (width {WIDTH})"


def claim_layer_parameters(rows: list[Row]) -> tuple[str, str]:
    """Count the parameters of whole layers."""
    more = _count("elita", "bilinear") / _count("full", "gelu") - 1
    return HOLDS if round(100 * more) == 5 else FAILS, f"{100 * more:+.1f} % (width {WIDTH})"


def claim_flops(rows: list[Row]) -> tuple[str, str]:
    """Compare forward FLOPs of ELiTA's and a RoPE transformer's attention of equal width, at three lengths."""
    shown, lower = [], True
    for tokens in (256, 4096, 100_000):
        elita, full = (_block(name, "swiglu").attention.cost(tokens) for name in ("elita", "full"))
        ratio = (elita.mixing_flops + elita.projection_flops) / (full.mixing_flops + full.projection_flops)
        shown.append(f"{ratio:.2g} at {tokens:,}")
        lower = lower and ratio < 1
    return HOLDS if lower else FAILS, f"{', '.join(shown)} tokens (width {WIDTH}, without feed-forward)"


def _count(attention: str, feedforward: str, *, ff: bool = False) -> int:
    block = _block(attention, feedforward)
    part = block.feedforward if ff else block
    return sum(p.numel() for p in part.parameters())


def _block(attention: str, feedforward: str) -> Any:
    """Return one layer on the meta device."""
    parts = {"attention": attention, "position": "rope" if attention == "full" else "none", "feedforward": feedforward}
    with torch.device("meta"):
        sizes = {"vocab_size": 8, "dim": WIDTH, "num_layers": 1, "num_heads": 4}
        return Decoder(DecoderConfig.from_dict({**parts, **sizes, "bias": True})).blocks()[0]
