"""Loops and the look-up over the logits in transformers: loss, generation, saving."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from subquad.attention import mechanism
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.testing import assert_exact, assert_same_maths

VOCABULARY = 23
NEW = {"max_new_tokens": 7, "eos_token_id": None}


def tiny(name="llp", **fields):
    """Float64, so that another order of the sums picks no other token."""
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "options": {"llp": {"segment": 6}},
        "position": "rope" if mechanism(name).rotates else "sinusoidal",
        "init_std": 0.5,
        "pad_token_id": 0,
        "feedforward": "bilinear",
        "loops": 3,
        "lookup": 31,
    }
    torch.manual_seed(0)
    model = SubquadForCausalLM(SubquadConfig(attention=name, **(shape | fields))).double().eval()
    with torch.no_grad():
        for bias in model.model.pass_biases.parameters():
            bias.normal_()
    return model


def left_padded():
    tokens = torch.randint(1, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    return {"inputs": tokens * mask, "attention_mask": mask}


@pytest.mark.parametrize("name", ["llp", "latte"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beam"])
def test_with_a_cache_the_same_tokens_come(name, how):
    model = tiny(name)
    cached, plain = (model.generate(**left_padded(), **NEW, **how, use_cache=use) for use in (True, False))
    assert_exact(cached, plain)
    assert cached[:, 8:].unique().numel() > 2
    assert_exact(
        model.generate(left_padded()["inputs"][1:, 3:], **NEW)[0], tiny(name).generate(**left_padded(), **NEW)[1, 3:]
    )


def test_the_logits_are_the_decoders():
    model, tokens = tiny(), left_padded()["inputs"]
    assert_same_maths(model(tokens).logits, model.model(tokens)[0])
    assert_same_maths(model(tokens, logits_to_keep=2).logits, model.model(tokens)[0][:, -2:])


@pytest.mark.parametrize("lookup", [None, 31])
def test_the_loss_in_training_is_that_of_all_passes(lookup):
    model, tokens = tiny(loop_loss="all", lookup=lookup), left_padded()["inputs"]
    model.train()
    vectors = model.model.passes(tokens)
    assert len(vectors) == 3
    losses = [F.cross_entropy(model.model.logits(h)[:, :-1].mT, tokens[:, 1:]) for h in vectors]
    output = model(tokens, labels=tokens, output_logits=True)
    assert_same_maths(output.loss, torch.stack(losses).mean())
    assert_same_maths(output.logits, model.model.logits(vectors[-1]))
    assert_same_maths(model(tokens, labels=tokens, num_items_in_batch=7).loss, torch.stack(losses).mean() * 2)
    model.eval()
    assert_same_maths(model(tokens, labels=tokens).loss, losses[-1])
    assert_same_maths(model(tokens, labels=tokens, use_cache=False).loss, losses[-1])


def test_training_on_all_passes_takes_no_cache():
    model, tokens = tiny(loop_loss="all").train(), left_padded()["inputs"]
    with pytest.raises(ValueError, match="loop_loss='all' trains on every pass, which a cache does not give"):
        model(tokens, labels=tokens, use_cache=True)
    assert model(tokens, use_cache=True).past_key_values is not None


def test_a_saved_model_comes_back_bit_for_bit(tmp_path):
    model = tiny(bias=True, tie_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.decoder_config() == model.config.decoder_config()
    weights = dict(loaded.named_parameters())
    assert weights.keys() == dict(model.named_parameters()).keys()
    for key, weight in model.named_parameters():
        assert_exact(weights[key], weight, key)
    tokens = left_padded()["inputs"]
    assert_same_maths(loaded(tokens).logits, model(tokens).logits)


def test_a_vocabulary_with_a_look_up_cannot_change():
    with pytest.raises(ValueError, match=r"a look-up over the logits \(lookup=31\) .* cannot change"):
        tiny().resize_token_embeddings(VOCABULARY + 1)
    assert tiny(lookup=None).resize_token_embeddings(VOCABULARY + 1, mean_resizing=False).num_embeddings == 24
