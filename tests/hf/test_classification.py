"""The classifier as a transformers model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from subquad.attention import mechanism, names
from subquad.hf import SubquadForSequenceClassification
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.models import EncoderConfig
from subquad.testing import assert_exact, assert_same_maths

VOCABULARY = 23
CLASSES = ("red", "green", "blue")
STACKS = ("perceiver", "perceiver_io")
EVERYTHING = [*(name for name in names() if "bidirectional" in mechanism(name).forms), *STACKS]


def encoder_config(name="llp", **fields):
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "options": {"llp": {"segment": 6}, "window": {"width": 4}},
        "position": "rope" if name not in STACKS and mechanism(name).rotates else "learned",
        "max_positions": 64,
        "init_std": 0.3,
        "num_classes": 3,
    }
    return EncoderConfig(attention=name, **(shape | fields))


def tiny(name="llp", **fields):
    torch.manual_seed(0)
    config = SubquadClassifierConfig.from_encoder(encoder_config(name, **fields), classes=CLASSES)
    return SubquadForSequenceClassification(config).eval()


def some_tokens(batch=4, tokens=11):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def some_mask():
    mask = torch.ones(4, 11, dtype=torch.int64)
    mask[0, :4] = 0
    mask[1, 7:] = 0
    return mask


LABELS = torch.tensor([0, 2, 1, 2])


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_saved_model_comes_back_bit_for_bit(name, tmp_path):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadForSequenceClassification)
    assert not loaded.training
    weights = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    for key, weight in [*model.named_parameters(), *model.named_buffers()]:
        assert_exact(weights[key], weight, key)
    assert_same_maths(loaded.double()(some_tokens()).logits, model.double()(some_tokens()).logits)


@pytest.mark.parametrize("pooling", ["mean", "last", "class"])
def test_the_configuration_comes_back(pooling, tmp_path):
    model = tiny(pooling=pooling)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, SubquadClassifierConfig)
    assert config.encoder_config() == model.config.encoder_config() == encoder_config(pooling=pooling)
    assert config.id2label == {0: "red", 1: "green", 2: "blue"}
    assert config.label2id == {"red": 0, "green": 1, "blue": 2}
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["model_type"], saved["pooling"]) == ("subquad-classifier", pooling)


def test_classes_may_go_without_names():
    config = SubquadClassifierConfig.from_encoder(encoder_config())
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model, tokens, mask = tiny().double(), some_tokens(), some_mask()
    output = model(tokens, mask, LABELS)
    assert output.logits.shape == (4, 3)
    assert_exact(output.logits, model(tokens, mask).logits)
    assert_exact(output.logits, model.model(tokens, mask.bool()))
    assert_same_maths(output.loss.double(), F.cross_entropy(output.logits.float(), LABELS).double())
    some = torch.tensor([0, -100, 1, -100])
    kept = F.cross_entropy(output.logits[::2].float(), LABELS[::2])
    assert_same_maths(model(tokens, mask, some).loss.double(), kept.double())
    assert model(tokens).loss is None


def test_padding_does_not_exist():
    model, tokens, mask = tiny().double(), some_tokens(), some_mask()
    assert_same_maths(model(tokens, mask).logits[0], model(tokens[:1, 4:]).logits[0])
    assert_same_maths(model(tokens, mask).logits[1], model(tokens[1:2, :7]).logits[0])


def test_outputs_come_as_a_tuple_when_asked_for():
    model, tokens = tiny(), some_tokens()
    loss, logits = model(tokens, labels=LABELS, return_dict=False)
    assert_exact(logits, model(tokens).logits)
    assert_exact(loss, model(tokens, labels=LABELS).loss)


def test_first_weights_are_the_classifiers():
    model = tiny(dim=64, num_layers=8, init_std=0.02)
    out, query = (getattr(model.model.encoder.layers[0].attention, name).weight for name in ("out", "query"))
    assert 0.8 * 0.02 < query.std().item() < 1.2 * 0.02
    assert 0.8 * 0.005 < out.std().item() < 1.2 * 0.005
    assert 0.5 * 0.02 < model.model.head.weight.std().item() < 1.5 * 0.02


def test_checkpointing_is_switched_on_by_transformers():
    model, tokens = tiny(dropout=0.1).train(), some_tokens()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        assert model.model.encoder.gradient_checkpointing == checkpointing
        model.zero_grad()
        torch.manual_seed(3)
        model(tokens, labels=LABELS).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert_exact(checkpointed, plain)


def test_the_vocabulary_can_grow():
    model, tokens = tiny(), some_tokens()
    before = model(tokens).logits
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    assert model.model.config.vocab_size == model.model.encoder.config.vocab_size == VOCABULARY + 5
    assert_exact(model(tokens).logits, before)


# --- mistakes


@pytest.mark.parametrize(("change", "message"), [
    (lambda w: w.pop("model.head.weight"), "missing keys: model.head.weight"),
    (lambda w: w.update(more=torch.ones(2)), "unexpected keys: more"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused(tmp_path, change, message):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        SubquadForSequenceClassification.from_pretrained(tmp_path)


def test_a_classifier_is_no_language_model(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Unrecognized configuration class .*SubquadClassifierConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(("labels", "message"), [
    (torch.tensor([0, 1, 2, 3]), r"labels must lie in 0\.\.2, or be -100, got \[3\]"),
    (torch.tensor([0, 1, -1, 2]), r"labels must lie in 0\.\.2, or be -100, got \[-1\]"),
    (torch.tensor([0, 1]), r"labels must be int64 \[4\], got torch.int64 \[2\]"),
    (torch.zeros(4), r"labels must be int64 \[4\], got torch.float32 \[4\]"),
])  # fmt: skip
def test_wrong_labels_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        tiny()(some_tokens(), labels=labels)


def test_wrong_inputs_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match="input_ids is needed"):
        model()
    with pytest.raises(ValueError, match="inputs_embeds is not supported"):
        model(some_tokens(), inputs_embeds=torch.ones(4, 11, 16))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[4, 11\]"):
        model(some_tokens(), torch.ones(4, 3))


@pytest.mark.parametrize(("fields", "message"), [
    ({"poling": "mean"}, "has no field 'poling'; did you mean 'pooling'"),
    ({"num_label": 3}, "has no field 'num_label'; did you mean 'num_labels'"),
    ({"num_layer": 3}, "has no field 'num_layer'; did you mean 'num_layers'"),
    ({"pooling": "max"}, "pooling must be one of its choices, got 'max'; valid: class, last, mean"),
    ({"num_labels": 1}, "num_classes must be at least 2, got 1"),
    ({"loops": 2}, "an encoder has neither loops nor a look-up head"),
])  # fmt: skip
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SubquadClassifierConfig(**fields)


def test_the_number_of_names_is_checked():
    with pytest.raises(ValueError, match=r"classes must name 3 classes, got 2: \['a', 'b'\]"):
        SubquadClassifierConfig.from_encoder(encoder_config(), classes=["a", "b"])
