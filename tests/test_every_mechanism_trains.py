"""Every mechanism and stack trains: on text where it has a causal form, on a classification where it has the other."""

import math
import textwrap

import pytest

from subquad.attention import mechanism, names
from subquad.models.stacks import STACKS
from subquad.training import TrainConfig, train
from subquad.training.progress import read_metrics
from tests.models.small import OPTIONS

STEPS = {"language": 8, "classify": 2}
SMALL = OPTIONS | {
    "latte": {"num_latents": 8}, "linformer": {"max_tokens": 64, "projected": 8}, "luna": {"memory_tokens": 8},
    "perceiver": {"latents": 8}, "perceiver_io": {"latents": 8},
}  # fmt: skip
HISTORIES = [
    {"history": "cross"},
    {"history": "self"},
    {"history": "segments", "segment": 16},
    {"history": "compressed", "history_tokens": 48, "projected": 8},
]
FORMS = {name: mechanism(name).forms for name in names()} | {name: stack.forms for name, stack in STACKS.items()}
CAUSAL = [name for name, forms in FORMS.items() if "causal" in forms and name != "perceiver_ar"]
LANGUAGE = [pytest.param(name, SMALL.get(name, {}), id=name) for name in CAUSAL]
LANGUAGE += [pytest.param("perceiver_ar", {"latents": 16, **options}, id=options["history"]) for options in HISTORIES]


def config(task, name, options, folder):
    steps, position = STEPS[task], "rope" if name in names() and mechanism(name).rotates else "none"
    model = {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": name, "options": {name: options}}
    run = {"steps": steps, "log_every": 1, "eval_every": steps, "eval_windows": 2, "device": "cpu", "trackers": []}
    values = {
        "task": task,
        "model": {**model, "position": position},
        "batch": {"length": 64, "size": 4},
        "optimizer": {"lr": 0.01},
        "schedule": {"warmup": 1},
        "run": {**run, "folder": str(folder / "run")},
    }
    if task == "classify":
        values["classify"] = {"examples": 200, "held_out": 40}
    else:
        values["data"] = {"path": textwrap.__file__, "tokenizer": "bytes", "cache": str(folder.parent / "cache")}
    return TrainConfig.from_dict(values)


@pytest.mark.parametrize(("name", "options"), LANGUAGE)
def test_a_language_model_learns(name, options, tmp_path):
    result = train(config("language", name, options, tmp_path))
    losses = [record["loss"] for record in read_metrics(result.folder) if "loss" in record]
    assert len(losses) == STEPS["language"]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert result.best_loss < losses[0]


@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if "bidirectional" in forms])
def test_a_classifier_trains(name, tmp_path):
    result = train(config("classify", name, SMALL.get(name, {}), tmp_path))
    assert result.steps == STEPS["classify"]
    assert math.isfinite(result.best_loss)


@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if forms == ("bidirectional",)])
def test_a_language_model_of_a_bidirectional_mechanism_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="--task classify"):
        train(config("language", name, SMALL.get(name, {}), tmp_path))
