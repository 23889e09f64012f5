"""Perceiver AR as a transformers model."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from subquad.hf import SubquadCache, SubquadConfig, SubquadForCausalLM
from subquad.models import PerceiverAR
from subquad.testing import assert_exact, assert_same_maths

VOCABULARY, LATENTS = 23, 5
FORMS = {
    "cross": {"history": "cross"},
    "self": {"history": "self", "history_tokens": 6},
    "segments": {"history": "segments", "segment": 3},
    "compressed": {"history": "compressed", "history_tokens": 6, "projected": 2, "first_layer": "full"},
}
every_form = pytest.mark.parametrize("form", FORMS)
NEW = {"max_new_tokens": 9, "eos_token_id": None}


def tiny(form="self", **options):
    torch.manual_seed(0)
    config = SubquadConfig(
        vocab_size=VOCABULARY,
        dim=16,
        num_layers=3,
        num_heads=2,
        attention="perceiver_ar",
        options={"perceiver_ar": {"latents": LATENTS, **FORMS[form], **options}},
        init_std=0.5,
        pad_token_id=0,
    )
    return SubquadForCausalLM(config).double().eval()


def prompt(tokens=8):
    return torch.randint(1, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(1))


def plain(tokens=8):
    return {"inputs": prompt(tokens), "attention_mask": torch.ones(2, tokens, dtype=torch.long)}


def left_padded(tokens=8):
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, :6] = 0
    return {"inputs": prompt(tokens) * mask, "attention_mask": mask}


@every_form
def test_a_saved_model_comes_back_bit_for_bit(form, tmp_path):
    model = tiny(form).float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded.model, PerceiverAR)
    assert loaded.model.config_hash == model.model.config_hash
    weights = dict(loaded.named_parameters())
    for name, weight in model.named_parameters():
        assert_exact(weights.pop(name), weight)
    assert not weights
    assert_same_maths(loaded.double()(prompt()).logits, model.double()(prompt()).logits)


@every_form
@pytest.mark.parametrize("prompts", [plain, left_padded])
@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5}],
    ids=["greedy", "beam", "sample"],
)
def test_with_a_cache_the_same_tokens_come(form, prompts, how):
    """In mode exact, where the latents are all used from the prompt on and where rows have fewer tokens."""
    model, tokens = tiny(form), []
    for use_cache in (True, False):
        torch.manual_seed(5)
        tokens.append(model.generate(**prompts(), **NEW, **how, use_cache=use_cache))
    assert_exact(*tokens)
    assert tokens[0][:, 8:].unique().numel() > 2


@every_form
def test_a_left_padded_prompt_gives_what_it_gives_alone(form):
    model = tiny(form, decode="refill")
    together = model.generate(**left_padded(), **NEW)
    alone = model.generate(prompt()[1:, 6:], **NEW)
    assert_exact(together[1, 6:], alone[0])


@pytest.mark.parametrize("use_cache", [True, False])
def test_refill_and_frozen_read_the_prompt_with_fewer_latents(use_cache):
    model, cache = tiny(decode="refill"), SubquadCache()
    kept = model.model.options.kept
    model.generate(**plain(), max_new_tokens=1, past_key_values=cache)
    assert cache.state["start"] == 8 - kept
    frozen = tiny(decode="frozen")
    tokens = frozen.generate(**plain(), max_new_tokens=LATENTS - kept + 1, eos_token_id=None)
    logits, _ = frozen.model(tokens[:, :-1])
    assert_exact(logits[:, kept - 1 :].argmax(-1), tokens[:, 8:])
    with pytest.raises(ValueError, match="decode='frozen' has used all 5 latents"):
        frozen.generate(**plain(), max_new_tokens=LATENTS - kept + 2, eos_token_id=None)


def test_the_latents_of_a_call_can_be_named():
    model, cache = tiny(decode="frozen"), SubquadCache()
    expected, _ = model.model(prompt(), latents=2)
    assert_same_maths(model(prompt(), latents=2, past_key_values=cache).logits, expected)
    assert_same_maths(model(prompt(), latents=2, use_cache=False).logits, expected)
    tokens = model.generate(**plain(), max_new_tokens=LATENTS, latents=1, eos_token_id=None)
    assert tokens.shape == (2, 8 + LATENTS)
    llp = SubquadForCausalLM(SubquadConfig(vocab_size=VOCABULARY, dim=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="latents is for perceiver_ar, and this model has attention='llp'"):
        llp(prompt(), latents=2)


@every_form
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_the_loss_is_that_of_the_latents(form, side):
    model, ids = tiny(form), prompt(11)
    mask = torch.ones_like(ids)
    if side != "none":
        padding = slice(0, 4) if side == "left" else slice(7, 11)
        mask[1, padding] = 0
    labels = ids.masked_fill(mask == 0, -100)
    output = model(ids, attention_mask=mask, labels=labels)
    assert output.logits.shape == (2, LATENTS, VOCABULARY)
    losses = []
    for row in range(2):
        real = ids[row][mask[row] == 1]
        logits = model.model(real[None])[0][0]
        losses.append(F.cross_entropy(logits[:-1], real[-LATENTS + 1 :], reduction="none"))
    assert_same_maths(output.loss, torch.cat(losses).mean())
    assert_same_maths(model(ids, attention_mask=mask, labels=labels, use_cache=False).loss, output.loss)
    total = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(2)).loss
    assert_same_maths(total, torch.cat(losses).sum() / 2)


def test_kept_logits_are_counted_from_the_end():
    model, ids = tiny(), prompt(11)
    whole = model(ids).logits
    assert_same_maths(model(ids, logits_to_keep=2).logits, whole[:, -2:])
    assert_same_maths(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, whole[:, [0, 4]])


def test_kept_logits_that_are_not_there_are_refused():
    model, ids = tiny(), prompt(20)
    for place in (19, LATENTS, -LATENTS - 1):
        with pytest.raises(ValueError, match=rf"places among the 5 outputs, below 5, got \[{place}\]; a perceiver_ar"):
            model(ids, logits_to_keep=torch.tensor([place]))
    assert_same_maths(model(ids, logits_to_keep=torch.tensor([-1])).logits, model(ids).logits[:, -1:])


def test_generate_follows_the_mode_that_is_set_and_without_a_cache_exact():
    model, made_so = tiny(), tiny(decode="refill", refill=2)
    exact = model.generate(**plain(), **NEW)
    model.model.set_decode("refill", 2)
    refilled = model.generate(**plain(), **NEW)
    assert_exact(refilled, made_so.generate(**plain(), **NEW))
    assert refilled.tolist() != exact.tolist()
    assert_exact(model.generate(**plain(), **NEW, use_cache=False), exact)


def test_the_trainer_takes_the_mean_of_each_batch():
    assert not tiny().accepts_loss_kwargs
    assert SubquadForCausalLM(SubquadConfig(vocab_size=9, dim=16, num_layers=1, num_heads=2)).accepts_loss_kwargs


def test_varying_latents_in_training_score_their_labels():
    model, ids = tiny(vary_latents=True).train(), prompt(11)
    drawn = set()
    for seed in range(9):
        torch.manual_seed(seed)
        output = model(ids, labels=ids, output_logits=True)
        drawn.add(output.logits.shape[1])
        used = output.logits.shape[1] - 1
        assert_same_maths(output.loss, F.cross_entropy(output.logits[:, :-1].transpose(1, 2), ids[:, -used:]))
    assert drawn == {3, 4, 5}
