"""`subquad convert`: replace full attention in a trained model with a sub-quadratic mechanism."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from subquad.adaptation.config import ConvertConfig
from subquad.adaptation.conversion_report import STAGES, Report, draw
from subquad.cli.arguments import Parser, data_is_a_path, files_first
from subquad.cli.tables import context_range, print_table, show_line, size
from subquad.cli.threads import kept_threads
from subquad.evaluation.provenance import provenance
from subquad.program import command

PICTURE = "convert.png"
STAGE_COLUMNS = ["stage", "loss", "perplexity", "passkey", "matching error", "minutes"]
SPARE = ("matching error", "minutes", "part of it", "after matching", "after replacing")
Lines = list[list[str]]


@cache  # takes 0.2 s to make
def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "convert MODEL --attention llp --out FOLDER",
        "Replace full attention in a trained model with a sub-quadratic mechanism: copy the weights that fit, train "
        "each new layer to match the output of the layer it replaces, adapt the whole model with LoRA, and report "
        "loss, passkey recall, speed and state size of the original and after each stage. To resume an interrupted "
        "conversion, repeat the command.",
    )
    parser.add_files()
    parser.add_argument("model", type=str, help="Folder of a run, or of a transformers model that subquad can import.")
    parser.add_config(ConvertConfig)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, convert and print; return the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(files_first(data_is_a_path(arguments)))
    with parser.checking():
        config = parser.made(ConvertConfig, parsed)
    from transformers.utils.logging import disable_progress_bar

    from subquad.adaptation.conversion import SETTINGS, Conversion

    disable_progress_bar()  # of loading weights, which is quick
    with parser.checking():
        threads = kept_threads(config.threads, config.device, Path(config.out) / SETTINGS, "threads")
        config = config.replace(threads=threads)
        conversion = Conversion(parsed.model, config, Progress() if sys.stderr.isatty() else None)
    report = conversion.run(**provenance(conversion.device, ("transformers", "peft")))
    show(report)
    picture = Path(config.out) / PICTURE
    draw(report, picture)
    sys.stdout.write(f"{config.out} holds the model, {picture.name} and report.json. Check it with:\n")
    sys.stdout.write(f"  {command('audit', config.out)}\n")
    return 0


class Progress:
    """A line that counts the steps of a stage."""

    def __init__(self) -> None:
        self.shown = 0.0

    def __call__(self, stage: str, done: int, steps: int, loss: float) -> Any:
        """Show the step and its loss, at most ten times a second."""
        now = time.monotonic()
        if now - self.shown < 0.1 and done < steps:
            return
        self.shown = now
        show_line(f"{stage}: step {done:,} of {steps:,}, loss {loss:.4f}", last=done == steps)


def show(report: Report) -> None:
    """Print the tables of stages, positions, branches and decoding, and the report's explanation."""
    for title, headers, lines in (_stages(report), _positions(report), _branches(report), _decoding(report)):
        print_table(title, headers, lines, spare=SPARE, elsewhere=" or in report.json")
    missing = report["stages"][0].get("passkey_missing")
    if missing is not None:
        sys.stdout.write(f"passkey: {missing}\n")
    sys.stdout.write("\n".join([*report["explanation"], ""]))


def _stages(report: Report) -> tuple[str, list[str], Lines]:
    replaced, kept = (", ".join(map(str, report["layers"][name])) for name in ("replaced", "kept"))
    title = f"{report['attention']} in layers {replaced}; full attention kept: {kept or 'none'}"
    lines = []
    for stage in report["stages"]:
        key, errors = stage["passkey"], stage.get("errors")
        lines.append(
            [
                STAGES[stage["stage"]],
                f"{stage['loss']:.4f}",
                f"{stage['perplexity']:,.3f}",
                "-" if key is None else f"{key['value']:.0%} ± {key['error']:.0%}",
                "-" if errors is None else " ".join(f"{error:.3f}" for error in errors),
                f"{stage['seconds'] / 60:.1f}",
            ]
        )
    return title, STAGE_COLUMNS, lines


def _positions(report: Report) -> tuple[str, list[str], Lines]:
    """Return the table of each stage's loss by tokens of context, with each range's share of the gap."""
    stages, gap = report["stages"], report["gap"]
    tokens = sum(part["tokens"] for part in gap["by_position"])
    lines = []
    for place, part in enumerate(gap["by_position"]):
        share = part["tokens"] * part["gap"] / tokens
        losses = [f"{stage['by_position'][place]['loss']:.4f}" for stage in stages]
        lines.append([context_range(part["start"], part["stop"]), *losses, f"{part['gap']:+.4f}", f"{share:+.4f}"])
    lines.append(["all", *(f"{stage['loss']:.4f}" for stage in stages), *[f"{gap['loss']:+.4f}"] * 2])
    headers = ["tokens of context", *(STAGES[stage["stage"]] for stage in stages), "gap", "part of it"]
    return "loss by position (nats a token)", headers, lines


def _branches(report: Report) -> tuple[str, list[str], Lines]:
    found = report["stages"][-1]["branches"]
    base = found[0]["loss"]
    lines = [[part["off"], f"{part['loss']:.4f}", f"{part['loss'] - base:+.4f}"] for part in found]
    return "loss of the result with a branch switched off", ["off", "loss", "more"], lines


def _decoding(report: Report) -> tuple[str, list[str], Lines]:
    before, after = (report["stages"][i]["decoding"] for i in (0, -1))
    lines = [
        [
            f"{a['context']:,}",
            size(a["state_bytes"]),
            size(b["state_bytes"]),
            f"{a['tokens_per_second']:,.0f}",
            f"{b['tokens_per_second']:,.0f}",
        ]
        for a, b in zip(before, after, strict=True)
    ]
    headers = ["context", "state before", "state after", "tokens/s before", "tokens/s after"]
    kept = report["layers"]["kept"]
    growth = "keys and values of the kept layers keep growing" if kept else "the state stops growing"
    missing = "" if lines else "; not timed: all measure.contexts exceed the model's positions"
    return f"decoding one sequence: {growth}{missing}", headers, lines
