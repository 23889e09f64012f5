"""Runs that train an adapter: what is kept, what stays frozen, what is refused, what is resumed."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subquad.cli import main
from subquad.hf import SubquadEncoderForSequenceClassification, SubquadForImages, lora
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.hf.image import SubquadImageConfig
from subquad.testing import assert_exact
from subquad.training import train
from subquad.training.errors import CheckpointError
from subquad.training.lora import with_base
from subquad.training.optimizers import split_parameters
from subquad.training.runs import load_classifier, load_run
from tests.data.pictures import write_idx
from tests.training.helpers import assert_same_weights, forget

MODEL = {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full"}
FRESH = {"model": {}, "data.tokenizer": "bpe"}
"""The defaults, in whose place the base's model and tokenizer come."""
TOY = {"task": "classify", "classify": {"examples": 30, "held_out": 10}, "run.steps": 2, "run.eval_windows": 4}


@pytest.fixture(scope="module")
def home(tmp_path_factory, config_in):
    """A folder with a language model and a classifier."""
    home = tmp_path_factory.mktemp("lora")
    train(config_in(home, {"model": MODEL}, folder="base"))
    train(config_in(home, TOY, {"model": {**MODEL, "vocab_size": 3}}, folder="labels"))
    return home


def adapter(base, **options):
    return {**FRESH, "lora": {"rank": 2, "base": str(base), **options}}


def labels(base, **options):
    return {**TOY, "model": {}, "lora": {"rank": 2, "base": str(base), **options}}


def test_a_run_keeps_only_the_adapter_and_leaves_the_base_unchanged(home, make_config, caplog):
    base = home / "base"
    before = {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()}
    with caplog.at_level(logging.INFO, logger="subquad"):
        result = train(make_config(adapter(base, dropout=0.1)))
    assert {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()} == before
    inner = result.model.state_dict()
    for name, weight in load_file(base / "model.safetensors").items():
        head, _, last = name.rpartition(".")
        assert_exact(inner.get(name, inner.get(f"{head}.base_layer.{last}")), weight, name)
    files = {path.name for path in result.folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base.json", "config.yaml", "tokenizer.json"} <= files
    assert not {"model.safetensors", "config.json"} & files
    newest = {path.name for path in (result.folder / "checkpoints" / "checkpoint-4").iterdir()}
    assert "adapter_model.safetensors" in newest
    assert "model.safetensors" not in newest
    factors = load_file(result.folder / "adapter_model.safetensors").values()
    assert all(tensor.abs().max() > 0 for tensor in factors)
    trained, every = lora.counts(result.model)
    assert trained == sum(tensor.numel() for tensor in factors)
    assert f"{trained} of {every} parameters train" in caplog.text
    assert sum(p.numel() for group in split_parameters(result.model) for p in group) == trained
    loaded, plain = load_run(result.folder), load_run(base)
    assert result.config.model == plain.config.model
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert_exact(loaded.decoder(tokens)[0], result.model.eval().decoder(tokens)[0])
        assert not torch.equal(loaded.decoder(tokens)[0], plain.decoder(tokens)[0])


def test_a_resumed_run_ends_with_the_same_bits(home, make_config, tmp_path):
    changes = adapter(home / "base", dropout=0.2)
    whole = train(make_config(changes, folder="whole")).folder
    forget(shutil.copytree(whole, tmp_path / "run"), 4)
    train(make_config(changes, resume="must"))
    assert_same_weights(whole, tmp_path / "run", "adapter_model.safetensors")
    assert (tmp_path / "run" / "adapter_config.json").read_text() == (whole / "adapter_config.json").read_text()
    with pytest.raises(CheckpointError, match=r"settings: lora\.alpha was null, is 9; restore"):
        train(make_config(changes, {"lora": {**changes["lora"], "alpha": 9}}))


def test_other_classes_train_a_new_head_too(home, make_config, tmp_path, caplog):
    same = train(make_config(labels(home / "labels", train_head=True), folder="with head"))
    assert [name for name in load_file(same.folder / "adapter_model.safetensors") if "head" in name]
    assert same.model.config.id2label == load_classifier(home / "labels").model.config.id2label

    lora.load_base(home / "labels", ["left", "middle", "right"]).save_pretrained(tmp_path / "three")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="subquad"):
        result = train(make_config(labels(tmp_path / "three")))
    assert "the classes differ from the base's (left, middle, right): a new head for 2 classes" in caplog.text
    again = load_classifier(result.folder)
    assert again.model.config.id2label == same.model.config.id2label
    tokens = torch.randint(0, 3, (2, 12))
    with torch.no_grad():
        assert_exact(again.model(tokens).logits, result.model.eval()(tokens).logits)


