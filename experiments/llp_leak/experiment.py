"""LLP with the mask of the paper's pseudocode as it would act if the printed line had no effect.

Shape letters: B batch, T tokens, V vocabulary, C half segment, S keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.harness.noise import FAILS, HOLDS, number, select
from experiments.harness.units import Unit
from subquad.data import DataConfig, prepare
from subquad.evaluation.audit import audit
from subquad.models import Decoder, DecoderConfig
from subquad.ops.patterns import Blocks


def run(unit: Unit) -> dict[str, Any]:
    """Train one model and measure it in one pass, token by token, and by the audit."""
    settings, training = unit.settings, unit.settings["training"]
    torch.manual_seed(unit.seed)
    device = torch.device(unit.device)
    model = Decoder(DecoderConfig.from_dict(settings["model"]))
    if settings["leak"]:
        unmask(model)
    model.to(device)
    train_N, held_N = texts(settings, unit.seed)
    train(model, train_N, training)
    model.eval()
    length = training["length"]
    held_BT = windows(held_N, length, settings["held_windows"]).to(device)
    shown = shown_loss(model, held_BT)
    decoded = decoded_loss(model, held_BT)
    report = audit(model.cpu(), long=0, contexts=[], seed=unit.seed, tokens=32)
    return {
        "shown_loss": shown,
        "shown_perplexity": math.exp(shown),
        "decoded_loss": decoded,
        "decoded_perplexity": math.exp(decoded),
        "audit_violations": len(report.violations),
        "printed_line_runs": int(printed_line_runs()),
    }


def unmask(model: Decoder) -> None:
    """Remove the triangular mask: every query sees its whole half segment and the one before."""
    for block in model.blocks():
        half = block.attention.config.segment // 2
        block.attention.patterns = (Blocks(size=half, back=1),)  # type: ignore[assignment]


def printed_line_runs(half: int = 4, blocks: int = 3) -> bool:
    """Return whether the pseudocode's line, `attn[:, :, segment_len:].masked_fill_(causal_mask, value)`, runs."""
    scores_HNCS = torch.zeros(2, blocks, half, 2 * half)
    mask_CC = torch.ones(half, half).triu(1).bool()
    try:
        scores_HNCS[:, :, half:].masked_fill_(mask_CC, -math.inf)
    except RuntimeError:
        return False
    return True


def texts(settings: dict[str, Any], seed: int) -> tuple[Tensor, Tensor]:
    """Return training and held-out bytes: of books, or uniformly random, which only the future can predict."""
    if settings["random"]:
        source = torch.Generator().manual_seed(seed)
        return torch.randint(256, (2_000_000,), generator=source), torch.randint(256, (200_000,), generator=source)
    corpus = prepare(DataConfig.from_dict(settings["data"]))
    parts = (corpus.train.tokens, corpus.held_out.tokens)
    return tuple(  # type: ignore[return-value]
        torch.from_numpy(part[:20_000_000].astype("int64")) for part in parts
    )


def windows(tokens_N: Tensor, length: int, count: int) -> Tensor:
    """Cut the first `count` windows `[B, T + 1]` from the tokens."""
    return tokens_N[: count * (length + 1)].view(count, length + 1)


def train(model: Decoder, tokens_N: Tensor, training: dict[str, Any]) -> None:
    """Train with AdamW, a warm-up and a cosine schedule."""
    model.train()
    device = model.head_weight.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=training["lr"], betas=(0.9, 0.95), weight_decay=0.05)
    steps, warmup, length = training["steps"], training["warmup"], training["length"]
    for step in range(steps):
        rate = min((step + 1) / (warmup + 1), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = training["lr"] * rate
        starts_B = torch.randint(len(tokens_N) - length, (training["batch"],))
        text_BT = torch.stack([tokens_N[start : start + length + 1] for start in starts_B.tolist()]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(text_BT[:, :-1], text_BT[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def shown_loss(model: Decoder, text_BT: Tensor) -> float:
    """Return the nats per byte of whole windows in one pass, as a training loop measures."""
    parts = text_BT.split(8)
    return sum(float(model.loss(part[:, :-1], part[:, 1:])) * len(part) for part in parts) / len(text_BT)


@torch.no_grad()
def decoded_loss(model: Decoder, text_BT: Tensor) -> float:
    """Return the nats per byte if each byte is predicted from a text that ends before it."""
    nats = 0.0
    length = text_BT.shape[1] - 1
    for count in range(1, length + 1):
        logits_BV = model.logits(model.vectors(text_BT[:, :count])[:, -1])
        nats += float(F.cross_entropy(logits_BV.float(), text_BT[:, count]))
    return nats / length


def claim_audit_finds_it(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that each model without the mask has at least one violation."""
    found = [row["audit_violations"] for row in select(rows, {"mask": "does not bind"})]
    if not found:
        return None
    return (HOLDS if min(found) > 0 else FAILS), f"{min(found)} to {max(found)} violations in {len(found)} models"


def claim_below_entropy(rows: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Check that the loss shown on random bytes is below their entropy, which no causal model reaches."""
    found = [row["shown_loss"] for row in select(rows, {"data": "random bytes", "mask": "does not bind"})]
    if not found:
        return None
    ours = f"at most {number(max(found))} nats per byte, entropy {number(math.log(256))}"
    return (HOLDS if max(found) < 0.9 * math.log(256) else FAILS), ours
