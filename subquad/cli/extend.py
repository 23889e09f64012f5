"""`subquad extend`: train a transformers model to read longer contexts; report its loss by position."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rich.console import Console

from subquad.adaptation.config import ExtendConfig
from subquad.bars import progress
from subquad.cli.arguments import Parser, data_is_a_path, files_first
from subquad.cli.tables import print_table
from subquad.cli.threads import with_threads
from subquad.program import command


def run(arguments: Sequence[str]) -> int:
    """Parse, train and measure; return the exit status, 130 after an interruption."""
    begin = time.perf_counter()
    parser = make_parser()
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    parsed = parser.parse_args(files_first(data_is_a_path(arguments)))
    with parser.checking():
        config = parser.made(ExtendConfig, parsed)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("subquad extend runs in one process: start it without torchrun")
        from subquad.adaptation import extension, extension_report

        extension.scaled_config(config)
        config = config.replace(run=with_threads(config.run))
    console = Console(stderr=True)
    corpus, plan = extension_report.plan_report(config, console)
    resumed = (Path(config.run.folder) / "config.yaml").is_file() and config.run.resume != "never"
    result = extension.extend(config, console)
    if not result.interrupted and config.control:
        control = extension.train_control(config, console)
        if control.interrupted:
            return _stopped(control.steps, config, "the control")
    if result.interrupted:
        return _stopped(result.steps, config, "the extension")
    device = result.model.device
    with progress("window") as shown:
        losses = extension_report.measure(
            config,
            result,
            corpus,
            plan,
            device,
            begin=lambda name: sys.stderr.write(f"loss by position: {name}\n"),
            progress=shown,
        )
    seconds = time.perf_counter() - begin
    report = extension_report.make_report(config, result, plan, losses, seconds, device=device, resumed=resumed)
    extension_report.write(report, result.folder)
    title = f"{extension_report.title(report)}: held-out nats a token (perplexity)"
    spare = (extension_report.SCALED, extension_report.CONTROL, extension_report.BEFORE)
    print_table(title, *extension_report.rows(report), spare=spare, elsewhere=" or in its README.md")
    line = command("lora", "merge", result.folder, "--out", f"{result.folder}-merged")
    sys.stdout.write(
        f"{result.folder} holds the adapter, the scaled configuration and the report (see its README.md for how to "
        f"load them). Merge them into a plain model with:\n  {line}\n"
    )
    return 0


@cache  # takes 0.2 s to make
def make_parser() -> Parser:
    """Return the command's options."""
    parser = Parser(
        "extend MODEL --length TOKENS",
        "Train a transformers model with rotary positions to read longer contexts, as LongLoRA does: scale its "
        "positions, train low-rank factors, embeddings and norms on long windows with sparse attention, and report the "
        "loss by position before and after. The result is a PEFT adapter for the original checkpoint; `subquad lora "
        "merge` makes a plain model of it. To resume an interrupted run, repeat the command.",
    )
    parser.add_files()
    parser.add_config(ExtendConfig)
    return parser


def _stopped(step: int, config: ExtendConfig, what: str) -> int:
    line = command("extend", "--config", Path(config.run.folder) / "config.yaml")
    sys.stderr.write(f"stopped {what} after step {step} of {config.run.steps}; resume with:\n  {line}\n")
    return 130
