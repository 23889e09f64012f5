"""ELiTA on 100,000 tokens forward and backward, and the README's counts of parameters.

Shape letters: B batch, T tokens.
"""

from typing import Any

import torch

from experiments.harness.noise import FAILS, HOLDS, Difference, Row, compare
from experiments.harness.units import Unit
from subquad.models import Decoder, DecoderConfig
from subquad.training.run import RunResult

SAME = 0.02
"""Difference in nats per token up to which two losses count as the same, from the README's own test."""
WIDTH = 256
"""Width of the layers whose parameters are counted; the ratios hardly depend on it."""
TOKENS = 100_000
"""Length of the README's long sequences."""


def measure(result: RunResult, unit: Unit) -> Row:
    """Return for the arm `elita` whether a training pass over `TOKENS` tokens is finite in two precisions."""
    if unit.arm != "elita":
        return {}
    tokens = 1000 if unit.scale == "smoke" else TOKENS
    held_T = torch.from_numpy(result.corpus.held_out.tokens[: tokens + 1].astype("int64"))
    held_T = held_T.repeat(-(-(tokens + 1) // len(held_T)))[: tokens + 1]
    found = [is_finite(result.decoder, held_T[None], precision) for precision in (torch.float32, torch.bfloat16)]
    return {"tokens": tokens, "finite": all(found)}


def is_finite(model: Decoder, tokens_BT: torch.Tensor, precision: torch.dtype) -> bool:
    """Run one training pass over the whole sequence; return whether its loss and all gradients are finite."""
    device = next(model.parameters()).device
    tokens_BT = tokens_BT.to(device)
    model.train().zero_grad()
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        loss = model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in gradients)
    model.zero_grad()
    return finite


def claim_long(rows: list[Row]) -> tuple[str, str] | None:
    """Check that loss and gradients are finite in both precisions."""
    found = [row for row in rows if "finite" in row]
    if not found:
        return None
    finite = all(row["finite"] for row in found)
    shown = f"{found[0]['tokens']:,} tokens: {'finite' if finite else 'not finite'} in float32 and bfloat16"
    return HOLDS if finite else FAILS, shown


def claim_same_if_not_better(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that ELiTA's loss is at most `SAME` above the transformer's, beyond the noise."""
    found = compare(rows, {"arm": "elita"}, {"arm": "transformer"}, "loss")
    return None if found is None else ([found.toward(-1, SAME)], str(found))


claim_same_at_equal_flops = claim_same_if_not_better


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
