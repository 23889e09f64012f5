"""Encoders as transformers models: classifiers of sequences and pairs, pretraining, a second loss."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from subquad.hf.encoders import Denoising, SubquadClassifierConfig, SubquadPretrainingConfig
from subquad.layers.head import new_head
from subquad.models.pretraining import Hiding, denoising_loss
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import classifier, encoder_config, pretraining, prompt
from tests.models.small import VOCABULARY, assert_refused

TOKENS, OTHER = prompt(4, 11) - 1, prompt(4, 11, seed=2) - 1  # below the mask token, the last one of the vocabulary
MASK = torch.ones(4, 11, dtype=torch.int64)
MASK[0, :4] = MASK[1, 7:] = 0
LABELS = torch.tensor([0, 2, 1, 2])


@pytest.mark.parametrize("fields", [{"pooling": "class"}, {"pooling": "last", "causal": True}, {"towers": 2}], ids=str)
def test_the_configuration_of_a_classifier_comes_back(fields, tmp_path):
    model, pair = classifier(**fields), {"pair_input_ids": OTHER} if "towers" in fields else {}
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, SubquadClassifierConfig)
    assert config.encoder_config() == model.config.encoder_config() == encoder_config(num_classes=3, **fields)
    assert config.id2label == {0: "red", 1: "green", 2: "blue"}
    assert config.label2id == {"red": 0, "green": 1, "blue": 2}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "subquad-classifier"
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.model.encoder.layers[0].attention.causal == fields.get("causal", False)
    assert_exact(loaded(TOKENS, **pair).logits, model(TOKENS, **pair).logits)
    with pytest.raises(ValueError, match=r"Unrecognized configuration class .*SubquadClassifierConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model = classifier().double()
    output = model(TOKENS, MASK, LABELS)
    assert output.logits.shape == (4, 3)
    assert_exact(output.logits, model.model(TOKENS, MASK.bool()))
    assert_same_maths(output.logits[0], model(TOKENS[:1, 4:]).logits[0])
    assert_same_maths(output.loss.double(), F.cross_entropy(output.logits, LABELS).double())
    kept = F.cross_entropy(output.logits[::2], LABELS[::2])
    assert_same_maths(model(TOKENS, MASK, torch.tensor([0, -100, 1, -100])).loss.double(), kept.double())
    assert model(TOKENS).loss is None
    loss, logits = model(TOKENS, MASK, LABELS, return_dict=False)
    assert_exact(logits, output.logits)
    assert_exact(loss, output.loss)


@pytest.mark.parametrize("towers", [1, 2])
def test_joint_denoising_reads_label_and_tokens_from_the_same_pass(towers):
    model, hiding = classifier(towers=towers).double().train(), Hiding(0.3, 0.2)
    model.denoising = Denoising(0.5, hiding)
    inputs = {"input_ids": TOKENS, "attention_mask": MASK, "labels": LABELS}
    if towers == 2:
        inputs |= {"pair_input_ids": OTHER, "pair_attention_mask": MASK.flip(0)}
    torch.manual_seed(3)
    loss = model(**inputs).loss
    torch.manual_seed(3)
    encoder, pooled, losses = model.model.encoder, [], []
    table = encoder.embedding.tokens
    head = new_head(16, VOCABULARY, bias=False, table=table)
    for read, real in ((TOKENS, MASK.bool()), (OTHER, MASK.flip(0).bool()))[:towers]:
        shown, hidden = hiding(read, real, VOCABULARY - 1)
        pooled.append(encoder(shown, real, pooled=True)[1])
        losses.append(denoising_loss(head, encoder(shown, real), read, hidden))
    labels = F.cross_entropy(model.model.logits(*pooled), LABELS)
    assert_same_maths(loss, labels + 0.5 * torch.stack(losses).mean())
    evaluated, both = model.eval()(**inputs), (TOKENS, MASK.bool(), OTHER, MASK.flip(0).bool())
    assert_exact(evaluated.logits, model.model(*both[: 2 * towers]))
    assert evaluated.loss.item() == F.cross_entropy(evaluated.logits, LABELS).item()


def test_logits_of_pretraining_leave_the_mask_token_out():
    model = pretraining().eval()
    assert model(TOKENS, MASK).logits.shape == (4, 11, VOCABULARY - 1)
    assert_exact(model(TOKENS, MASK).logits, model.model(TOKENS, MASK.bool()))
    assert pretraining(objective="causal")(TOKENS).logits.shape == (4, 11, VOCABULARY)


def test_an_evaluation_hides_the_same_tokens_and_training_others():
    model = pretraining()
    torch.manual_seed(0)
    assert len({model(TOKENS, MASK, TOKENS).loss.item() for _ in range(5)}) == 5
    model.eval()
    state = torch.get_rng_state()
    evaluated = {model(TOKENS, MASK, TOKENS).loss.item() for _ in range(5)}
    assert len(evaluated) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert model(TOKENS, MASK, TOKENS, return_dict=False)[0].item() in evaluated
    assert model(TOKENS, labels=TOKENS).logits is None


@pytest.mark.parametrize(("kind", "fields", "message"), [
    (SubquadClassifierConfig, {"poling": "mean"}, "has no field 'poling'; did you mean 'pooling'"),
    (SubquadClassifierConfig, {"num_label": 3}, "has no field 'num_label'; did you mean 'num_labels'"),
    (SubquadClassifierConfig, {"pooling": "max"}, "pooling must be one of its choices, got 'max'; valid: class, last"),
    (SubquadClassifierConfig, {"num_labels": 1}, "num_classes must be at least 2, got 1"),
    (SubquadClassifierConfig, {"loops": 2}, "loops=2 has no meaning for an encoder"),
    (SubquadPretrainingConfig, {"objective": "next"}, "unknown objective 'next'; valid: causal, denoise"),
    (SubquadPretrainingConfig, {"mask_fraction": 1.5}, r"^mask_fraction must be above 0 and below 1, got 1\.5"),
    (SubquadPretrainingConfig, {"random_fraction": -0.1}, r"^random_fraction must lie between 0 and 1, got -0\.1"),
    (SubquadPretrainingConfig, {"mask_fractions": 0.2}, "no field 'mask_fractions'; did you mean 'mask_fraction'"),
])  # fmt: skip
def test_wrong_fields_are_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_names_of_classes_are_counted_and_may_be_left_out():
    config = SubquadClassifierConfig.from_encoder(encoder_config(num_classes=3))
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    with pytest.raises(ValueError, match=r"classes must name 3 classes, got 2: \['a', 'b'\]"):
        SubquadClassifierConfig.from_encoder(encoder_config(num_classes=3), classes=["a", "b"])


def test_wrong_inputs_are_refused():
    model, pairs, learner, stack = classifier(), classifier(towers=2), pretraining(), classifier("perceiver_io").train()
    stack.denoising = Denoising(1.0, Hiding(0.3, 0.0))
    above, below = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, -1, 2])
    assert_refused(
        (lambda: model(TOKENS, labels=above), ValueError, r"labels must lie in 0\.\.2, or be -100, got \[3\]"),
        (lambda: model(TOKENS, labels=below), ValueError, r"labels must lie in 0\.\.2, or be -100, got \[-1\]"),
        (lambda: model(TOKENS, labels=above[:2]), ValueError, r"labels must be int64 \[4\], got torch.int64 \[2\]"),
        (lambda: model(TOKENS, labels=above.float()), ValueError, r"must be int64 \[4\], got torch.float32 \[4\]"),
        (model, ValueError, "input_ids is needed"),
        (learner, ValueError, "input_ids is needed"),
        (lambda: model(TOKENS, inputs_embeds=torch.ones(4, 11, 16)), ValueError, "inputs_embeds is not supported"),
        (lambda: model(TOKENS, torch.ones(4, 3)), ValueError, r"attention_mask must have shape \[4, 11\]"),
        (lambda: pairs(TOKENS), ValueError, "this classifier labels pairs of sequences"),
        (lambda: model(TOKENS, pair_input_ids=TOKENS), ValueError, "labels single sequences, but a pair was given"),
        (lambda: learner(TOKENS, labels=TOKENS + 1), ValueError, "labels must equal input_ids: the model itself draws"),
        (lambda: stack(TOKENS, labels=LABELS), ValueError, "'perceiver_io' keeps no vector for each token and cannot"),
    )
