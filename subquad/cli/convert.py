"""`subquad convert`: replace full attention in a trained model by a sub-quadratic mechanism."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from subquad.adaptation.config import ConvertConfig
from subquad.cli.arguments import Parser, data_is_a_path, files_first

PICTURE = "convert.png"


@cache  # making one takes 0.2 s
def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        "convert MODEL --attention llp --out FOLDER",
        "Replace full attention in a trained model by a mechanism that needs less: copy the weights that have a place, "
        "match each replaced layer's output on text, adapt the whole by LoRA, and report loss, passkeys, speed and "
        "state of the original and after each stage. An interrupted conversion goes on when the same command is given "
        "again.",
    )
    parser.add_files()
    parser.add_argument("model", type=str, help="The folder of a run, or of a transformers model that subquad imports.")
    parser.add_config(ConvertConfig)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Parse, convert, print, return the exit status."""
    parser = make_parser()
    parsed = parser.parse_args(files_first(data_is_a_path(arguments)))
    with parser.checking():
        values = parser.instantiate(parsed)
        config = ConvertConfig(**{field.name: values[field.name] for field in fields(ConvertConfig)})
    from transformers.utils.logging import disable_progress_bar

    from subquad.adaptation.conversion import Conversion
    from subquad.hf import lora

    lora.require_peft()
    disable_progress_bar()  # reading a file takes no time worth a bar
    with parser.checking():
        conversion = Conversion(values["model"], config, Progress() if sys.stderr.isatty() else None)
    from subquad.adaptation import conversion_report
    from subquad.evaluation.provenance import provenance

    report = conversion.run(**provenance(conversion.device, ("transformers", "peft")))
    conversion_report.show(report)
    picture = Path(config.out) / PICTURE
    conversion_report.draw(report, picture)
    sys.stdout.write(
        f"{config.out} holds the model, {picture.name} and report.json; check it: subquad audit {config.out}\n"
    )
    return 0


class Progress:
    """One line that counts the steps of a stage."""

    def __init__(self) -> None:
        self.shown = 0.0

    def __call__(self, stage: str, done: int, steps: int, loss: float) -> Any:
        """Show a step, at most ten times a second."""
        now = time.monotonic()
        if now - self.shown < 0.1 and done < steps:
            return
        self.shown = now
        end = "\n" if done == steps else ""
        sys.stderr.write(f"\r{stage}: step {done:,} of {steps:,}, loss {loss:.4f}{end}")
        sys.stderr.flush()
