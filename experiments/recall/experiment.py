"""Train models with states of equal size on a memory probe.

Shape letters: B rows, T tokens.
"""

import math
import time
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from experiments.harness.units import Unit
from subquad.data.config import ProbeConfig
from subquad.data.probes import IGNORED, probe_rows
from subquad.evaluation.probes import overall, right_answers
from subquad.models import Decoder, DecoderConfig
from subquad.ops.patterns import Window

TRAIN, HELD_OUT = range(2)
NEAR = 0.1
"""Relative difference allowed between an arm's state and its budget."""


def run(unit: Unit) -> dict[str, Any]:
    """Train on one probe and measure on held-out sequences; `drawn` draws the window's width at each step."""
    given = unit.settings
    probe, length = ProbeConfig.from_dict(given["probe"]), given["length"]
    torch.manual_seed(unit.seed)
    model = Decoder(DecoderConfig.from_dict({**given["model"], "vocab_size": probe.vocab_size}))
    layers = [block.attention for block in model.blocks()]
    sizes = [layer.state_bytes(length) for layer in layers]
    budget = unit.labels.get("budget")
    if budget is not None and unit.scale == "cpu" and abs(sizes[-1] / budget - 1) > NEAR:
        raise ValueError(f"{unit.arm} has a state of {sizes[-1]} bytes and a budget of {budget}")
    begin = time.perf_counter()
    drawn = given.get("drawn")
    widths = torch.Generator().manual_seed(unit.seed)

    def redraw(width: int | None = None) -> None:
        for layer in layers:
            if drawn and layer.name == "window":
                new = int(torch.randint(2, drawn, (1,), generator=widths)) if width is None else width
                layer.patterns = (Window(width=new),)  # type: ignore[assignment]

    fit(model.to(unit.device), probe, given, unit.seed, redraw)
    seconds = time.perf_counter() - begin
    redraw(given["model"].get("options", {}).get("window", {}).get("width"))
    rows = probe_rows(probe, length, given["held_out"], seed=(unit.seed, HELD_OUT))
    score = overall(rows, right_answers(model, rows, batch_size=50))
    return {
        "accuracy": score.value,
        "error": score.error,
        "chance": 0.1 if probe.name == "passkey" else probe.chance,
        "state_bytes": round(sum(sizes) / len(sizes)),
        "largest_state_bytes": max(sizes),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": given["steps"],
        "step_seconds": seconds / given["steps"],
    }


def fit(model: Decoder, probe: ProbeConfig, given: dict[str, Any], seed: int, redraw: Any) -> None:
    """Train with AdamW, a warm-up over a tenth of the steps and a cosine to a tenth, on the answers only.

    Each batch of mqar has a random number of pairs, from one to all: models learn few pairs first, and without these
    take several times as long to learn many.
    """
    device = model.head_weight.device
    model.train()
    steps, batch, rate = given["steps"], given["batch"], given["lr"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    pairs = np.random.default_rng(seed)
    for step in range(steps):
        share = min((step + 1) / (0.1 * steps), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate * share
        asked = probe if probe.name == "passkey" else probe.replace(pairs=1 + int(pairs.integers(probe.pairs)))
        made = probe_rows(asked, given["length"], batch, first=step * batch, seed=(seed, TRAIN))
        tokens_BT, labels_BT = (torch.from_numpy(part).to(device) for part in (made.tokens, made.labels))
        redraw()
        row_N, place_N = (labels_BT != IGNORED).nonzero(as_tuple=True)
        logits_NV = model.logits(model.vectors(tokens_BT)[row_N, place_N - 1])
        loss = F.cross_entropy(logits_NV.float(), labels_BT[row_N, place_N])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
