"""LLP with the mask of the paper's pseudocode as it would act if the printed line had no effect.

Shape letters: B batch, T tokens, V vocabulary, C half segment, S keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.harness.measure import in_blocks, unigram
from experiments.harness.noise import FAILS, HOLDS, number, select
from experiments.harness.rates import SHARE
from experiments.harness.units import Unit
from subquad.attention.memories.key_values import Sight
from subquad.config import digest
from subquad.data import DataConfig, prepare
from subquad.evaluation.audit import audit
from subquad.models import Decoder, DecoderConfig
from subquad.ops.patterns import Blocks

RANDOM = 2000
"""Seed of the random held-out bytes."""


def run(unit: Unit) -> dict[str, Any]:
    """Train one model and measure it in one pass, token by token, and by the audit."""
    settings, steps = unit.settings, unit.settings["training"]["steps"]
    train_N, held_N = texts(settings, unit.seed)
    model = trained(unit, train_N, steps)
    held_BT = windows(held_N, settings)[: settings["held_windows"]].to(next(model.parameters()).device)
    shown_B = shown_loss(model, held_BT)
    decoded_B = decoded_loss(model, held_BT[:: max(1, len(held_BT) // settings["decoded_windows"])])
    report = audit(model.cpu(), long=0, contexts=[], seed=unit.seed, tokens=32)
    return {
        "shown_loss": float(shown_B.mean()),
        "shown_perplexity": math.exp(shown_B.mean()),
        **in_blocks("shown_loss", shown_B),
        "decoded_loss": float(decoded_B.mean()),
        "decoded_perplexity": math.exp(decoded_B.mean()),
        **in_blocks("decoded_loss", decoded_B),
        "scored_tokens": held_BT[:, 1:].numel(),
        "text": digest(held_BT.tolist())[:8],
        "unigram": unigram(train_N.numpy(), held_BT[:, 1:].cpu().numpy(), model.config.vocab_size),
        "audit_violations": len(report.violations),
        "printed_line_runs": int(printed_line_runs()),
    }


def search(unit: Unit) -> float:
    """Train for a third of the steps; return the loss in one pass of the text after the result's."""
    settings = unit.settings
    train_N, held_N = texts(settings, unit.seed)
    model = trained(unit, train_N, max(1, settings["training"]["steps"] // SHARE))
    held_BT = windows(held_N, settings)[settings["held_windows"] :][: settings["searched_windows"]]
    return float(shown_loss(model, held_BT.to(next(model.parameters()).device)).mean())


def trained(unit: Unit, train_N: Tensor, steps: int) -> Decoder:
    """Return a model with or without the mask, trained on the text."""
    torch.manual_seed(unit.seed)
    model = Decoder(DecoderConfig.from_dict(unit.settings["model"]))
    if unit.settings["leak"]:
        unmask(model)
    model.to(unit.device)
    train(model, train_N, unit.settings, steps)
    return model.eval()


def unmask(model: Decoder) -> None:
    """Remove the triangular mask: every query sees its whole half segment and the one before."""
    for block in model.blocks():
        half = block.attention.config.segment // 2
        block.attention.sight = Sight(((Blocks(size=half, back=1),),))  # type: ignore[assignment]


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
    """Return training and held-out bytes: of books, or uniformly random, which only the future can predict.

    All seeds have the same held-out bytes.
    """
    if settings["random"]:
        own, same = (torch.Generator().manual_seed(of) for of in (seed, RANDOM))
        count = (settings["held_windows"] + settings["searched_windows"]) * (settings["training"]["length"] + 1)
        return torch.randint(256, (2_000_000,), generator=own), torch.randint(256, (count,), generator=same)
    corpus = prepare(DataConfig.from_dict(settings["data"]))
    parts = (corpus.train.tokens, corpus.held_out.tokens)
    return tuple(  # type: ignore[return-value]
        torch.from_numpy(part[:20_000_000].astype("int64")) for part in parts
    )


def windows(tokens_N: Tensor, settings: dict[str, Any]) -> Tensor:
    """Cut the tokens into windows `[B, T + 1]`."""
    size = settings["training"]["length"] + 1
    return tokens_N[: len(tokens_N) // size * size].view(-1, size)


def train(model: Decoder, tokens_N: Tensor, settings: dict[str, Any], steps: int) -> None:
    """Train with AdamW, a warm-up and a cosine schedule."""
    model.train()
    training, peak = settings["training"], settings["optimizer"]["lr"]
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    warmup, length = training["warmup"], training["length"]
    for step in range(steps):
        rate = min((step + 1) / (warmup + 1), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak * rate
        starts_B = torch.randint(len(tokens_N) - length, (training["batch"],))
        text_BT = torch.stack([tokens_N[start : start + length + 1] for start in starts_B.tolist()]).to(device)
        loss = model.loss(text_BT[:, :-1], text_BT[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def shown_loss(model: Decoder, text_BT: Tensor) -> np.ndarray:
    """Return the nats per byte `[B]` of whole windows in one pass, as a training loop measures."""
    parts = [model.loss(part[:, :-1], part[:, 1:], reduction="none") for part in text_BT.split(16)]
    return torch.cat([part.view(-1, text_BT.shape[1] - 1).mean(1) for part in parts]).double().cpu().numpy()


@torch.no_grad()
def decoded_loss(model: Decoder, text_BT: Tensor) -> np.ndarray:
    """Return the nats per byte `[B]` if each byte is predicted from a text that ends before it."""
    nats_B = torch.zeros(len(text_BT), dtype=torch.float64)
    for count in range(1, text_BT.shape[1]):
        logits_BV = model.logits(model.vectors(text_BT[:, :count])[:, -1])
        nats_B += F.cross_entropy(logits_BV, text_BT[:, count], reduction="none").cpu()
    return (nats_B / (text_BT.shape[1] - 1)).numpy()


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
