"""`subquad probe`: tables, files, pictures and mistakes."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.cli import probe
from subquad.cli.probe import read_depths, read_lengths
from subquad.data import load_tokenizer
from subquad.evaluation import probe_report
from subquad.evaluation.probes import Score
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.training.config import TrainConfig

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


def written(tmp_path, *arguments: str) -> dict:
    """The JSON of a call that has to succeed; the picture has to be there."""
    assert probe.run([*arguments, "--out", str(tmp_path / "new" / "out"), "--device", "cpu"]) == 0
    (file,) = (tmp_path / "new" / "out").glob("*.json")
    assert file.with_suffix(".png").read_bytes().startswith(PNG)
    return json.loads(file.read_text())


def failed(capsys, *arguments: str) -> str:
    """The message of a call that ends with status 2."""
    with pytest.raises(SystemExit) as exit_info:
        probe.run(list(arguments))
    assert exit_info.value.code == 2
    return capsys.readouterr().err


# --- what is measured


def test_models_of_one_probe_are_compared(runs, tmp_path, capsys):
    found = written(tmp_path, runs["mqar"], runs["linear"], "--lengths", "32,16", "--samples", "9")
    out = capsys.readouterr().out
    assert (found["task"], found["lengths"], found["samples"], found["chance"]) == ("mqar", [16, 32], 9, 0.5)
    assert [run["run"] for run in found["runs"]] == ["mqar", "linear"]
    assert [run["model"]["attention"] for run in found["runs"]] == ["window", "linear"]
    for run in found["runs"]:
        assert run["probe"] == {"name": "mqar", "digits": 4, "pairs": 2, "symbols": 4}
        assert [entry["length"] for entry in run["lengths"]] == [16, 32]
        for entry in run["lengths"]:
            assert entry["overall"]["asked"] == sum(score["asked"] for score in entry["scores"]) == 18
            assert f"{100 * entry['overall']['value']:.1f} ±{100 * entry['overall']['error']:.1f}" in out
    for part in ("chance", "50", "2 pairs among 4 keys", "tokens from the value to where it is asked for", "16 to 31"):
        assert part in out
    first, second = ([entry["scores"] for entry in run["lengths"]] for run in found["runs"])
    for one, other in zip(first, second, strict=True):
        assert [score["asked"] for score in one] == [score["asked"] for score in other]


def test_a_call_gives_the_same_numbers_again_and_another_seed_others(runs, tmp_path):
    arguments = [runs["mqar"], "--samples", "40"]
    first = written(tmp_path / "a", *arguments)
    assert first == written(tmp_path / "b", *arguments, "--batch_size", "7", "--task", "mqar")
    assert first["lengths"] == [16, 32, 64]
    other = written(tmp_path / "c", *arguments, "--seed", "1")
    assert first["runs"][0]["lengths"] != other["runs"][0]["lengths"]


def test_more_pairs_can_be_asked_for_than_were_learned(runs, tmp_path):
    found = written(tmp_path, runs["mqar"], "--pairs", "4", "--lengths", "16")
    assert found["runs"][0]["probe"]["pairs"] == 4
    assert found["chance"] == 0.25


def test_keys_are_hidden_at_each_depth(runs, tmp_path, capsys):
    found = written(tmp_path, runs["passkey"], "--depths", "3", "--lengths", "10,20", "--samples", "5", "--digits", "3")
    for entry in found["runs"][0]["lengths"]:
        assert [(score["start"], score["asked"]) for score in entry["scores"]] == [(0, 5), (0.5, 5), (1, 5)]
        assert entry["overall"]["asked"] == 15
    assert "3 digits; chance 0.1%" in capsys.readouterr().out


def test_strings_are_copied_whole(runs, tmp_path):
    found = written(tmp_path, runs["copy"], "--depths", "2", "--lengths", "13", "--samples", "4")
    (entry,) = found["runs"][0]["lengths"]
    assert [(score["start"], score["stop"], score["asked"]) for score in entry["scores"]] == [
        (0, 0.5, 12),
        (0.5, 1, 12),
    ]


@pytest.mark.parametrize("text", [None, "file"])
def test_a_key_is_hidden_in_text(runs, tmp_path, text):
    more = [] if text is None else ["--text", runs[text]]
    arguments = [runs["text"], "--task", "passkey", "--lengths", "100", "--depths", "0,1", "--cache", runs["cache"]]
    found = written(tmp_path, *arguments, "--samples", "3", "--digits", "2", *more)
    assert (found["chance"], found["runs"][0]["probe"]) == (0.01, None)
    assert [score["start"] for score in found["runs"][0]["lengths"][0]["scores"]] == [0, 1]


def test_the_loss_of_text_is_measured_by_context(runs, tmp_path, capsys):
    arguments = [runs["text"], runs["latents"], "--task", "position", "--lengths", "8,32", "--cache", runs["cache"]]
    found = written(tmp_path, *arguments, "--samples", "6")
    out = capsys.readouterr().out
    whole, latents = found["runs"]
    assert [score["start"] for score in whole["lengths"][1]["scores"]] == [1, 2, 3, 5, 9, 17]
    assert [score["start"] for score in latents["lengths"][1]["scores"]] == [21]
    assert {entry["overall"]["asked"] for run in found["runs"] for entry in run["lengths"]} == {6 * 4}
    assert "last 4" in out
    assert found["chance"] is None


def test_a_perceiver_is_asked_for_as_much_as_its_latents_predict(runs, tmp_path, capsys):
    arguments = [runs["latents"], "--task", "passkey", "--lengths", "120", "--cache", runs["cache"], "--digits"]
    assert written(tmp_path, *arguments, "4")["chance"] == 1e-4
    assert "its last 12 tokens alone, and place 107 of 120 is asked for: 14" in failed(capsys, *arguments, "12")


def test_a_checkpoint_and_folders_of_one_name_can_be_measured(runs, tmp_path):
    shutil.copytree(runs["mqar"], tmp_path / "mqar")
    step = tmp_path / "mqar" / "checkpoints" / "checkpoint-2"
    step.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "mqar" / name, step / name)
    folders = [runs["mqar"], str(tmp_path / "mqar"), str(step)]
    found = written(tmp_path, *folders, "--lengths", "16")
    assert [run["run"] for run in found["runs"]] == folders
    assert found["runs"][0]["lengths"] == found["runs"][1]["lengths"] == found["runs"][2]["lengths"]


# --- pictures


def entries(*cells) -> list[probe_report.Entry]:
    found = []
    for name, length, start, stop, value in cells:
        score = Score(length, start, stop, 9, 9, value, 0.01)
        subject = probe_report.Subject(name, decoder=None, trained=length)
        found.append(probe_report.Entry(subject, length, score, (score,)))
    return found


def test_a_heatmap_has_each_score_in_its_cell_and_nothing_elsewhere():
    measured = entries(("a", 16, 1, 2, 0.25), ("a", 32, 2, 4, 0.75), ("b", 32, 2, 4, 1.0))
    names = {(1, 2): "1", (2, 4): "2 to 3"}
    figure = probe_report.draw_heatmaps(measured, title="t", label="l", names=names, chance=0.1)
    left, right, _ = figure.axes
    assert [text.get_text() for text in left.texts] == ["25", "75"]
    assert [text.get_position() for text in left.texts] == [(0, 0), (1, 1)]
    assert left.images[0].get_array().mask.tolist() == [[False, True], [True, False]]
    assert [(text.get_text(), text.get_position()) for text in right.texts] == [("100", (1, 1))]
    assert (left.get_title(), right.get_title()) == ("a", "b")


def test_lines_stand_at_the_middle_of_their_ranges():
    measured = entries(("a", 16, 1, 2, 3.0), ("b", 16, 4, 8, 2.0), ("b", 32, 4, 8, 2.5))
    options = {"title": "t", "x": "x", "y": "y", "chance": None, "doubling": True}
    figure = probe_report.draw_lines(measured, **options)
    assert [axis.get_title() for axis in figure.axes] == ["16 tokens", "32 tokens"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, 3]]
    (only,) = probe_report.draw_lines(measured[1:], **options | {"chance": 0.5, "doubling": False}).axes
    assert [text.get_text() for text in only.get_legend().get_texts()] == ["chance", "16 tokens", "32 tokens"]


# --- mistakes


def test_lists_of_numbers_are_read():
    assert read_lengths(None) == ()
    assert read_lengths("512,128,512") == (128, 512)
    assert read_depths(None) == read_depths("5") == (0, 0.25, 0.5, 0.75, 1)
    assert read_depths("1") == read_depths("0.5") == (0.5,)
    assert read_depths("1,0,0.3") == (0, 0.3, 1)


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("mqar", ["--lengths", "16,x"], "lengths are numbers of tokens between commas, as 128,256,512, got '16,x'"),
    ("mqar", ["--lengths", "0"], "lengths must be at least 1, got 0"),
    ("mqar", ["--lengths", "6"], "mqar with pairs=2 needs sequences of at least 7 tokens, got length=6"),
    ("passkey", ["--depths", "0,1.5"], "a depth must lie between 0 (the start) and 1 (the end), got 1.5"),
    ("passkey", ["--depths", "0"], "there must be at least 1 depth, got 0"),
    ("passkey", ["--depths", "a"], "depths are a number of them, or depths between commas, as 0,0.5,1, got 'a'"),
    ("passkey", ["--depths", "0,a"], "depths are a number of them, or depths between commas, as 0,0.5,1, got '0,a'"),
    ("mqar", ["--depths", "3"], "--depths is for --task passkey and copy, and the task is mqar; leave it out"),
    ("mqar", ["--samples", "0"], "samples must be at least 1, got 0"),
    ("mqar", ["--batch_size", "0"], "batch_size must be at least 1, got 0"),
    ("mqar", ["--seed", "-1"], "seed must be at least 0, got -1"),
    ("mqar", ["--task", "pass"], "task must be"),
    ("mqar", ["--task", "copy"], "was trained on the probe mqar and knows no other tokens, got --task copy"),
    ("mqar", ["--task", "position"], "--task position is for models of text, and mqar was trained on the probe mqar"),
    ("mqar", ["--text", "stdlib"], "--text is for models of text, and mqar was trained on a probe; leave it out"),
    ("mqar", ["--digits", "3"], "--digits is for the probe passkey, and the run's is mqar; leave it out"),
    ("mqar", ["--pairs", "5"], "the vocabulary is too small: mqar needs a key for each of its pairs"),
    ("copy", ["--pairs", "2"], "--pairs is for the probe mqar, and the run's is copy; leave it out"),
    ("text", [], "it can be asked --task passkey or position, no --task was given; for mqar and copy train a model by"),
    ("text", ["--task", "mqar"], "it can be asked --task passkey or position, got --task mqar"),
    ("text", ["--task", "passkey", "--pairs", "2"], "--pairs is for models that were trained on the probe mqar"),
    ("text", ["--task", "position", "--digits", "2"], "--digits is for --task passkey; leave it out"),
    ("text", ["--task", "position", "--depths", "2"], "--depths is for --task passkey and copy, and the task is pos"),
    ("text", ["--task", "position", "--lengths", "1"], "lengths must be at least 2"),
    ("text", ["--task", "position", "--lengths", "9999"], "too few for a window of 9999 and the token after it"),
    ("text", ["--task", "passkey", "--lengths", "50"], "a key of 5 digits take 86 tokens, got length=50"),
    ("text", ["--task", "passkey", "--digits", "0"], "digits must be at least 1, got 0"),
])  # fmt: skip
def test_mistakes_are_answered(runs, capsys, name, arguments, message):
    assert message in failed(capsys, runs[name], "--cache", runs["cache"], *arguments)


def test_runs_that_cannot_be_compared_are_refused(runs, tmp_path, capsys):
    assert "mqar was trained on a probe and text was not" in failed(capsys, runs["mqar"], runs["text"])
    assert "mqar and other were trained on different probes: {'name': 'mqar'" in failed(
        capsys, runs["mqar"], runs["other"]
    )
    shutil.copytree(runs["text"], tmp_path / "words")
    words = Tokenizer(models.WordLevel({"?": 0, "line": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words" / "tokenizer.json"))
    folder, more = str(tmp_path / "words"), ["--task", "position", "--cache", runs["cache"]]
    assert "text and words have different tokenizers" in failed(capsys, runs["text"], folder, *more)
    assert "is not what" in failed(capsys, folder, *more)
    more = ["--task", "passkey", "--text", runs["file"], "--lengths", "99", "--cache", runs["cache"]]
    assert "the tokenizer cannot spell digits" in failed(capsys, folder, *more)


def test_folders_without_a_model_or_its_text_are_refused(runs, tmp_path, capsys):
    assert "there is no folder" in failed(capsys, str(tmp_path / "nothing"))
    shutil.copytree(runs["text"], tmp_path / "text")
    (tmp_path / "text" / "config.yaml").unlink()
    assert "has no config.yaml that names its text; give one by --text" in failed(
        capsys, str(tmp_path / "text"), "--task", "position"
    )
