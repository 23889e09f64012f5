"""What `subquad train` does after training on a probe."""

from __future__ import annotations

import json
import platform
import sys
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from subquad.data.probes import HELD_OUT, probe_rows
from subquad.evaluation.probes import overall, right_answers
from subquad.training.checkpoint import write_atomically

if TYPE_CHECKING:
    from subquad.training.run import RunResult


def finish(result: RunResult) -> None:
    """Write evaluation.json and report.json into the run's folder and print them."""
    from subquad.hf import SubquadForCausalLM

    config, probe = result.config, result.config.probe
    assert isinstance(result.model, SubquadForCausalLM)
    sys.stderr.write("evaluating on the held-out sequences ...\n")
    rows = probe_rows(probe, config.batch.length, probe.held_out, seed=(probe.seed, HELD_OUT))
    score = overall(rows, right_answers(result.model.model, rows, batch_size=config.batch.size))
    chance = 1 / 10 if probe.name == "passkey" else probe.chance  # of one token, as the accuracy
    accuracy = {"accuracy": score.value, "error": score.error, "chance": chance}
    evaluation = {**accuracy, "sequences": score.sequences, "asked": score.asked, "length": score.length}
    report = {
        **accuracy,
        "sequences": score.sequences,
        "python": platform.python_version(),
        "parameters": result.parameters,
        "steps": result.steps,
        "train_tokens_per_second": result.tokens_per_second,
    }
    for name, values in (("evaluation", evaluation), ("report", report)):
        write_atomically(result.folder / f"{name}.json", (json.dumps(values, indent=2) + "\n").encode())
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_row("held-out sequences", f"{score.sequences:,} of {score.length:,} tokens, {score.asked:,} tokens asked")
    table.add_row("accuracy", f"{score.value:.2%} ± {score.error:.2%}")
    table.add_row("", f"{chance:.2%} by chance")
    table.add_row("parameters, steps", f"{result.parameters:,}, {result.steps:,}")
    table.add_row("training", f"{result.tokens_per_second:,.0f} tokens/s")
    console = Console()
    console.print(table)
    console.print(f"{result.folder} holds the model and the metrics. Ask it more with:", markup=False, soft_wrap=True)
    console.print(f"  subquad probe {result.folder}", markup=False, soft_wrap=True)
