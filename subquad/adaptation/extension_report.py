"""Report of an extension: the loss by position, before and after, as numbers, table, picture and README."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from rich.console import Console
from torch import nn

from subquad.adaptation import extended
from subquad.adaptation.config import ExtendConfig
from subquad.adaptation.extension import attend, scaled_config
from subquad.data import Corpus, prepare
from subquad.data.files import write_json
from subquad.disk import aside, write_atomically
from subquad.evaluation import drawing
from subquad.evaluation.positions import PositionPlan, RangeLoss, loss_by_position, plan_positions
from subquad.evaluation.provenance import provenance
from subquad.hf import lora, set_attention
from subquad.training.run import RunResult
from subquad.training.task import preparing

REPORT, PICTURE, README = "report.json", "loss_by_position.png", "README.md"
BEFORE, SCALED, CONTROL, AFTER = "original", "scaled, untrained", "control", "extended"
"""Columns: the model with its own positions; with scaled ones; trained at its own length, then scaled; extended."""


def plan_report(config: ExtendConfig, console: Console | None) -> tuple[Corpus, PositionPlan]:
    """Return the text and the windows of the report. Raises `ValueError` for too short a text, before any training."""
    folder, original, _ = scaled_config(config)
    data = config.data.replace(tokenizer=str(folder))
    corpus = preparing(console, "text", lambda progress: prepare(data, progress=progress))
    return corpus, plan_positions(
        len(corpus.held_out),
        own=extended.own_length(original),
        length=config.length,
        tokens=config.eval.tokens,
        stretches=config.eval.stretches,
    )


def subjects(config: ExtendConfig) -> dict[str, Callable[[], Any]]:
    """Map each column's name to a function that loads its model."""
    folder, original, scaled = scaled_config(config)
    run = config.run.folder
    found: dict[str, Callable[[], Any]] = {
        BEFORE: lambda: extended.load_original(folder, original),
        SCALED: lambda: extended.load_original(folder, scaled),
    }
    if config.control:
        found[CONTROL] = lambda: lora.load_adapter(extended.load_original(folder, scaled), Path(run) / "control")
    found[AFTER] = lambda: extended.open_extension(run, folder)
    if config.attention != "full":
        other = "full" if config.keep_attention else config.attention
        found[f"extended, {other} attention"] = lambda: _other(extended.open_extension(run, folder), config)
    return found


def _other(adapted: Any, config: ExtendConfig) -> Any:
    """Switch the extended model to the attention that it does not keep: full, or the one it trained with."""
    if config.keep_attention:
        set_attention(adapted.get_base_model(), None)
    else:
        attend(adapted.get_base_model(), config)
    return adapted


def measure(
    config: ExtendConfig,
    result: RunResult,
    corpus: Corpus,
    plan: PositionPlan,
    device: torch.device,
    *,
    begin: Callable[[str], object],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[RangeLoss, ...]]:
    """Return the loss by position of each model on `device`; `begin` is called with each name before its model."""
    trained: nn.Module = result.model
    trained.to("cpu")  # frees the device's memory for the measured models
    losses = {}
    for name, load in subjects(config).items():
        begin(name)
        losses[name] = loss_by_position(load().to(device), corpus.held_out.tokens, plan, progress=progress)
    return losses


def make_report(
    config: ExtendConfig,
    result: RunResult,
    plan: PositionPlan,
    losses: Mapping[str, tuple[RangeLoss, ...]],
    seconds: float,
    *,
    device: torch.device,
    resumed: bool,
) -> dict[str, Any]:
    """Return the contents of `report.json`; `seconds` counts from the last start of the command."""
    _, original, scaled = scaled_config(config)
    own = extended.own_length(original)
    trains, every = lora.counts(result.model)
    return {
        "model": Path(config.model).name,
        "original": config.model,
        "own_length": own,
        "length": config.length,
        "rope": config.rope,
        "rope_parameters": scaled.rope_parameters,
        "attention": config.attention,
        "options": config.options,
        "keep_attention": config.keep_attention,
        "lora": config.lora.to_dict(),
        "optimizer": config.optimizer.to_dict(),
        "steps": result.steps,
        "step_tokens": result.config.step_tokens,
        "train_tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "trained_parameters": trains,
        "parameters": every,
        "whole_command_seconds": seconds,
        "resumed": resumed,
        "provenance": provenance(device, ("transformers", "peft")),
        "held_out_tokens": plan.tokens,
        "stretches": len(plan.starts),
        "step_between_windows": plan.step,
        "loss": {
            name: [{**asdict(entry), "perplexity": entry.perplexity} for entry in ranges]
            for name, ranges in losses.items()
        },
        "summary": {name: _summary(ranges, own) for name, ranges in losses.items()},
    }


