"""Write the tables of docs/extend.md from the reports of `subquad extend`.

python -m benchmarks.adaptations --extend runs/longer-shifted runs/longer-llp --trials runs/trial-*    # keeps them
python docs/make_extend.py
"""

from __future__ import annotations

from functools import partial

import pages

from benchmarks.report import described
from subquad.adaptation import extension_report


def trials() -> str:
    """Return a row per trial: its settings, and its losses with the attention kept and with full attention."""
    lines = []
    for found in pages.result("extend_trials"):
        kept, full = found["summary"]["extended"], found["summary"].get("extended, full attention")
        lines.append(
            [
                found["rope"],
                f"`{found['attention']}`" + "".join(f", {name} {value:,}" for name, value in found["options"].items()),
                f"{found['steps']}, {found['lr']:g}",
                *(f"{kept[name]:.4f}" for name in ("within", "beyond")),
                extension_report.difference(kept),
                "as trained" if full is None else f"{full['beyond']:.4f}",
                "" if full is None else extension_report.difference(full),
            ]
        )
    headers = ["positions", "trained with", "steps, learning rate", "257 to 512", "above 512", "difference"]
    headers += ["full attention: above 512", "difference"]
    return pages.table(headers, lines, names=3)


def apart(gap: float) -> str:
    """Return a difference in words."""
    return f"{abs(gap):.4f} nats {'below' if gap <= 0 else 'above'}"


def block(kind: str) -> str:
    """Return the table of a report, followed by what was trained, where and how long it took."""
    report = pages.result(f"extend_{kind}")
    table = pages.table(*extension_report.rows(report))
    own, found = report["own_length"], report["summary"]["extended"]
    loss = (
        f"The extended model's loss above {own:,} tokens of context is {apart(found['difference'])} its loss from "
        f"{own // 2 + 1:,} to {own:,} (standard error over the stretches {found['standard_error']:.4f})"
    )
    if "control" in report["summary"]:
        loss += f", and {apart(found['beyond'] - report['summary']['control']['beyond'])} the control's"
    text = (
        f"{loss}.\n\n"
        f"{report['steps']:,} steps of {report['step_tokens']:,} tokens; {report['rope']} positions; rank "
        f"{report['lora']['rank']}: {report['trained_parameters']:,} of {report['parameters']:,} parameters trained. "
        f"The whole command took {report['whole_command_seconds'] / 60:.1f} minutes, {report['seconds'] / 60:.1f} of "
        f"them in training steps, on {described(report['provenance']['machine'])}. Each range predicts the same "
        f"{report['held_out_tokens']:,} tokens, in {report['stretches']} stretches of the text."
    )
    return f"{table}\n\n{text}"


BLOCKS: pages.Blocks = {"llp": partial(block, "llp"), "shifted": partial(block, "shifted"), "trials": trials}

if __name__ == "__main__":
    pages.rewrite("extend.md", BLOCKS)
