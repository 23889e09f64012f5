"""Runs that train an adapter: what is kept, what stays as it is, what is refused, going on."""

import logging
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file

from subquad.cli import main
from subquad.hf import SubquadForImages, SubquadForSequenceClassification, lora
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.hf.image import SubquadImageConfig
from subquad.testing import assert_exact
from subquad.training import TrainConfig, train
from subquad.training.config import LoraConfig
from subquad.training.errors import CheckpointError
from subquad.training.loop import Loop
from subquad.training.lora import with_base
from subquad.training.optimizers import split_parameters
from subquad.training.runs import load_classifier, load_run

TEXT = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n\n" for i in range(24))
RUN = {
    "steps": 6, "log_every": 2, "eval_every": 3, "eval_windows": 4, "save_every": 3, "device": "cpu", "threads": 1,
    "precision": "float32",
}  # fmt: skip
MODEL = {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "llp", "options": {"llp": {"segment": 16}}}
SETTINGS = {"batch": {"length": 32, "size": 4}, "optimizer": {"lr": 3e-3}, "schedule": {"warmup": 2}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a text, a language model and a classifier."""
    home = tmp_path_factory.mktemp("lora")
    (home / "text.py").write_text(TEXT)
    train(language(home, "base", model=MODEL, data={"tokenizer": "bytes"}))
    train(classify(home, "labels", model=MODEL | {"vocab_size": 3}))
    return home


def language(home, name, *, data=(), **groups):
    data = {"path": str(home / "text.py"), "held_out": 0.2, "cache": str(home / "cache"), **dict(data)}
    run = {**RUN, "folder": str(home / name), **groups.pop("run", {})}
    return TrainConfig.from_dict({**SETTINGS, "data": data, "run": run, **groups})


def classify(home, name, **groups):
    run = {**RUN, "folder": str(home / name), **groups.pop("run", {})}
    toy = {"examples": 30, "held_out": 10, **groups.pop("classify", {})}
    return TrainConfig.from_dict({**SETTINGS, "task": "classify", "classify": toy, "run": run, **groups})


def adapter(home, **options):
    return {"rank": 2, "base": str(home / "base"), **options}


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_a_run_keeps_the_adapter_alone_and_the_base_as_it_is(home, caplog):
    before = {path.name: path.read_bytes() for path in (home / "base").iterdir() if path.is_file()}
    with caplog.at_level(logging.INFO, logger="subquad"):
        result = train(language(home, "run", lora=adapter(home, dropout=0.1)))
    assert {path.name: path.read_bytes() for path in (home / "base").iterdir() if path.is_file()} == before
    inner = result.model.state_dict()
    for name, weight in load_file(home / "base" / "model.safetensors").items():
        head, _, last = name.rpartition(".")
        assert_exact(inner.get(name, inner.get(f"{head}.base_layer.{last}")), weight, name)
    files = {path.name for path in (home / "run").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base.json", "config.yaml", "tokenizer.json"} <= files
    assert not {"model.safetensors", "config.json"} & files
    newest = home / "run" / "checkpoints" / "checkpoint-6"
    assert (newest / "adapter_model.safetensors").is_file()
    assert not (newest / "model.safetensors").exists()
    assert all(tensor.abs().max() > 0 for tensor in weights(home / "run").values())
    trained, every = lora.counts(result.model)
    assert trained == sum(tensor.numel() for tensor in weights(home / "run").values())
    assert f"{trained} of {every} parameters train" in caplog.text
    groups = split_parameters(result.model)
    assert sum(p.numel() for group in groups for p in group) == trained
    assert result.config.model == load_run(home / "base").config.model
    loaded = load_run(home / "run")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert_exact(loaded.decoder(tokens)[0], result.model.eval().model(tokens)[0])
        assert not torch.equal(loaded.decoder(tokens)[0], load_run(home / "base").decoder(tokens)[0])


def test_a_run_that_goes_on_ends_with_the_same_bits(home, monkeypatch):
    options = {"lora": adapter(home, dropout=0.2)}
    train(language(home, "left alone", **options))
    compute, calls = Loop.training_pass, []

    def stop_in_step_5(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("stopped")
        compute(self, *args, **kwargs)

    monkeypatch.setattr(Loop, "training_pass", stop_in_step_5)
    with pytest.raises(RuntimeError, match="stopped"):
        train(language(home, "stopped", **options))
    monkeypatch.setattr(Loop, "training_pass", compute)
    assert train(language(home, "stopped", **options)).steps == 6
    one, other = weights(home / "left alone"), weights(home / "stopped")
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert_exact(other[name], tensor, name)
    configs = [(home / name / "adapter_config.json").read_text() for name in ("left alone", "stopped")]
    assert configs[0] == configs[1]
    changed = adapter(home, dropout=0.2, alpha=9)
    with pytest.raises(CheckpointError, match=r"settings: lora\.alpha was None, is 9; restore"):
        train(language(home, "stopped", lora=changed))


def test_other_classes_train_a_new_head_too(home, caplog):
    base = {"rank": 2, "base": str(home / "labels")}
    same = train(classify(home, "with head", lora={**base, "train_head": True}, run={"steps": 3}))
    assert [name for name in weights(home / "with head") if "head" in name]
    assert same.model.config.id2label == load_classifier(home / "labels").model.config.id2label

    other = lora.load_base(home / "labels", ["left", "middle", "right"])
    other.save_pretrained(home / "three")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="subquad"):
        result = train(classify(home, "other classes", lora={**base, "base": str(home / "three")}, run={"steps": 3}))
    assert "the classes are not the base's (left, middle, right): a new head for 2 classes trains too" in caplog.text
    again = load_classifier(home / "other classes")
    assert again.model.config.id2label == same.model.config.id2label
    tokens = torch.randint(0, 3, (2, 12))
    with torch.no_grad():
        assert_exact(again.model(tokens).logits, result.model.eval()(tokens).logits)


def test_what_contradicts_the_base_is_refused_by_name(home, tmp_path):
    def refused(message, config, error=ValueError):
        with pytest.raises(error, match=message):
            train(config)

    options = {"lora": adapter(home)}
    refused(
        r"model.dim=24 contradicts the base .*base, which has 16", language(home, "x", model={"dim": 24}, **options)
    )
    refused(
        r"has a vocabulary of 256, and the data one of 31",
        language(home, "x", data={"tokenizer": "characters"}, run={"prompt": "def"}, **options),
    )
    refused("there is no folder .*nothing", language(home, "x", lora=adapter(tmp_path, base=str(tmp_path / "nothing"))),
            FileNotFoundError)  # fmt: skip
    refused("holds a model of type 'subquad-classifier', and the task is language; give --task classify",
            language(home, "x", lora=adapter(home, base=str(home / "labels"))))  # fmt: skip
    refused("give --task language or --task probe", classify(home, "x", **options))
    refused(
        "train_head is for classifiers, and the task is language",
        language(home, "x", lora=adapter(home, train_head=True)),
    )
    labels = {"rank": 2, "base": str(home / "labels")}
    refused(
        r"classify.pooling='last' contradicts the base", classify(home, "x", lora=labels, classify={"pooling": "last"})
    )
    with pytest.raises(ValueError, match=r"lora.rank adapts a trained model, which needs no first phase"):
        classify(home, "x", lora=labels, pretrain={"kind": "denoise"})
    refused("is the base's own folder; an adapter needs one of its own", language(home, "base", **options))
    refused("no linear layer is called 'qury'", language(home, "x", lora=adapter(home, targets=["qury"])))


def test_a_base_of_another_vocabulary_or_shape_is_refused(home):
    shutil.copytree(home / "base", home / "other tokens")
    file = home / "other tokens" / "tokenizer.json"
    file.write_text(file.read_text().replace('"ignore_merges":false', '"ignore_merges":true').replace(
        '"ignore_merges": false', '"ignore_merges": true'))  # fmt: skip
    config = language(home, "x", data={"tokenizer": "bytes"}, lora=adapter(home, base=str(home / "other tokens")))
    with pytest.raises(ValueError, match=r"has another tokenizer than data.tokenizer='bytes'; leave it out"):
        train(config)
    pooled = SubquadClassifierConfig(**MODEL, vocab_size=3, pooling="class")
    SubquadForSequenceClassification(pooled).save_pretrained(home / "class token")
    config = classify(home, "x", lora={"rank": 2, "base": str(home / "class token")})
    assert with_base(config).classify.pooling == "class"


def test_a_checkpoint_is_a_base_with_the_tokenizer_of_its_run(home):
    base = home / "base" / "checkpoints" / "checkpoint-3"
    config = with_base(language(home, "x", lora=adapter(home, base=str(base))))
    assert config.data.tokenizer == str((home / "base" / "tokenizer.json").resolve())


def write_images(folder, side):
    folder.mkdir()
    for part in ("train", "t10k"):
        pixels = bytes(range(256))[: side * side] * 8
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, 8, side, side) + pixels)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 8) + bytes(8))
    return str(folder)


def test_a_model_of_images_is_adapted_to_images_of_its_size(tmp_path):
    torch.manual_seed(0)
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "linear", "position": "none", "axes": True}
    model = SubquadForImages(SubquadImageConfig(**shape, height=4, width=4, channels=1))
    model.save_pretrained(tmp_path / "base")
    values = {
        "task": "image", "image": {"path": write_images(tmp_path / "four", 4)}, "batch": {"size": 4},
        "schedule": {"warmup": 1}, "lora": {"rank": 2, "base": str(tmp_path / "base")},
        "run": {**RUN, "steps": 2, "folder": str(tmp_path / "run")},
    }  # fmt: skip
    result = train(TrainConfig.from_dict(values))
    assert result.config.image.axes
    assert type(result.model) is SubquadForImages
    assert lora.is_adapter(tmp_path / "run")
    values["image"]["path"] = write_images(tmp_path / "five", 5)
    with pytest.raises(ValueError, match="has height=4, this task makes 5"):
        train(TrainConfig.from_dict(values))


def test_settings_without_a_rank_and_impossible_ones_are_refused():
    for values, message in (
        ({"alpha": 3}, "lora.alpha=3 has no effect with lora.rank=0"),
        ({"base": "runs/x"}, "lora.base='runs/x' has no effect with lora.rank=0"),
        ({"targets": ["query"]}, r"lora.targets=\['query'\] has no effect"),
        ({"rank": -1}, "lora.rank must be at least 0, got -1"),
        ({"rank": 2}, "lora.rank=2 needs lora.base"),
        ({"rank": 2, "base": "x", "alpha": 0}, "lora.alpha must be at least 1, got 0"),
        ({"rank": 2, "base": "x", "dropout": 1.0}, r"lora.dropout must be at least 0 and below 1, got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            LoraConfig.from_dict(values)


def test_the_command_line_says_what_is_wrong_before_it_reads_the_text(home, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--lora.rank", "2", "--lora.base", str(home / "nothing"), "--data.path", str(home / "text.py")])
    assert stopped.value.code == 2
    assert "there is no folder" in capsys.readouterr().err
