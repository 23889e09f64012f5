"""Write the tables and pictures of docs/extend.md again, from the reports of `subquad extend`.

    python docs/make_extend.py runs/longer-shifted runs/longer-llp    # keeps their reports in benchmarks/results
    python docs/make_extend.py

Only what stands between `<!-- NAME -->` and `<!-- /NAME -->` is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from make_performance import BLOCK

from subquad.tools import _extend_report
from subquad.tools.provenance import described

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS, IMAGES = ROOT / "docs" / "extend.md", ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
KINDS = ("shifted", "llp")


def main() -> None:
    """Take over reports where runs are named, and write the page."""
    parser = argparse.ArgumentParser(description="the tables of docs/extend.md")
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished runs")
    for run in parser.parse_args().runs:
        report = json.loads((run / _extend_report.REPORT).read_text(encoding="utf-8"))
        report["original"] = report["model"]  # a folder of whoever measured
        if report["attention"] not in KINDS:
            raise ValueError(f"the page shows {' and '.join(KINDS)}, got attention={report['attention']!r} in {run}")
        if report.get("resumed"):
            raise ValueError(f"{run} was gone on with: its times are those of its last start; run it in a new folder")
        result(report["attention"]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for kind in KINDS:
        if result(kind).is_file():
            _extend_report.draw(read(kind)).savefig(IMAGES / f"extend_{kind}.png", format="png")
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def result(kind: str) -> Path:
    """The report of one kind of attention."""
    return RESULTS / f"extend_{kind}.json"


def read(kind: str) -> dict[str, Any]:
    """What it holds."""
    report: dict[str, Any] = json.loads(result(kind).read_text(encoding="utf-8"))
    return report


def rewritten(page: str) -> str:
    """The page with each block written anew."""
    return BLOCK.sub(lambda m: f"<!-- {m['name']} -->\n{block(m['name'])}\n<!-- /{m['name']} -->", page)


def block(kind: str) -> str:
    """The table of a report, and under it what was trained, where and how long."""
    if not result(kind).is_file():
        return "*Not measured yet.*"
    report = read(kind)
    headers, lines = _extend_report.rows(report)
    rules = [":---", *("---:" for _ in headers[1:])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (headers, rules, *lines))
    far, near = report["summary"]["extended"]["beyond"], report["summary"]["extended"]["within"]
    own = report["own_length"]
    comparison = f"{abs(far - near):.4f} nats {'below' if far <= near else 'above'}"
    text = (
        f"{report['steps']:,} steps of {report['step_tokens']:,} tokens, {report['rope']} positions, rank "
        f"{report['lora']['rank']}: {report['trained_parameters']:,} of {report['parameters']:,} numbers trained. The "
        f"whole command took {report['whole_command_seconds'] / 60:.1f} minutes ({report['seconds'] / 60:.1f} of them "
        f"in the steps of the extension) on {described(report['provenance']['machine'])}. Each range predicts the same "
        f"{report['held_out_tokens']:,} tokens. The extended model's loss above {own:,} tokens of context is "
        f"{comparison} its loss from {own // 2 + 1:,} to {own:,}"
    )
    if "control" in report["summary"]:
        gap = report["summary"]["control"]["beyond"] - far
        text += f", and {abs(gap):.4f} nats {'below' if gap >= 0 else 'above'} the control's"
    return f"{table}\n\n{text}.\n\n![Loss by position, {kind}](images/extend_{kind}.png)"


if __name__ == "__main__":
    main()
