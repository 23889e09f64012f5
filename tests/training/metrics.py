"""What runs are compared by."""

import json


def records(folder) -> list[dict[str, float]]:
    """The metrics without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("seconds", "tokens_per_s")} for line in lines]
