"""Trains the five stdlib recipes at equal steps and writes the table in docs/five-mechanisms.md.

    python benchmarks/compare_stdlib.py [--steps N] [--only llp,latte] [--folder runs/five-mechanisms]

Runs that are in the folder already are gone on with. With --only no table is written; a run without it, which
finds the finished ones, writes it. Everything but the mechanism (and with it the way positions enter)
is the same in the five recipes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.report import described
from subquad.data import Corpus
from subquad.evaluation import evaluate
from subquad.evaluation.provenance import provenance
from subquad.recipes import recipe_path
from subquad.training import TrainConfig, train
from subquad.training.progress import read_metrics
from subquad.training.report import measure, write_report

ROOT = Path(__file__).resolve().parents[1]
MECHANISMS = ("full", "window", "llp", "linear", "latte")


def main() -> None:
    """Train, evaluate, write the JSON and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps of each (default: the recipe's)")
    parser.add_argument("--only", default=",".join(MECHANISMS), help="mechanisms, separated by commas")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "five-mechanisms", help="folder of the runs")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(MECHANISMS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; valid: {', '.join(MECHANISMS)}")
    rows = [run(name, arguments.folder / name, arguments.steps) for name in names]
    if names != list(MECHANISMS):
        Console().print(f"{len(rows)} of {len(MECHANISMS)} ran: no table; make it by {command(arguments.steps)}")
        return
    origin = provenance("cuda" if torch.cuda.is_available() else "cpu", ("transformers",))
    results = {
        "command": command(arguments.steps),
        "date": origin["date"],
        "hardware": described(origin["machine"]),
        "versions": {name: origin["versions"][name] for name in ("subquad", "python", "torch", "transformers")},
        "commit": origin["commit"],
        "rows": rows,
    }
    target = ROOT / "benchmarks" / "results" / "five_mechanisms.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "five-mechanisms.md").write_text(page(results), encoding="utf-8")


def run(name: str, folder: Path, steps: int | None) -> dict[str, Any]:
    """One recipe: trained without a time limit, evaluated on all of the held-out text."""
    config = TrainConfig.from_file(recipe_path(f"stdlib-{name}"))
    changes: dict[str, Any] = {"folder": str(folder), "max_minutes": None}
    schedule = config.schedule
    if steps is not None:
        changes["steps"] = steps
        schedule = schedule.replace(warmup=min(schedule.warmup, steps // 10))
    console = Console()
    console.rule(name)
    result = train(config.replace(run=config.run.replace(**changes), schedule=schedule), console=console)
    if result.interrupted:
        raise SystemExit(f"interrupted; go on with: {command(steps)}")
    corpus, decoder = result.corpus, result.model.model
    assert isinstance(corpus, Corpus)
    held_out = corpus.held_out
    evaluation = evaluate(
        decoder,
        held_out.tokens,
        length=config.batch.length,
        text_bytes=held_out.text_bytes,
        words=held_out.words,
    )
    if evaluation.bits_per_byte is None:
        raise SystemExit("the held-out text has no bytes")
    speeds = [record["tokens_per_s"] for record in read_metrics(folder) if "tokens_per_s" in record]
    report = measure(
        decoder,
        corpus.held_out_text(),
        held_out.tokens[:].tolist(),
        bits_per_byte=evaluation.bits_per_byte,
        files_hash=corpus.fingerprint[:16],
        steps=result.steps,
        train_tokens_per_second=speeds[-1],
    )
    write_report(report, folder)
    console.print(report.table())
    return {"name": name, "tokens": result.tokens, "loss": evaluation.loss, **report.to_dict()}


def command(steps: int | None) -> str:
    """The command that makes this page."""
    return "python benchmarks/compare_stdlib.py" + ("" if steps is None else f" --steps {steps}")


def page(results: dict[str, Any]) -> str:
    """The page with the table."""
    rows = results["rows"]
    first = rows[0]
    lines = [
        "# Five mechanisms at equal steps",
        "",
        f"The recipes `stdlib-*`: the same decoder, data, optimizer and {first['steps']:,} steps "
        f"({first['tokens']:,} tokens) for each; only the mechanism differs, and with it how positions enter (rotary "
        "in full, window and llp, sinusoidal in linear and latte). One run each with one seed: differences of about "
        "one percent say nothing. Learning rates were not tuned for each mechanism.",
        "",
        "| mechanism | held-out bits per byte | parameters | training tokens/s | decoding tokens/s "
        "| state after 1,000 tokens | after 100,000 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        states = [f"{state['bytes']:,} B" + ("" if state["measured"] else " (computed)") for state in row["states"]]
        numbers = [f"{row['parameters']:,}", f"{row['train_tokens_per_second']:,.0f}"]
        numbers.append(f"{row['decode_tokens_per_second']:,.0f}")
        lines.append(f"| {row['name']} | {row['bits_per_byte']:.3f} | {' | '.join([*numbers, *states])} |")
    lines += [
        "",
        f"The same {first['held_out_bytes']:,} held-out bytes in one piece: gzip -9 {first['gzip_bits_per_byte']:.3f}, "
        f"xz -9e {first['xz_bits_per_byte']:.3f} bits per byte.",
        "",
        "The state is that of one decoded sequence, in float32. The recipes train on windows of 512 tokens, where full "
        "attention is still cheap: speeds there say little about longer contexts.",
        "",
        f"Made by `{results['command']}` on {results['date']}: {results['hardware']}; "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + f"; commit {results['commit']}; files {first['files_hash']}. "
        "Numbers in full: `benchmarks/results/five_mechanisms.json`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
