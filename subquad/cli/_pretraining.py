"""What `subquad train --task pretrain` says at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from subquad.training.run import RunResult


def finish(result: RunResult) -> None:
    """Print the loss on the training sequences that were set aside, and where the encoder is."""
    options = result.config.pretrain
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_row("learned", "hidden tokens" if options.kind == "denoise" else "the next token")
    if result.best_loss is not None:
        table.add_row("lowest loss", f"{result.best_loss:.4f} nats a predicted token, at step {result.best_step:,}")
    table.add_row("parameters, steps", f"{result.parameters:,}, {result.steps:,}")
    table.add_row("training", f"{result.tokens_per_second:,.0f} tokens/s, padding included")
    console = Console()
    console.print(table)
    console.print(f"{result.folder} holds the encoder and the metrics.", markup=False, soft_wrap=True)