def _summary(ranges: tuple[RangeLoss, ...], own: int) -> dict[str, float | None]:
    """Return the loss of the last range within the model's own length, of all ranges beyond it, and their difference.

    The standard error of the difference is that of the differences d_i of n stretches of the text,
    `sqrt(sum (d_i - mean d)^2 / (n (n - 1)))`, or None for a single one.
    """
    within = [entry for entry in ranges if entry.last <= own][-1]
    far = [entry for entry in ranges if entry.last > own]
    predictions = sum(entry.predictions for entry in far)
    beyond = sum(entry.loss * entry.predictions for entry in far) / predictions
    each = [
        sum(entry.stretches[i] * entry.predictions for entry in far) / predictions - near
        for i, near in enumerate(within.stretches)
    ]
    error = stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return {"within": within.loss, "beyond": beyond, "difference": beyond - within.loss, "standard_error": error}


def write(report: Mapping[str, Any], folder: Path) -> None:
    """Write report.json, the picture and README.md."""
    write_json(folder / REPORT, report)
    with aside(folder / PICTURE) as draft:
        draw(report).savefig(draft, format="png")
    write_atomically(folder / README, readme(report).encode())


def rows(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headers and lines of the table: loss and perplexity of each model, a line for each range of positions."""
    losses = report["loss"]
    headers = ["position", *losses]
    first = next(iter(losses.values()))
    lines = [
        [
            f"{entry['first']:,} to {entry['last']:,}",
            *(f"{found[i]['loss']:.4f} ({found[i]['perplexity']:.4g})" for found in losses.values()),
        ]
        for i, entry in enumerate(first)
    ]
    beyond = [f"{report['summary'][name]['beyond']:.4f}" for name in losses]
    lines.append([f"all above {report['own_length']:,}", *beyond])
    lines.append([f"less {within_range(report)}", *(difference(report["summary"][name]) for name in losses)])
    return headers, lines


def within_range(report: Mapping[str, Any]) -> str:
    """Return the range of positions with which those above the model's own length are compared."""
    near = [entry for entry in next(iter(report["loss"].values())) if entry["last"] <= report["own_length"]][-1]
    return f"{near['first']:,} to {near['last']:,}"


def difference(found: Mapping[str, Any]) -> str:
    """Return the loss above the own length minus the loss within, and its standard error."""
    error = "" if found["standard_error"] is None else f" ± {found['standard_error']:.4f}"
    return f"{found['difference']:+.4f}{error}"


def title(report: Mapping[str, Any]) -> str:
    """Return the title of table and picture."""
    return (
        f"{report['model']} from {report['own_length']:,} to {report['length']:,} tokens, "
        f"{report['attention']}, {report['rope']} positions"
    )


def draw(report: Mapping[str, Any]) -> Any:
    """Draw the loss of each model by position, a point for each range; a dotted line marks the own length."""
    figure = drawing.new_figure(7.6, 4.6)
    axes = figure.subplots()
    losses = report["loss"]
    highest = max(entry["loss"] for name in losses if name != BEFORE for entry in losses[name])
    lowest = min(entry["loss"] for found in losses.values() for entry in found)
    room = max(0.08 * (highest - lowest), 0.01)
    first = next(iter(losses.values()))
    places = list(range(len(first)))
    for number, (name, found) in enumerate(losses.items()):
        worst = found[-1]["loss"]
        label = name if worst <= highest + room else f"{name} (at the end {worst:.2f})"
        style = drawing.Style.number(number)._asdict()
        # Where two lines coincide, the wider one below shows beside the upper one.
        axes.plot(
            places, [entry["loss"] for entry in found], **style, linewidth=3 - number / 2, markersize=5, label=label
        )
    within = sum(entry["last"] <= report["own_length"] for entry in first)
    own = f"{report['own_length']:,} tokens, the original's own length"
    axes.axvline(within - 0.5, color="#888888", linewidth=1.2, linestyle=":", label=own)
    axes.set_xticks(places, [f"{entry['first']:,} to\n{entry['last']:,}" for entry in first])
    axes.set_ylim(lowest - room, highest + room)
    axes.set(xlabel="position in the window (tokens of context)", ylabel="held-out loss (nats per token)")
    axes.set_title(title(report), fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return figure


def readme(report: Mapping[str, Any]) -> str:
    """Return the README of the folder: how to load it, and the table."""
    original = json.dumps(report["original"])
    kept = "\nimport subquad.hf\nsubquad.hf.register()" if report["keep_attention"] else ""
    headers, lines = rows(report)
    rules = [":---", *("---:" for _ in headers[1:])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (headers, rules, *lines))
    return f"""# {title(report)}

A PEFT adapter for {report["original"]}, and a model configuration with scaled positions. Load the original with that
configuration, or its positions stay unscaled:

```python
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM{kept}

config = AutoConfig.from_pretrained("FOLDER")
original = AutoModelForCausalLM.from_pretrained({original}, config=config)
model = PeftModel.from_pretrained(original, "FOLDER")
```

FOLDER is this folder. `subquad lora merge FOLDER --out NEW` writes one plain transformers model with its tokenizer.

Held-out loss in nats a token (perplexity), over the same {report["held_out_tokens"]:,} tokens at each range of
positions:

{table}
"""
