"""Loss curves of latte_table3's runs: a row for each evaluation during training."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from experiments.harness.noise import Difference, Row, compare, select, text_error
from experiments.harness.result import read_result, stale
from experiments.harness.units import Unit


def run(unit: Unit) -> list[Row]:
    """Return the held-out loss after each step of the curve of the arm's run; the last row has the final loss's blocks.

    Raises `ValueError` if latte_table3 has no curve of this run, or was measured with another version of the library.
    """
    source = unit.settings.get("row") or _stored(unit)
    steps, losses = source["curve_steps"], source["curve_losses"]
    rows: list[Row] = [
        {"step": step, "held_out_loss": loss, "spent_flops": source["flops"] * step / source["steps"]}
        for step, loss in zip(steps, losses, strict=True)
    ]
    rows[-1] |= {"end": True, "unigram": source["unigram"], "fall": losses[(len(losses) - 1) // 2] - losses[-1]}
    rows[-1] |= {"loss_blocks": source["loss_blocks"], "block_size": source["block_size"]}
    tokens = unit.settings["curve_tokens"]
    return [{**row, "scored_tokens": tokens} for row in rows]


def _stored(unit: Unit) -> Row:
    """Return the row of this run in latte_table3's result."""
    source = str(unit.reads)
    values = read_result(Path(unit.experiment).parent / source).get(unit.scale, {"rows": [], "done": 0})
    found = [row for row in select(values["rows"], {"arm": unit.arm, "seed": unit.seed}) if "curve_losses" in row]
    if not found or stale(values):
        why = "was measured with another version of the library" if found else f"has no curve of {unit.name}"
        raise ValueError(f"{source} {why}: run `python -m experiments {source} --scale {unit.scale}` first")
    return found[0]


def _with_text(found: Difference, rows: list[Row], **labels: str) -> Difference:
    """Add the error of the text: that of the final difference over its blocks, scaled to the tokens of a point.

    A point's windows lie apart, so they are less alike than a block's and its error is no larger.
    """
    latte, attention = (select(rows, {"mechanism": name, "end": True, **labels}) for name in ("Latte", "attention"))
    text = text_error(latte, attention, "loss") if latte and attention else None
    if text is None:
        return found
    row = latte[0]
    error = text[0] * math.sqrt(len(row["loss_blocks"]) * row["block_size"] / row["scored_tokens"])
    return replace(found, error=math.hypot(found.error, error), complete=True)


def _gap(rows: list[Row], metric: str = "held_out_loss", **labels: str | int) -> Difference | None:
    """Return Latte's mean minus attention's over the rows with these labels."""
    return compare(select(rows, labels), {"mechanism": "Latte"}, {"mechanism": "attention"}, metric)


def claim_curves(rows: list[Row], position: str = "sines") -> tuple[list[Difference], str] | None:
    """Check that attention is below Latte at every evaluation in the second half of the training."""
    steps = sorted({row["step"] for row in rows})
    found = {step: _gap(rows, step=step, position=position) for step in steps[len(steps) // 2 :]}
    known = {step: _with_text(gap, rows, position=position) for step, gap in found.items() if gap is not None}
    if not known:
        return None
    shown, last = ", ".join(f"{gap.value:+.3f}" for gap in known.values()), known[max(known)]
    text = f"Latte - attention, from step {min(known)} to {max(known)}: {shown} nats (± {last.error:.2g})"
    return list(known.values()), text


claim_small_sines = partial(claim_curves, position="small sines")


def claim_distance(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Check that Latte's loss falls more than attention's from the middle to the end of the training."""
    ends = [row for row in select(rows, {"position": "sines", "end": True}) if "fall" in row]
    gap = _gap(ends, "fall")
    if gap is None:
        return None
    found = _with_text(gap, ends)
    return [found], f"Latte's loss falls by {found.left:.3f} nats, attention's by {found.right:.3f}"


def claim_flops(rows: list[Row]) -> tuple[list[Difference], str] | None:
    """Compare Latte's last loss with attention's after as many FLOPs, interpolated between two evaluations."""
    rows = [row for row in select(rows, {"position": "sines"}) if "spent_flops" in row]
    budget = min((row["spent_flops"] for row in select(rows, {"mechanism": "Latte", "end": True})), default=0.0)
    ends = []
    for row in select(rows, {"end": True}):
        curve = select(rows, {"mechanism": row["mechanism"], "seed": row["seed"]})
        spent, losses = ([one[name] for one in curve] for name in ("spent_flops", "held_out_loss"))
        ends.append({**row, "then": float(np.interp(budget, spent, losses))})
    gap = _gap(ends, "then")
    if gap is None:
        return None
    found = _with_text(gap, ends)
    return [found], f"Latte {found.left:.3f} nats, attention {found.right:.3f} after {budget:.3g} FLOPs"
