"""Train models with states of about equal size on a memory probe until their accuracy rises no more.

Shape letters: B rows, T tokens, N asked tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.harness.rates import SHARE
from experiments.harness.units import Unit
from subquad.data.config import ProbeConfig
from subquad.data.probes import IGNORED, ProbeRows, probe_rows
from subquad.evaluation.probes import overall, right_answers
from subquad.models import Decoder, DecoderConfig

TRAIN, HELD_OUT, LOOKED_AT = range(3)
"""Streams of a seed: training, the result, and the sequences that training looks at to see whether it goes on."""
KNOWN, RISE, LEFT = 0.995, 0.01, 0.05
"""Accuracy that ends a training; rise from three looks to the next three below which it stands still; distance from
chance without which it has not begun."""


def run(unit: Unit) -> dict[str, Any]:
    """Train, and measure the accuracy on sequences that nothing has seen."""
    given = unit.settings
    probe, length = ProbeConfig.from_dict(given["probe"]), given["length"]
    model, plateau, steps = trained(unit, probe, given["steps"])
    rows = probe_rows(probe, length, given["held_out"], seed=(unit.seed, HELD_OUT))
    score = overall(rows, right_answers(model, rows, batch_size=50))
    sizes = [block.attention.state_bytes(length) for block in model.blocks()]
    return {
        "accuracy": score.value,
        "error": score.error,
        "chance": probe.chance,
        "plateau": "yes" if plateau else "none",
        "steps": steps,
        "state_bytes": round(sum(sizes) / len(sizes)),
        "largest_state_bytes": max(sizes),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def search(unit: Unit) -> float:
    """Train for at most a third of the steps; return nats per asked token of sequences that the result never uses."""
    probe = ProbeConfig.from_dict(unit.settings["probe"])
    model, *_ = trained(unit, probe, max(1, unit.settings["steps"] // SHARE))
    rows = probe_rows(probe, unit.settings["length"], unit.settings["held_out"], seed=(unit.seed, LOOKED_AT))
    with torch.no_grad():
        return float(loss(model, rows))


def trained(unit: Unit, probe: ProbeConfig, most: int) -> tuple[Decoder, bool, int]:
    """Return a model, whether its accuracy stands still, and its steps, `most` or until it stands still.

    The rate is constant, and falls to zero in the last `falling` steps. Each batch has a random number of pairs, from
    one to all: models learn few pairs first, and without these take several times as long to learn many.
    """
    given = unit.settings
    torch.manual_seed(unit.seed)
    model = Decoder(DecoderConfig.from_dict({**given["model"], "vocab_size": probe.vocab_size})).to(unit.device)
    rate, warmup, every = given["optimizer"]["lr"], given["warmup"], given["look_every"]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    pairs = np.random.default_rng(unit.seed)
    looked_at = probe_rows(probe, given["length"], given["looked_at"], seed=(unit.seed, LOOKED_AT))
    looks: list[float] = []
    step, end = 0, most
    while step < end:
        falling = (end - step) / given["falling"]
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / warmup, falling, 1.0)
        asked = probe.replace(pairs=1 + int(pairs.integers(probe.pairs)))
        rows = probe_rows(asked, given["length"], given["batch"], first=step * given["batch"], seed=(unit.seed, TRAIN))
        optimizer.zero_grad()
        loss(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if end == most and step % every == 0:
            looks.append(overall(looked_at, right_answers(model, looked_at, batch_size=50)).value)
            if stands_still(looks, probe.chance):
                end = min(most, step + given["falling"])
    return model, stands_still(looks, probe.chance), step


def loss(model: Decoder, rows: ProbeRows) -> Tensor:
    """Return the nats per asked token."""
    device = next(model.parameters()).device
    tokens_BT, labels_BT = (torch.from_numpy(part).to(device) for part in (rows.tokens, rows.labels))
    row_N, place_N = (labels_BT != IGNORED).nonzero(as_tuple=True)
    logits_NV = model.logits(model.vectors(tokens_BT)[row_N, place_N - 1])
    return F.cross_entropy(logits_NV.float(), labels_BT[row_N, place_N])


def stands_still(looks: list[float], chance: float) -> bool:
    """Return whether all is known, or three looks gained less than `RISE` over the three before and left chance."""
    last, before = looks[-3:], looks[-6:-3]
    known = bool(looks) and looks[-1] > KNOWN
    return known or (len(before) == 3 and sum(last) / 3 < sum(before) / 3 + RISE and sum(last) / 3 > chance + LEFT)
