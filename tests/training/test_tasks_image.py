"""Image runs: training, measuring, drawing and completing by the command line."""

import math
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
from PIL import Image

from subquad.cli import main
from subquad.data.images import load_images
from subquad.evaluation import evaluate_images
from subquad.testing import assert_in_budget
from subquad.training import TrainConfig, train
from subquad.training.errors import CheckpointError
from subquad.training.runs import chosen, load_image_run
from subquad.training.tasks import check, prepare_task
from tests.data.pictures import write_idx, write_png
from tests.training.helpers import failed, read_json, records, train_by_command

SHAPE = {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "linear", "position": "none", "init_std": 0.1}
LOGISTIC = {"image.output": "logistic", "image.mixtures": 3}


def images(data):
    """Return the settings of a run on the images in `data`, of 4 x 4 pixels."""
    return {
        "task": "image",
        "model": SHAPE,
        "image": {"path": str(data), "axes": True, "near": 1, "test_images": 6, "samples": 4},
        "batch": {"size": 4},
        "optimizer.lr": 0.01,
        "run.eval_windows": 5,
    }


def shown(file):
    with Image.open(file) as picture:
        return np.asarray(picture)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_idx(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config_in, data):
    """A run that the command made."""
    return train_by_command(config_in(tmp_path_factory.mktemp("image"), images(data), LOGISTIC))


def test_a_run_keeps_all_that_it_measured(trained, data):
    assert shown(trained / "samples.png").shape == (2 + 2 * 58, 2 + 2 * 58, 3), "4 x 4 pixels of 14 x 14, and gaps"
    config = TrainConfig.from_file(trained / "config.yaml")
    assert (config.batch.length, config.model.vocab_size) == (16, 257)
    evaluated = [line for line in records(trained) if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4]
    for line in evaluated:
        assert line["eval_bits_per_dim"] == line["eval_loss"] / math.log(2)
    # The mean over images, though the last batch of the five is smaller.
    model, pixels = load_image_run(trained).model, chosen(load_images(str(data))["test"], 5).flat
    plain, exact = (torch.tensor(evaluate_images(m, pixels).bits_per_dim) for m in (model, deepcopy(model).double()))
    assert_in_budget(torch.tensor(evaluated[-1]["eval_bits_per_dim"]), plain, exact, torch.float32)
    report, evaluation = (read_json(trained / f"{name}.json") for name in ("report", "evaluation"))
    assert report["bits_per_dim"] == evaluation["bits_per_dim"] < 8
    assert (report["test_images"], report["train_images"], evaluation["dimensions"]) == (6, 16, 16)
    assert report["generated_images_per_second"] > 0


def test_eval_measures_what_the_run_reported(trained, tmp_path, capsys):
    file, reported = tmp_path / "e.json", read_json(trained / "evaluation.json")
    assert main(["eval", str(trained), "--windows", "6", "--batch_size", "4", "--json", str(file)]) == 0
    assert {**read_json(file), "seconds": 0} == {**reported, "seconds": 0}
    assert f"{reported['bits_per_dim']:.4f} ± {reported['error']:.4f}" in capsys.readouterr().out
    assert main(["eval", str(trained / "checkpoints" / "checkpoint-2"), "--windows", "2"]) == 0