def test_what_contradicts_the_base_is_refused_by_name(home, make_config):
    base, classifier, nothing = home / "base", home / "labels", home / "nothing"
    letters = {"data.tokenizer": "characters", "run.prompt": "def"}
    for changes, message in (
        (adapter(base) | {"model": {"dim": 24}}, "model.dim=24 contradicts the base .*base, which has 16"),
        (adapter(base) | letters, "has a vocabulary of 256, but the data one of 31"),
        (adapter(nothing), "there is no folder .*nothing"),
        (adapter(classifier), "of type 'subquad-classifier', but the task is language; give --task classify"),
        (labels(base), "give --task language or --task probe"),
        (adapter(base, train_head=True), "train_head is for classifiers, but the task is language"),
        (labels(classifier) | {"classify": {"pooling": "last"}}, "classify.pooling='last' contradicts the base"),
        (adapter(base) | {"run.folder": str(base)}, "is the base's folder; choose another for the adapter"),
        (adapter(base, targets=["qury"]), "no linear layer is called 'qury'"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train(make_config(changes))


def test_a_base_of_another_tokenizer_is_refused_and_the_pooling_of_a_classifier_is_taken(home, make_config, tmp_path):
    file = Path(shutil.copytree(home / "base", tmp_path / "other tokens")) / "tokenizer.json"
    assert '"ignore_merges": false' in file.read_text()
    file.write_text(file.read_text().replace('"ignore_merges": false', '"ignore_merges": true'))
    config = make_config(adapter(file.parent), {"data.tokenizer": "bytes"})
    with pytest.raises(ValueError, match=r"differs from data.tokenizer='bytes'; leave it out"):
        train(config)
    pooled = SubquadClassifierConfig(**MODEL, vocab_size=3, pooling="class")
    SubquadEncoderForSequenceClassification(pooled).save_pretrained(tmp_path / "class token")
    assert with_base(make_config(labels(tmp_path / "class token"))).classify.pooling == "class"


def test_a_checkpoint_is_a_base_with_its_tokenizer_or_that_of_its_run(home, make_config):
    base = home / "base" / "checkpoints" / "checkpoint-2"
    own = base / "tokenizer.json"
    assert with_base(make_config(adapter(base))).data.tokenizer == str(own)
    kept = own.read_bytes()
    own.unlink()  # as earlier releases saved it
    assert with_base(make_config(adapter(base))).data.tokenizer == str((home / "base" / "tokenizer.json").resolve())
    own.write_bytes(kept)


def test_a_model_of_images_is_adapted_to_images_of_its_size(make_config, tmp_path):
    shape = {**MODEL, "attention": "linear", "position": "none", "axes": True}
    SubquadForImages(SubquadImageConfig(**shape, height=4, width=4, channels=1)).save_pretrained(tmp_path / "base")
    lora_of = {"model": {}, "batch": {"size": 4}, "lora": {"rank": 2, "base": str(tmp_path / "base")}}
    changes = {
        "task": "image",
        "image": {"path": str(write_idx(tmp_path / "four"))},
        "run.steps": 2,
        "optimizer.lr": 0.5,
        **lora_of,
    }
    result = train(make_config(changes))
    assert result.config.image.axes
    assert type(result.model) is SubquadForImages
    assert lora.is_adapter(result.folder)
    out, drawn = tmp_path / "a.png", []
    for words in ([tmp_path / "base"], [tmp_path / "base", "--adapter", result.folder], [result.folder]):
        assert main(["generate", *map(str, words), "--images", "2", "--seed", "1", "--out", str(out)]) == 0
        drawn.append(out.read_bytes())
    assert drawn[1] == drawn[2] != drawn[0]
    with pytest.raises(ValueError, match="has height=4, but this task needs 5"):
        train(make_config(changes, {"image": {"path": str(write_idx(tmp_path / "five", size=5))}}))
