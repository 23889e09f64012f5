"""An encoder in pretraining, and a classifier with two towers or a second loss, as transformers models."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForPreTraining, AutoModelForSequenceClassification

from subquad.attention import mechanism
from subquad.hf import SubquadForPreTraining, SubquadForSequenceClassification
from subquad.hf.encoders import Denoising, SubquadClassifierConfig, SubquadPretrainingConfig
from subquad.models import EncoderConfig
from subquad.models.pretraining import Hiding, denoising_loss
from subquad.testing import assert_exact, assert_same_maths

VOCABULARY, MASK = 9, 9


def encoder_config(name="llp", **fields):
    rotates = name != "perceiver_io" and mechanism(name).rotates
    shape = {
        "vocab_size": VOCABULARY + 1,
        "dim": 16,
        "num_layers": 1,
        "num_heads": 2,
        "options": {"llp": {"segment": 6}, "perceiver_io": {"latents": 4}},
        "position": "rope" if rotates else "learned",
        "max_positions": 16,
        "init_std": 0.3,
    }
    return EncoderConfig(attention=name, **(shape | fields))


def pretraining(name="llp", objective="denoise", **fields):
    torch.manual_seed(0)
    config = encoder_config(name, causal=objective == "causal", **fields)
    return SubquadForPreTraining(SubquadPretrainingConfig.from_encoder(config, objective=objective, mask_fraction=0.3))


def classifier(**fields):
    torch.manual_seed(0)
    return SubquadForSequenceClassification(SubquadClassifierConfig.from_encoder(encoder_config(**fields)))


def some_tokens(seed=1):
    return torch.randint(VOCABULARY, (4, 11), generator=torch.Generator().manual_seed(seed))


def some_mask():
    mask = torch.ones(4, 11, dtype=torch.int64)
    mask[0, :4] = 0
    mask[1, 7:] = 0
    return mask


LABELS = torch.tensor([0, 1, 1, 0])


# --- pretraining


@pytest.mark.parametrize("name", ["llp", "latte", "perceiver_io"])
def test_a_saved_encoder_comes_back(name, tmp_path):
    model, tokens = pretraining(name).eval(), some_tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadForPreTraining)
    assert AutoConfig.from_pretrained(tmp_path).encoder_config() == model.config.encoder_config()
    assert (loaded.config.objective, loaded.config.mask_fraction) == ("denoise", 0.3)
    assert_exact(loaded(tokens).logits, model(tokens).logits)
    assert_exact(loaded(tokens, labels=tokens).loss, model(tokens, labels=tokens).loss)


def test_the_logits_leave_the_mask_token_out():
    tokens, mask = some_tokens(), some_mask()
    model = pretraining().eval()
    assert model(tokens, mask).logits.shape == (4, 11, VOCABULARY)
    assert_exact(model(tokens, mask).logits, model.model(tokens, mask.bool()))
    assert pretraining(objective="causal")(tokens).logits.shape == (4, 11, VOCABULARY + 1)


def test_an_evaluation_hides_the_same_tokens_and_training_others():
    model, tokens, mask = pretraining(), some_tokens(), some_mask()
    torch.manual_seed(0)
    losses = {model(tokens, mask, tokens).loss.item() for _ in range(5)}
    assert len(losses) == 5
    model.eval()
    state = torch.get_rng_state()
    evaluated = {model(tokens, mask, tokens).loss.item() for _ in range(5)}
    assert len(evaluated) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert model(tokens, mask, tokens, return_dict=False)[0].item() in evaluated
    assert model(tokens, labels=tokens).logits is None


def test_checkpointing_is_switched_on_by_transformers():
    model = pretraining()
    model.activation_checkpointing_enable()
    assert model.model.encoder.gradient_checkpointing
    assert model.get_input_embeddings() is model.model.encoder.embedding.tokens


def test_the_configuration_follows_the_vocabulary():
    model = pretraining(objective="causal")
    model.resize_token_embeddings(VOCABULARY + 5)
    assert model.model.config.vocab_size == model.model.encoder.config.vocab_size == VOCABULARY + 5
    assert model.eval()(some_tokens() + 4).logits.shape == (4, 11, VOCABULARY + 5)


def test_what_is_not_taken_is_refused():
    model, tokens = pretraining(), some_tokens()
    with pytest.raises(ValueError, match="input_ids is needed"):
        model()
    with pytest.raises(ValueError, match="labels must equal input_ids: the model itself draws"):
        model(tokens, labels=tokens + 1)
    with pytest.raises(ValueError, match="unknown objective 'next'; valid: causal, denoise"):
        SubquadPretrainingConfig(objective="next")
    with pytest.raises(ValueError, match=r"^mask_fraction must be above 0 and below 1, got 1\.5"):
        SubquadPretrainingConfig(mask_fraction=1.5)
    with pytest.raises(ValueError, match=r"^random_fraction must lie between 0 and 1, got -0\.1"):
        SubquadPretrainingConfig(random_fraction=-0.1)
    with pytest.raises(ValueError, match="has no field 'mask_fractions'; did you mean 'mask_fraction'"):
        SubquadPretrainingConfig(mask_fractions=0.2)


# --- two towers


@pytest.mark.parametrize("name", ["llp", "perceiver_io"])
def test_a_saved_pair_classifier_comes_back(name, tmp_path):
    model, one, other, mask = classifier(name=name, towers=2).eval(), some_tokens(), some_tokens(2), some_mask()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.towers == 2
    inputs = {"input_ids": one, "attention_mask": mask, "pair_input_ids": other, "pair_attention_mask": mask.flip(0)}
    expected = model.model(one, mask.bool(), other, mask.flip(0).bool())
    assert_exact(loaded(**inputs).logits, expected)
    assert_same_maths(loaded(**inputs, labels=LABELS).loss.double(), F.cross_entropy(expected, LABELS).double())


def test_a_missing_or_needless_pair_is_refused():
    with pytest.raises(ValueError, match="this classifier labels pairs of sequences"):
        classifier(towers=2)(some_tokens())
    with pytest.raises(ValueError, match="labels single sequences, but a pair was given"):
        classifier()(some_tokens(), pair_input_ids=some_tokens())


def test_a_causal_classifier_comes_back(tmp_path):
    model = classifier(causal=True, pooling="last").eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.causal
    assert loaded.model.encoder.layers[0].attention.causal
    assert_exact(loaded(some_tokens()).logits, model(some_tokens()).logits)


# --- a second loss


@pytest.mark.parametrize("towers", [1, 2])
def test_joint_denoising_reads_label_and_tokens_from_the_same_pass(towers):
    model, tokens, mask = classifier(towers=towers).double().train(), [some_tokens(), some_tokens(2)], some_mask()
    hiding = Hiding(0.3, 0.2)
    model.denoising = Denoising(0.5, hiding)
    inputs = {"input_ids": tokens[0], "attention_mask": mask, "labels": LABELS}
    if towers == 2:
        inputs |= {"pair_input_ids": tokens[1], "pair_attention_mask": mask.flip(0)}
    torch.manual_seed(3)
    loss = model(**inputs).loss
    torch.manual_seed(3)
    encoder, pooled, losses = model.model.encoder, [], []
    for read, real in list(zip(tokens, (mask, mask.flip(0)), strict=True))[:towers]:
        shown, hidden = hiding(read, real.bool(), MASK)
        pooled.append(encoder.pooled(shown, real.bool()))
        losses.append(denoising_loss(encoder, encoder(shown, real.bool()), read, hidden))
    labels = F.cross_entropy(model.model.logits(*pooled).float(), LABELS)
    assert_same_maths(loss, labels + 0.5 * torch.stack(losses).mean())
    assert model.eval()(**inputs).loss.item() == F.cross_entropy(model(**inputs).logits.float(), LABELS).item()


def test_a_perceiver_has_no_second_loss():
    model = classifier(name="perceiver_io").train()
    model.denoising = Denoising(1.0, Hiding(0.3, 0.0))
    with pytest.raises(ValueError, match="'perceiver_io' keeps no vector for each token and cannot predict tokens"):
        model(some_tokens(), labels=LABELS)
