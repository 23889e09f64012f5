"""Every mechanism and stack trains from the command line: real text where it is causal, a classification else."""

import json
import textwrap

import pytest
import yaml

from subquad.attention import mechanism, names
from subquad.cli import main
from subquad.models.stacks import STACKS
from subquad.training.progress import read_metrics

STEPS = {"language": 12, "classify": 3}
SMALL = {
    "bigbird": {"block": 8, "num_global": 1, "num_random": 1},
    "dilated": {"width": 8, "dilation": 2},
    "elita": {"horizon": 64},
    "latte": {"num_latents": 8},
    "latte_macchiato": {"num_latents": 8, "width": 8},
    "linformer": {"max_tokens": 64, "projected": 8},
    "llp": {"segment": 16},
    "llp_printed": {"segment": 16},
    "longformer": {"width": 16},
    "luna": {"memory_tokens": 8},
    "shifted": {"group": 16},
    "strided": {"stride": 8},
    "window": {"width": 16},
    "perceiver": {"latents": 8},
    "perceiver_io": {"latents": 8},
}
HISTORIES = {
    "cross": {},
    "self": {},
    "segments": {"segment": 16},
    "compressed": {"history_tokens": 48, "projected": 8},
}
FORMS = {name: mechanism(name).forms for name in names()} | {name: stack.forms for name, stack in STACKS.items()}
CAUSAL = [name for name, forms in FORMS.items() if "causal" in forms and name != "perceiver_ar"]
BOTH_WAYS = [name for name, forms in FORMS.items() if "bidirectional" in forms]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A tiny configuration over a real text: a module of the standard library."""
    folder = tmp_path_factory.mktemp("trains")

    def write(task, name, options):
        tiny = {
            "task": task,
            "model": {
                "dim": 16,
                "num_layers": 2,
                "num_heads": 2,
                "attention": name,
                "options": {name: options},
                "position": "rope"
                if getattr(mechanism(name) if name in names() else None, "rotates", False)
                else "none",
            },
            "batch": {"length": 64, "size": 4},
            "optimizer": {"lr": 0.01},
            "schedule": {"warmup": 1},
            "run": {"log_every": 1, "eval_every": STEPS[task], "eval_windows": 2, "device": "cpu"},
        }
        tiny["run"]["steps"] = STEPS[task]
        if task == "classify":
            tiny["classify"] = {"examples": 40, "held_out": 10}
        if task == "language":
            tiny["data"] = {"path": textwrap.__file__, "tokenizer": "bytes", "cache": str(folder / "cache")}
            tiny["run"]["sample_tokens"] = 5
        path = folder / f"{task}-{name}-{len(list(folder.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump(tiny), encoding="utf-8")
        return str(path), path.with_suffix("")

    return write


def falls(folder):
    """Whether the mean loss of the last four steps is below that of the first four."""
    losses = [record["loss"] for record in read_metrics(folder) if "loss" in record]
    assert len(losses) == STEPS["language"]
    return sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_language_model(name, config, capsys):
    path, folder = config("language", name, SMALL.get(name, {}))
    assert main(["train", "--config", path, "--run.folder", str(folder)]) == 0
    assert falls(folder)
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize("history", HISTORIES)
def test_perceiver_ar(history, config):
    path, folder = config("language", "perceiver_ar", {"history": history, "latents": 16} | HISTORIES[history])
    assert main(["train", "--config", path, "--run.folder", str(folder)]) == 0
    assert falls(folder)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_classifier(name, config):
    path, folder = config("classify", name, SMALL.get(name, {}))
    assert main(["train", "--config", path, "--run.folder", str(folder)]) == 0
    losses = [record["loss"] for record in read_metrics(folder) if "loss" in record]
    assert len(losses) == STEPS["classify"]
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert 0 <= evaluation["accuracy"] <= 1


@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if forms == ("bidirectional",)])
def test_no_language_model_of_what_sees_the_future(name, config, capsys):
    path, folder = config("language", name, SMALL.get(name, {}))
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "--config", path, "--run.folder", str(folder)])
    assert exit_info.value.code == 2
    assert "--task classify" in capsys.readouterr().err
    assert not folder.exists()
