"""Train the five stdlib recipes at equal steps and write benchmarks/results/five_mechanisms.json.

    python benchmarks/compare_stdlib.py [--steps N] [--only llp,latte] [--folder runs/five-mechanisms]
    python docs/make_performance.py    # writes benchmarks/results/five_mechanisms.md from that file

Runs that are already in the folder continue. With --only no results are written; run the command again without it to
write those of all five. The recipes differ only in the mechanism, and with it in how positions enter.
"""

from __future__ import annotations

import argparse
import json
import lzma
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
from subquad.training.baselines import NGRAM_READ
from subquad.training.progress import read_metrics
from subquad.training.report import measure, write_report

ROOT = Path(__file__).resolve().parents[1]
STEPS = 680
MECHANISMS = ("full", "window", "llp", "linear", "latte")


def main() -> None:
    """Train, evaluate and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each (default: %(default)s)")
    parser.add_argument("--only", default=",".join(MECHANISMS), help="mechanisms, separated by commas")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "five-mechanisms", help="folder of the runs")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(MECHANISMS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; valid: {', '.join(MECHANISMS)}")
    rows = [run(name, arguments.folder / name, arguments.steps) for name in names]
    if names != list(MECHANISMS):
        whole = command(arguments.steps)
        Console().print(f"{len(rows)} of {len(MECHANISMS)} ran: no results are written; for all of them run {whole}")
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


def run(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train `steps` steps of one recipe and evaluate it on the whole held-out text."""
    config = TrainConfig.from_file(recipe_path(f"stdlib-{name}"))
    changes: dict[str, Any] = {"folder": str(folder), "steps": steps}
    schedule = config.schedule.replace(warmup=min(config.schedule.warmup_of(steps), steps // 10))
    console = Console()
    console.rule(name)
    result = train(config.replace(run=config.run.replace(**changes), schedule=schedule), console=console)
    if result.interrupted:
        raise SystemExit(f"interrupted; go on with: {command(steps)}")
    corpus, decoder = result.corpus, result.decoder
    assert isinstance(corpus, Corpus)
    held_out = corpus.held_out
    counts: dict[str, Any] = {"text_bytes": held_out.text_bytes, "words": held_out.words}
    evaluation = evaluate(decoder, held_out.tokens, length=config.batch.length, **counts)
    if evaluation.bits_per_byte is None:
        raise SystemExit("the held-out text has no bytes")
    speeds = [record["tokens_per_s"] for record in read_metrics(folder) if "tokens_per_s" in record]
    held_out_text = corpus.held_out_text()
    report = measure(
        decoder,
        corpus.train_text(NGRAM_READ),
        held_out_text,
        held_out.tokens[:].tolist(),
        bits_per_byte=evaluation.bits_per_byte,
        files_hash=corpus.fingerprint[:16],
        steps=result.steps,
        tokens=result.tokens,
        train_tokens_per_second=speeds[-1],
    )
    write_report(report, folder)
    console.print(report.table())
    alone = {
        "gzip_bits_per_byte": report.baselines.gzip_bits_per_byte,
        "xz_bits_per_byte": 8 * len(lzma.compress(held_out_text, preset=9 | lzma.PRESET_EXTREME)) / len(held_out_text),
    }
    return {"name": name, "tokens": result.tokens, "loss": evaluation.loss, **alone, **report.to_dict()}


def command(steps: int) -> str:
    """Return the command that writes the results."""
    return "python benchmarks/compare_stdlib.py" + ("" if steps == STEPS else f" --steps {steps}")


if __name__ == "__main__":
    main()
