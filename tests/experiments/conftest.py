"""Two small experiments: one that trains, one that measures."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

TINY: dict[str, Any] = {
    "model": {"vocab_size": 256, "dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full"},
    "data": {"path": "@little", "tokenizer": "bytes"},
    "batch": {"length": 16, "size": 2},
    "schedule": {"warmup": 1},
    "run": {"steps": 4, "precision": "float32"},
}
PERCEIVER = {"model": {"attention": "perceiver_ar", "options": {"perceiver_ar": {"latents": 5}}}}
TRAIN: dict[str, Any] = {
    "group": ["arm", "kind", "budget"],
    "table": ["loss", "steps", "parameters"],
    "panels": [{"x": "arm", "y": "loss", "by": "budget"}],
    "settings": TINY,
    "arms": {"full": {"labels": {"kind": "all"}}, "few": {"labels": {"kind": "latents"}, "settings": PERCEIVER}},
    "scales": {
        "smoke": {"seeds": [0, 1], "held": {"tokens": 64, "stride": 4}},
        "cpu": {"reference": "full", "budgets": ["steps", "tokens", "flops"], "held": {"tokens": 64, "stride": 4}},
    },
}
MEASURE: dict[str, Any] = {
    "kind": "measure",
    "alone": True,
    "group": ["arm", "tokens"],
    "table": ["value", "note"],
    "panels": [{"x": "tokens", "y": "value", "by": "arm", "log": "xy"}],
    "settings": {"factor": 2},
    "arms": {"one": {"settings": {"value": 1}}, "two": {"settings": {"value": 2}}},
    "scales": {"smoke": {}, "cpu": {"seeds": [0, 1]}},
}
CODE = """
def run(unit):
    if unit.settings.get("fails"):
        raise ValueError("told to fail")
    value = unit.settings["value"] * unit.settings["factor"]
    return [{"tokens": tokens, "value": float(value * tokens + unit.seed), "note": "seen"} for tokens in (1, 2)]

def claim_judged(rows):
    return ("holds" if len(rows) > 2 else "does not hold"), f"{len(rows)} rows"
"""
CLAIMS = [
    {
        "id": "more",
        "says": "two is more than one",
        "theirs": "2 > 1",
        "kind": "higher",
        "metric": "value",
        "pairs": [[{"arm": "two"}, {"arm": "one"}]],
        "where": {"tokens": 2},
    },
    {"id": "judged", "says": "there are rows", "theirs": "many", "kind": "function"},
    {"id": "other", "says": "as good as X", "theirs": "X 3", "kind": "not comparable", "why": "other tokens"},
]


def write(folder: Path, recipe: dict[str, Any], claims: list[dict[str, Any]], code: str = "") -> None:
    """An experiment's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("# an experiment\n" + yaml.safe_dump(recipe, sort_keys=False))
    expected = {"paper": "A paper", "title": "Its table", "source": "Table 0", "comparable": "no", "claims": claims}
    (folder / "expected.json").write_text(json.dumps(expected))
    marks = "<!-- begin: written by python -m experiments -->\n<!-- end -->"
    (folder / "README.md").write_text(f"# {folder.name}\n\nBefore.\n\n{marks}\n\nAfter.\n")
    if code:
        (folder / "experiment.py").write_text(code)


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `trained` and `measured`; what is run is made beside it."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "experiments"
    claim = {"id": "same", "says": "all is counted", "theirs": "4", "kind": "equal", "metric": "steps", "value": 4}
    write(root / "trained", TRAIN, [{**claim, "pairs": [[{"arm": "full"}]]}])
    write(root / "measured", MEASURE, CLAIMS, CODE)
    return root
