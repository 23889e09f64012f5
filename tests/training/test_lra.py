"""Every task of Long Range Arena trains by one command with everything that reads whole sequences."""

import functools
import gc
import json

import pytest
import yaml

from subquad.attention import mechanism, names
from subquad.cli import main
from subquad.cli import train as command
from subquad.data import labelled
from subquad.evaluation.classes import fit_bag_of_tokens
from subquad.training.progress import read_metrics
from tests.training.lra_files import MEASURED, TRAIN, write_release

BIDIRECTIONAL = [name for name in names() if "bidirectional" in mechanism(name).forms] + ["perceiver", "perceiver_io"]
CAUSAL_ONLY = [name for name in names() if mechanism(name).forms == ("causal",)]
TASKS = ("listops", "text", "retrieval", "image", "pathfinder32", "pathfinder128")
LENGTH = 16
"""Tokens that are read of a sequence: the first ones; what is longer is cut."""
OPTIONS = {
    "bigbird": {"block": 4, "num_global": 1, "num_random": 1},
    "dilated": {"width": 4, "dilation": 2},
    "elita": {"horizon": 16},
    "latte": {"num_latents": 4},
    "latte_macchiato": {"num_latents": 4, "width": 4},
    "linformer": {"max_tokens": 16, "projected": 4},
    "llp": {"segment": 8},
    "llp_printed": {"segment": 8},
    "longformer": {"width": 4},
    "luna": {"memory_tokens": 4},
    "perceiver": {"latents": 4},
    "perceiver_io": {"latents": 4},
    "shifted": {"group": 8},
    "strided": {"stride": 4},
    "window": {"width": 4},
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A configuration for each task, over small files in the layouts of the release."""
    folder = tmp_path_factory.mktemp("lra")
    files = {}
    for task in TASKS:
        values = {
            "task": "classify",
            "model": {"dim": 8, "num_layers": 1, "num_heads": 2, "position": "learned", "options": OPTIONS},
            "classify": {"dataset": task, "path": str(write_release(folder, task)), "cache": str(folder / "cache")},
            "batch": {"length": LENGTH, "size": 4},
            "schedule": {"warmup": 1},
            "run": {"steps": 2, "log_every": 1, "eval_every": 0, "device": "cpu", "threads": 1, "precision": "float32"},
        }
        files[task] = folder / f"{task}.yaml"
        files[task].write_text(yaml.safe_dump(values), encoding="utf-8")
    return files


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Runs are short and many: data and baselines are found once, the parser is made once."""
    patch = pytest.MonkeyPatch()
    found, read = {}, labelled.labelled_corpus

    def once(config, length, **kwargs):
        key = (config.digest(), length)
        if key not in found:
            found[key] = read(config, length, **kwargs)
        return found[key]

    fit = functools.cache(fit_bag_of_tokens)
    patch.setattr("subquad.training.tasks_classify.labelled_corpus", once)
    patch.setattr("subquad.cli.eval.fit_bag_of_tokens", fit)
    patch.setattr(command, "make_parser", functools.cache(command.make_parser))
    gc.freeze()  # the Trainer collects garbage at its end, and looks at all that pytest holds
    yield
    gc.unfreeze()
    patch.undo()


def trained(file, folder, name, *flags) -> dict:
    """What the command has measured of its model."""
    arguments = ["train", "--config", str(file), "--run.folder", str(folder), "--model.attention", name, *flags]
    assert main(arguments) == 0
    losses = [record["loss"] for record in read_metrics(folder) if "loss" in record]
    assert len(losses) == 2
    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_a_task_trains(task, name, release, tmp_path):
    measured = trained(release[task], tmp_path, name)
    assert measured["examples"] == (TRAIN // 10 if task.startswith("pathfinder") else MEASURED)
    for key in ("accuracy", "constant", "bag_of_tokens"):
        assert 0 <= measured[key] <= 1


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_what_reads_forward_alone_classifies_too(name, release, tmp_path):
    trained(release["listops"], tmp_path, name, "--classify.causal", "true")


@pytest.mark.parametrize(("task", "pixels"), [("image", "64"), ("pathfinder32", "1,024")])
def test_what_is_left_of_an_image_is_not_mirrored(task, pixels, release, tmp_path, capsys):
    flags = ["--config", str(release[task]), "--run.folder", str(tmp_path), "--classify.augment", "true"]
    assert main(["train", *flags]) == 1
    message = f"classify.augment=true needs whole images of {pixels} pixels, got batch.length=16"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "checkpoints").exists()


def test_augmented_sequences_train(release, tmp_path):
    for task, length in (("listops", "16"), ("retrieval", "16"), ("image", "64")):
        flags = ["--classify.augment", "true", "--batch.length", length, "--model.max_positions", "64"]
        trained(release[task], tmp_path / task, "latte", *flags)


@pytest.mark.parametrize("task", ["retrieval", "image"])
def test_llp_in_its_causal_reading(task, release, tmp_path):
    trained(release[task], tmp_path, "llp", "--classify.causal", "true")
