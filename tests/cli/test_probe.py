"""`subquad probe`: tables, files, pictures and mistakes."""

import json
import shutil

import pytest
import torch

from subquad.data import load_tokenizer
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.training.config import TrainConfig
from tests.cli.folders import word_tokenizer

MODEL = {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "window", "init_std": 0.2}
PNG = b"\x89PNG\r\n"


def made(folder, values, **model):
    """The folder of a run of no steps: its configuration and the first weights."""
    config = TrainConfig.from_dict({**values, "model": MODEL | model, "run": {"folder": str(folder)}})
    size = 256 if config.task == "language" else config.probe.vocab_size
    config = config.replace(model=config.model.replace(vocab_size=size))
    torch.manual_seed(0)
    SubquadForCausalLM(SubquadConfig.from_decoder(config.model)).save_pretrained(folder)
    config.to_file(folder / "config.yaml")
    if config.task == "language":
        load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of each kind, by name."""
    root = tmp_path_factory.mktemp("probe")
    lines = [f"line {i} of a text é 0123456789\n" * (1 + i % 3) for i in range(120)]
    (root / "text.txt").write_text("".join(lines), encoding="utf-8")
    data = {"path": str(root / "text.txt"), "tokenizer": "bytes", "held_out": 0.3, "cache": str(root / "cache")}
    recall = {"task": "probe", "probe": {"pairs": 2, "symbols": 4}, "batch": {"length": 16, "size": 2}}
    text = {"data": data, "batch": {"length": 32, "size": 2}}
    latents = {"attention": "perceiver_ar", "options": {"perceiver_ar": {"latents": 12}}}
    return {
        "root": root,
        "cache": str(root / "cache"),
        "file": str(root / "text.txt"),
        "mqar": made(root / "mqar", recall),
        "linear": made(root / "linear", recall, attention="linear", position="sinusoidal"),
        "other": made(root / "other", recall | {"probe": {"pairs": 1, "symbols": 4}}),
        "passkey": made(root / "passkey", recall | {"probe": {"name": "passkey", "digits": 2}}),
        "copy": made(root / "copy", recall | {"probe": {"name": "copy", "shortest": 3}}),
        "text": made(root / "text", text),
        "latents": made(root / "latents", text, **latents),
    }


@pytest.fixture
def written(request, printed, tmp_path, monkeypatch):
    """Run the command; return the JSON that it writes beside a picture, and what it prints."""
    if request.node.get_closest_marker("draws") is None:  # the picture is made, but not drawn
        monkeypatch.setattr("subquad.evaluation.drawing.save", lambda figure, file: file.write_bytes(PNG))

    def run(*arguments):
        out = printed("probe", *arguments, "--out", tmp_path / "new" / "out", "--device", "cpu")
        (file,) = (tmp_path / "new" / "out").glob("*.json")
        assert file.with_suffix(".png").read_bytes().startswith(PNG)
        return json.loads(file.read_text()), out

    return run


@pytest.mark.draws
def test_models_of_one_probe_are_compared_at_the_same_sequences(runs, written):
    asked = [runs["mqar"], runs["linear"], "--lengths", "32,16,32", "--samples", "9"]
    found, out = written(*asked)
    assert (found["task"], found["lengths"], found["samples"], found["chance"]) == ("mqar", [16, 32], 9, 0.5)
    assert [run["run"] for run in found["runs"]] == ["mqar", "linear"]
    assert [run["model"]["attention"] for run in found["runs"]] == ["window", "linear"]
    for run in found["runs"]:
        assert run["probe"] == {"name": "mqar", "digits": 4, "pairs": 2, "symbols": 4}
        assert [entry["length"] for entry in run["lengths"]] == [16, 32]
        for entry in run["lengths"]:
            assert entry["overall"]["asked"] == sum(score["asked"] for score in entry["scores"]) == 18
            assert f"{100 * entry['overall']['value']:.1f} ±{100 * entry['overall']['error']:.1f}" in out
    for part in ("chance", "50", "2 pairs among 4 keys", "tokens from value to query", "16 to 31"):
        assert part in out
    first, second = (
        [[score["asked"] for score in entry["scores"]] for entry in run["lengths"]] for run in found["runs"]
    )
    assert first == second


def test_options_of_a_probe_arrive(runs, written, tmp_path):
    asked = [runs["mqar"], "--lengths", "16", "--samples", "9"]
    found, _ = written(*asked)
    assert written(*asked, "--batch_size", "7", "--task", "mqar")[0] == found
    assert written(*asked, "--seed", "1")[0]["runs"][0]["lengths"] != found["runs"][0]["lengths"]
    more, _ = written(runs["mqar"], "--pairs", "4", "--samples", "2")
    assert (more["runs"][0]["probe"]["pairs"], more["chance"], more["lengths"]) == (4, 0.25, [16, 32, 64])
    # A checkpoint, and folders of one name.
    shutil.copytree(runs["mqar"], tmp_path / "mqar")
    step = tmp_path / "mqar" / "checkpoints" / "checkpoint-2"
    shutil.copytree(runs["mqar"], step)
    folders = [runs["mqar"], str(tmp_path / "mqar"), str(step)]
    same, _ = written(*folders, *asked[1:])
    assert [run["run"] for run in same["runs"]] == folders
    assert [run["lengths"] for run in same["runs"]] == [found["runs"][0]["lengths"]] * 3


@pytest.mark.draws
def test_keys_are_hidden_at_each_depth(runs, written):
    asked = ["--depths", "3", "--lengths", "10,20", "--samples", "5", "--digits", "3"]
    found, out = written(runs["passkey"], *asked)
    for entry in found["runs"][0]["lengths"]:
        assert [(score["start"], score["asked"]) for score in entry["scores"]] == [(0, 5), (0.5, 5), (1, 5)]
        assert entry["overall"]["asked"] == 15
    assert "3 digits; chance 0.1%" in out


def test_strings_are_copied_whole(runs, written):
    found, _ = written(runs["copy"], "--depths", "2", "--lengths", "13", "--samples", "4")
    (entry,) = found["runs"][0]["lengths"]
    assert [(s["start"], s["stop"], s["asked"]) for s in entry["scores"]] == [(0, 0.5, 12), (0.5, 1, 12)]


@pytest.mark.parametrize(("depths", "text", "starts"), [
    ("1", False, [0.5]), ("1,0,0.3", True, [0, 0.3, 1]), (None, False, [0, 0.25, 0.5, 0.75, 1])
])  # fmt: skip
def test_a_key_is_hidden_in_text(runs, written, depths, text, starts):
    asked = ["--task", "passkey", "--lengths", "100", "--cache", runs["cache"], "--samples", "2", "--digits", "2"]
    more = (["--depths", depths] if depths else []) + (["--text", runs["file"]] if text else [])
    found, _ = written(runs["text"], *asked, *more)
    assert (found["chance"], found["runs"][0]["probe"]) == (0.01, None)
    assert [score["start"] for score in found["runs"][0]["lengths"][0]["scores"]] == starts


@pytest.mark.draws
def test_the_loss_of_text_is_measured_by_context(runs, written):
    asked = ["--task", "position", "--lengths", "8,32", "--cache", runs["cache"], "--samples", "6"]
    found, out = written(runs["text"], runs["latents"], *asked)
    whole, latents = found["runs"]
    assert [score["start"] for score in whole["lengths"][1]["scores"]] == [1, 2, 3, 5, 9, 17]
    assert [score["start"] for score in latents["lengths"][1]["scores"]] == [21]
    assert {entry["overall"]["asked"] for run in found["runs"] for entry in run["lengths"]} == {6 * 4}
    assert "last 4" in out
    assert found["chance"] is None


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("mqar", ["--lengths", "16,x"], "lengths must be numbers of tokens such as 128,256,512, got '16,x'"),
    ("mqar", ["--lengths", "0"], "lengths must be at least 1, got 0"),
    ("passkey", ["--depths", "0,1.5"], "a depth must be between 0 (start) and 1 (end), got 1.5"),
    ("passkey", ["--depths", "0"], "there must be at least 1 depth, got 0"),
    ("passkey", ["--depths", "a"], "depths must be a number of depths or a list such as 0,0.5,1, got 'a'"),
    ("mqar", ["--depths", "3"], "--depths is for --task passkey and copy, but the task is mqar; leave it out"),
    ("mqar", ["--samples", "0"], "samples must be at least 1, got 0"),
    ("mqar", ["--seed", "-1"], "seed must be at least 0, got -1"),
    ("mqar", ["--task", "copy"], "trained on the probe mqar and can't be asked --task copy; train a model that can"),
    ("mqar", ["--task", "position"], "--task position is for language models, but mqar was trained on the probe mqar"),
    ("mqar", ["--text", "stdlib"], "--text is for language models, but mqar was trained on a probe; leave it out"),
    ("mqar", ["--digits", "3"], "--digits is for the probe passkey, but the run's is mqar; leave it out"),
    ("text", [], "is a language model: give --task passkey or position, got no --task; for mqar and copy train"),
    ("text", ["--task", "passkey", "--pairs", "2"], "--pairs is for models trained on the probe mqar"),
    ("text", ["--task", "position", "--digits", "2"], "--digits is for --task passkey; leave it out"),
])  # fmt: skip
def test_mistakes_are_answered(runs, refused, name, arguments, message):
    assert message in refused("probe", runs[name], "--cache", runs["cache"], *arguments)


def test_runs_that_cannot_be_compared_are_refused(runs, tmp_path, refused):
    assert "mqar was trained on a probe and text was not" in refused("probe", runs["mqar"], runs["text"])
    message = refused("probe", runs["mqar"], runs["other"])
    assert "mqar and other were trained on different probes: {'name': 'mqar'" in message
    words, cache = tmp_path / "words", ["--cache", runs["cache"]]
    shutil.copytree(runs["text"], words)
    word_tokenizer({"?": 0, "line": 1}).save(str(words / "tokenizer.json"))
    message = refused("probe", runs["text"], words, "--task", "position", *cache)
    assert "text and words have different tokenizers" in message
    assert "has changed since" in refused("probe", words, "--task", "position", *cache)
    (words / "config.yaml").unlink()
    assert "names its text; give a text by --text" in refused("probe", words, "--task", "position")
