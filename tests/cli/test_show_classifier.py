"""`subquad show weights` of a classifier: the weights of its layers for a held-out sequence of its task."""

import pytest
import torch

from subquad import attention
from subquad.cli import main
from subquad.cli.show import PICTURES, _reading_example
from subquad.data.labelled import toy
from subquad.hf import SubquadForSequenceClassification
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.models import EncoderConfig, matrices
from subquad.testing import assert_exact, assert_same_maths
from subquad.training import TrainConfig


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["show", *arguments])
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def labelling(folder, *, task=True, **settings):
    """The folder of a classifier with random weights, of the toy task."""
    torch.manual_seed(5)
    shape = {"dim": 16, "num_heads": 2, "num_layers": 2, "position": "none", "init_std": 0.3}
    pooling = settings.pop("pooling", "mean")
    classify = {"pooling": pooling, "held_out": 5}
    values = {"task": "classify", "model": shape | settings, "batch": {"length": 32}, "classify": classify}
    config = TrainConfig.from_dict(values)
    encoder = EncoderConfig.from_decoder(config.model.replace(vocab_size=3), num_classes=2, pooling=pooling)
    hf = SubquadClassifierConfig.from_encoder(encoder, classes=("no", "yes"))
    SubquadForSequenceClassification(hf).save_pretrained(folder)
    if task:
        config.to_file(folder / "config.yaml")
    return folder


BIDIRECTIONAL = [name for name in attention.names() if "bidirectional" in attention.mechanism(name).forms]


@pytest.mark.parametrize("pooling", ["mean", "class"])
@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_weights_of_a_classifier_are_those_that_its_layers_mix_by(tmp_path, name, pooling):
    from subquad.training.runs import load_classifier

    model = load_classifier(labelling(tmp_path, attention=name, pooling=pooling), "cpu").model.double()
    mixed = []
    for block in matrices.blocks(model):
        block.attention_norm.register_forward_hook(lambda _, __, z_BTD: mixed.append([z_BTD]))
        # The first thing after the mixing: its output and the residual path.
        block.feedforward_norm.register_forward_pre_hook(lambda _, given: mixed[-1].append(given[0]))
        block.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    layers = matrices.trained_weights(model, [0, 2, 1, 1, 2, 0, 1])
    assert len(layers) == 2
    for (layer, w_HTS), before_BTD, (z_BTD, after_BTD) in zip(layers, mixed[::2], mixed[1::2], strict=True):
        assert w_HTS.shape[1:] == (7 + (pooling == "class"),) * 2
        with torch.no_grad():
            assert_exact(w_HTS, layer.weights(z_BTD)[0])
            assert_same_maths(layer.definition(z_BTD), after_BTD - before_BTD)


def test_a_classifiers_picture_is_of_the_example_that_is_asked_for(tmp_path):
    folder = labelling(tmp_path, attention="linformer", options={"linformer": {"max_tokens": 33}}, pooling="class")
    whole = ["weights", str(folder), "--layer", "1", "--head", "0", "--tokens", "32"]
    pictures = []
    for number, example in enumerate(([], ["--example", "0"], ["--example", "4"])):
        file = tmp_path / f"{number}.svg"
        assert main(["show", *whole, *example, "--out", str(file)]) == 0
        pictures.append(file.read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]
    chosen = PICTURES["weights"][0]().parse_args(["runs", "--example", "4", "--tokens", "9"])
    chosen.run = str(folder)
    _, tokens, names = _reading_example(chosen)
    corpus = toy(32, examples=1, held_out=5)
    assert tokens == corpus.held_out[4]["input_ids"][:9].tolist()
    assert names == ["class", *map(str, tokens)]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--example", "5"], "example 5 is not there: examples are 0 to 4"),
    (["--text", "abc"], "--text is for a language model; a classifier reads a sequence of its task, by --example"),
    (["--layer", "2"], "layer 2 is not there: layers are 0 to 1"),
])  # fmt: skip
def test_mistakes_about_a_classifier_are_named(capsys, tmp_path, arguments, message):
    assert message in refused(capsys, "weights", str(labelling(tmp_path, attention="full")), *arguments)


def test_a_classifier_that_no_weights_can_be_drawn_of_says_why(capsys, tmp_path):
    bare, stack = tmp_path / "bare", tmp_path / "stack"
    message = refused(capsys, "weights", str(labelling(bare, task=False, attention="full")))
    assert f"{bare} has no config.yaml that names the sequences of its task" in message
    message = refused(capsys, "weights", str(labelling(stack, attention="perceiver")))
    assert "only the layers of mechanisms can be drawn, and this model is a stack of its own: perceiver" in message