def test_generate_writes_a_picture(trained, tmp_path, capsys):
    first, second, third = (tmp_path / f"{name}.png" for name in "abc")
    for file, seed in ((first, "1"), (second, "1"), (third, "2")):
        assert main(["generate", str(trained), "--images", "2", "--seed", seed, "--out", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(first), str(second), str(third)]
    assert "drawn: 2 images in " in said.err
    assert " images/s), 2 at once, seed 1; state: " in said.err
    assert first.read_bytes() == second.read_bytes() != third.read_bytes()
    assert shown(first).shape == (2 + 58, 2 + 2 * 58, 3)
    assert main(["generate", str(trained), "--images", "2", "--seed", "1"]) == 0
    assert (trained / "images.png").read_bytes() == first.read_bytes()


def complete(trained, tmp_path, *arguments):
    """Return the picture and the measures of `subquad complete`."""
    out, file = tmp_path / "c.png", tmp_path / "c.json"
    assert main(["complete", str(trained), "--out", str(out), "--json", str(file), *arguments]) == 0
    return shown(out), read_json(file)


def test_complete_draws_the_occluded_part(trained, tmp_path, capsys):
    arguments = ["--occlude", "bottom:0.5", "--images", "6", "--samples", "3", "--show", "2"]
    picture, found = complete(trained, tmp_path, *arguments)
    assert picture.shape == (14 + 2 + 2 * 58, 2 + 5 * 58, 3)
    assert (found["images"], found["samples"], found["pixels"], found["occluded_pixels"]) == (6, 3, 16, 8)
    assert found["blind_pixels"] == 0
    assert set(found["accuracy"]) == {"originals", "completions", "occluded"}
    evaluation = read_json(trained / "evaluation.json")
    assert found["bits_per_dim"] == evaluation["bits_per_dim"] != found["occluded_bits_per_dim"]
    original, occluded, drawn = (picture[16 : 16 + 56, 2 + k * 58 : 58 + k * 58] for k in range(3))
    assert (drawn[:28] == original[:28]).all()
    assert (occluded[:28] == original[:28]).all()
    assert (occluded[28:] == (70, 90, 170)).all()
    out = capsys.readouterr().out
    assert f"  {found['occluded_bits_per_dim']:.4f} of the occluded pixels" in out
    for part in ("of the originals", "of the completions", "completions/s"):
        assert part in out
    assert "have no part" not in out


@pytest.mark.parametrize(("occlude", "occluded", "blind"), [
    ("top:0.5", 8, 8), ("right:0.5", 8, 6), ("bottom:1", 16, 0),
])  # fmt: skip
def test_pixels_drawn_without_what_comes_later_are_counted(trained, tmp_path, capsys, occlude, occluded, blind):
    _, found = complete(trained, tmp_path, "--occlude", occlude, "--images", "1")
    assert (found["occluded_pixels"], found["blind_pixels"]) == (occluded, blind)
    assert (f"{blind} of them drawn without seeing given pixels" in capsys.readouterr().out) == (blind > 0)


def test_other_images_and_mask_files(trained, tmp_path, capsys):
    mask = np.zeros((4, 4), np.uint8)
    mask[2:] = 255
    write_png(tmp_path / "mask.png", mask)
    write_png(tmp_path / "mine" / "a.png", np.full((4, 4), 99, np.uint8))
    for path in ("mine", "mine/a.png"):
        _, found = complete(trained, tmp_path, "--occlude", str(tmp_path / "mask.png"), "--path", str(tmp_path / path))
        assert (found["images"], found["accuracy"], found["occluded_pixels"]) == (1, None, 8)
    assert "read rightly" not in capsys.readouterr().out
    assert main(["eval", str(trained), "--data", str(tmp_path / "mine")]) == 0


def test_pictures_that_were_trained_on_are_not_measured(trained, tmp_path, monkeypatch):
    for number in range(20):
        write_png(tmp_path / "mine" / f"{number}.png", np.full((4, 4), number, np.uint8))
    shutil.copytree(tmp_path / "mine", tmp_path / "other")
    run = shutil.copytree(trained, tmp_path / "run")
    config = TrainConfig.from_file(run / "config.yaml")
    config.replace(image=config.image.replace(path=str(tmp_path / "mine"))).to_file(run / "config.yaml")
    monkeypatch.chdir(tmp_path)
    # The run's own folder, also by another name: the pictures 9 and 19 are held out.
    for more, count in (([], 2), (["--path", "mine"], 2), (["--path", "other"], 20)):
        assert complete(run, tmp_path, *more)[1]["images"] == count
    assert main(["eval", "run", "--json", "e.json"]) == 0
    assert read_json(tmp_path / "e.json")["images"] == 2


def test_a_model_of_levels_learns_completes_and_draws_no_samples_unless_asked(make_config, data, tmp_path):
    run = train_by_command(make_config(images(data), {"image.samples": 0}, eval_every=0))
    losses = [line["loss"] for line in records(run)]
    assert losses[-1] < 0.95 * losses[0]
    assert not (run / "samples.png").exists()
    found = complete(run, tmp_path, "--images", "2", "--path", str(data))[1]
    assert (found["attention"], found["state_bytes"] > 0) == ("linear", True)


def test_chosen_images_are_evenly_spread(data):
    images = load_images(str(data))["test"]
    for part in ("pixels", "labels"):
        assert (getattr(chosen(images, 3), part) == getattr(images, part)[[0, 2, 5]]).all()
    assert len(chosen(images, None).pixels) == len(chosen(images, 99).pixels) == 8


def test_positions_follow_the_image(make_config, data):
    learned = {**images(data), "model.position": "learned", "batch.length": 16}
    with pytest.raises(ValueError, match=r"batch\.length=16 is longer than the 3 positions"):
        make_config(learned, {"model.max_positions": 3})
    task, beside = (
        prepare_task(make_config(learned, {"model.max_positions": 512, "image.position_channels": channels}), None)
        for channels in (0, 6)
    )
    assert task.make_model().model.embedding.position.table.num_embeddings == 16
    assert beside.make_model().model.embedding.tokens.embedding_dim == 10
    assert beside.identity["image"] != task.identity["image"]


def test_a_changed_run_is_not_resumed(trained, make_config, data, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    other = write_idx(tmp_path / "other", classes=3)
    changed = [(data, LOGISTIC | {"image.near": 0}, "image"), (data, {}, "image"), (other, LOGISTIC, "data")]
    for path, changes, group in changed:
        with pytest.raises(CheckpointError, match=f"was made with other settings: {group}"):
            train(make_config(images(path), changes, steps=5))


@pytest.mark.parametrize(("command", "message"), [
    ("generate --images 0", "--images must be at least 1, got 0"),
    ("generate --images 2 --prompt x", "--prompt is for texts and has no effect with --images; leave it out"),
    ("generate --images 2 --top_k 3", "--top-k is for texts"),
    ("generate --images 2 --temperature -1", "temperature must be at least 0"),
    ("generate --images 2 --out a.jpg", "--out must name a .png file, got 'a.jpg'"),
    ("generate --images 2 --out nowhere/a.png", "there is no folder"),
    ("generate --images 2 --seed 18446744073709551616", "seed must be at least -2**63 and below 2**64"),
    ("generate --images 2 --adapter nowhere", "there is no adapter in nowhere"),
    ("generate --prompt x", "holds an image model, which predicts no text"),
    ("generate --prompt x --out a.png", "--out is for --images; leave it out"),
    ("complete --occlude bottum:0.5", "unknown occlusion 'bottum:0.5'; did you mean 'bottom'"),
    ("complete --images 0", "--images must be at least 1, got 0"),
    ("complete --seed -1", "--seed must be at least 0, got -1"),
    ("complete --json nowhere/x.json", "for --json"),
    ("complete --path nowhere", "there is no file or folder 'nowhere'"),
    ("eval --length 7", "holds an image model: length=7 is for texts; leave it out"),
    ("eval --data.skip_bad_files true", "holds an image model: data.skip_bad_files=True is for texts"),
    ("eval --quantize int8", "holds an image model: quantize='int8' is for texts; leave it out"),
    ("eval --json nowhere/x.json", "for --json"),
])  # fmt: skip
def test_commands_refuse_what_they_cannot_do(trained, capsys, command, message):
    name, *rest = command.split()
    assert message in failed(capsys, name, trained, *rest)


def test_commands_need_a_run_of_images_and_images_of_its_size(trained, finished, tmp_path, capsys):
    for command, *rest in (("generate", "--images", "1"), ("complete",)):
        assert "there is no folder nowhere; give the folder of a run" in failed(capsys, command, "nowhere", *rest)
        message = failed(capsys, command, finished.folder, *rest)
        assert "has no image model; `subquad train --task image` makes" in message
    write_png(tmp_path / "a.png", np.zeros((5, 4), np.uint8))
    message = failed(capsys, "complete", trained, "--path", tmp_path / "a.png")
    assert "has images of 5 x 4 x 1, but the model in" in message
    assert "needs 4 x 4 x 1 (rows x columns x channels)" in message
    assert "is a mask of 5 x 4" in failed(capsys, "complete", trained, "--occlude", tmp_path / "a.png")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained / name, tmp_path / name)
    assert "has no config.yaml that names its images" in failed(capsys, "complete", tmp_path)
    assert main(["generate", str(tmp_path), "--images", "1"]) == 0


@pytest.mark.parametrize(("refuse", "change", "message"), [
    (check, {"image.path": None}, "task=image needs image.path"),
    (check, {"model.loops": 2}, "loops=2 has no meaning for an image model"),
    (check, {"model.position": "rope"}, "position='rope' needs a layer that rotates"),
    (check, {"model.attention": "linformer"}, "has no causal form, which --task image needs"),
    (train, {"batch.length": 48}, "batch.length must be 16 for images of 4 x 4 x 1 .* got 48; leave it out"),
    (train, {"image.near": 9}, "near must be at least 0 and below the image's sides, 4 x 4, got 9"),
    (train, {"image.path": "nowhere"}, "there is no file or folder"),
])  # fmt: skip
def test_models_and_data_that_do_not_fit_are_refused(make_config, data, refuse, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        refuse(make_config(images(data), change))
