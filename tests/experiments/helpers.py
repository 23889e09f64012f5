"""Two small experiments: one trains, one measures."""

import json

import yaml

from experiments.harness.recipe import merged, read_recipe
from experiments.harness.units import units_of

TINY = {
    "model": {"vocab_size": 256, "dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full"},
    "data": {"path": "@little", "tokenizer": "bytes"},
    "batch": {"length": 16, "size": 2},
    "schedule": {"warmup": 1},
    "run": {"steps": 4, "precision": "float32"},
}
PERCEIVER = {"model": {"attention": "perceiver_ar", "options": {"perceiver_ar": {"latents": 4}}}}
TRAIN = {
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
MEASURE = {
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
TWO = {
    "kind": "higher",
    "evidence": "times",
    "metric": "value",
    "pairs": [[{"arm": "two"}, {"arm": "one"}]],
    "where": {"tokens": 2},
}
CLAIMS = [
    {"id": "more", "says": "two is more than one", "theirs": "2 > 1", **TWO},
    {"id": "judged", "says": "there are rows", "theirs": "many", "kind": "function", "evidence": "exact", "ours": True},
    {"id": "other", "says": "as good as X", "theirs": "X 3", "kind": "not comparable", "why": "other tokens"},
]


def rows(**values):
    """Return a row for each arm and seed with its loss."""
    return [{"arm": arm, "seed": i, "loss": v} for arm, found in values.items() for i, v in enumerate(found)]


def write(folder, recipe, claims, code="", **more):
    """Write an experiment's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("# an experiment\n" + yaml.safe_dump(recipe, sort_keys=False))
    expected = {
        "paper": "A paper",
        "title": "Its table",
        "source": "Table 0",
        "comparable": "no",
        "claims": claims,
        **more,
    }
    (folder / "expected.json").write_text(json.dumps(expected))
    marks = "<!-- begin: written by python -m experiments -->\n<!-- end -->"
    (folder / "README.md").write_text(f"# {folder.name}\n\nBefore.\n\n{marks}\n\nAfter.\n")
    (folder / "experiment.py").write_text(code)


def change(folder, settings=None, **values):
    """Merge `settings` into those of the recipe, and replace its other `values`."""
    file = folder / "recipe.yaml"
    before = yaml.safe_load(file.read_text())
    values["settings"] = merged(before["settings"], settings or {})
    file.write_text(yaml.safe_dump({**before, **values}, sort_keys=False))


def planned(folder, scale="cpu", **more):
    return units_of(folder, read_recipe(folder), scale, work=folder.parent.parent / "work", data={}, **more)
