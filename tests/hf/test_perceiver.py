"""Perceiver AR as a transformers model: modes of decoding, latents of a call, and the loss."""

import math

import pytest
import torch
from torch.nn import functional as F

from subquad.hf import SubquadCache
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import language_model, left_padded, perceiver_ar, prompt
from tests.models.small import LATENTS, VOCABULARY, every_history

NEW = {"max_new_tokens": 7, "eos_token_id": None}
PLAIN = {"inputs": prompt(), "attention_mask": torch.ones(2, 8, dtype=torch.long)}


@every_history
def test_with_refill_a_left_padded_prompt_gives_what_it_gives_alone(form):
    model = perceiver_ar(form, decode="refill")
    together = model.generate(**left_padded(6), **NEW)
    assert_exact(together[1, 6:], model.generate(prompt()[1:, 6:], **NEW)[0])


def test_refill_and_frozen_read_the_prompt_with_fewer_latents():
    model, cache = perceiver_ar(decode="refill"), SubquadCache()
    kept = model.decoder.options.kept
    model.generate(**PLAIN, max_new_tokens=1, past_key_values=cache)
    assert cache.state["start"] == 8 - kept
    frozen = perceiver_ar(decode="frozen")
    tokens = frozen.generate(**PLAIN, max_new_tokens=LATENTS - kept + 1, eos_token_id=None)
    logits, _ = frozen.decoder(tokens[:, :-1])
    assert_exact(logits[:, kept - 1 :].argmax(-1), tokens[:, 8:])
    with pytest.raises(ValueError, match="decode='frozen' has used all 5 latents"):
        frozen.generate(**PLAIN, max_new_tokens=LATENTS - kept + 2, eos_token_id=None)


def test_the_latents_of_a_call_can_be_set():
    model, cache = perceiver_ar(decode="frozen"), SubquadCache()
    expected, _ = model.decoder(prompt(), latents=2)
    assert_same_maths(model(prompt(), latents=2, past_key_values=cache).logits, expected)
    assert_same_maths(model(prompt(), latents=2, use_cache=False).logits, expected)
    tokens = model.generate(**PLAIN, max_new_tokens=LATENTS, latents=1, eos_token_id=None)
    assert tokens.shape == (2, 8 + LATENTS)
    with pytest.raises(ValueError, match="latents is for perceiver_ar, and this model has attention='llp'"):
        language_model()(prompt(), latents=2)


@every_history
def test_the_loss_is_that_of_all_latents_before_each_rows_last_token(form):
    model, ids = perceiver_ar(form), prompt(length=11)
    for padding in (slice(0, 0), slice(0, 4), slice(7, 11), slice(2, 10)):
        mask = torch.ones_like(ids)
        mask[1, padding] = 0
        inputs = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        output = model(ids, **inputs)
        assert_same_maths(output.logits, model(ids, attention_mask=mask).logits, "logits do not depend on labels")
        losses = []
        for row, real in zip(ids, mask.bool(), strict=True):
            logits = model.decoder(row[None, real][:, :-1])[0][0]
            assert len(logits) == min(LATENTS, int(real.sum()) - 1)
            losses.append(F.cross_entropy(logits, row[real][-len(logits) :], reduction="none"))
        assert_same_maths(output.loss, torch.cat(losses).mean())
        assert_same_maths(model(ids, **inputs, use_cache=False, return_logits=False).loss, output.loss)
        total = model(ids, **inputs, num_items_in_batch=torch.tensor(2)).loss
        assert_same_maths(total, torch.cat(losses).sum() / 2)


@pytest.mark.parametrize(("latents", "tokens", "counted"), [
    (5, 11, 5), (5, 6, 5), (5, 5, 4), (1, 11, 1), (1, 2, 1), (1, 1, 0), (3, 4, 3),
])  # fmt: skip
def test_each_latent_has_a_label(latents, tokens, counted):
    """With a head of zeros each label costs log(vocabulary), so that the sum of losses counts labels."""
    model, ids = perceiver_ar("self", latents=latents), prompt(length=tokens)
    torch.nn.init.zeros_(model.decoder.head.weight)
    for module in (model.train(), model.eval()):
        labels = module(ids, labels=ids, num_items_in_batch=1).loss / math.log(VOCABULARY)
        assert_same_maths(labels, torch.tensor(2.0 * counted).double())
    ignored = ids.clone()
    ignored[0, -1] = -100
    labels = model(ids, labels=ignored, num_items_in_batch=1).loss / math.log(VOCABULARY)
    assert_same_maths(labels, torch.tensor(2.0 * counted - (counted > 0)).double())
    few = model(ids, labels=ids, latents=1, num_items_in_batch=1).loss / math.log(VOCABULARY)
    assert_same_maths(few, torch.tensor(2.0 * (tokens > 1)).double())


def test_after_a_cache_every_token_is_a_latent_and_the_last_one_has_no_label():
    model, ids, cache = perceiver_ar(), prompt(length=8), SubquadCache()
    model(ids[:, :5], past_key_values=cache)
    output = model(ids[:, 5:], past_key_values=cache, labels=ids[:, 5:])
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 6:].flatten())
    assert_same_maths(output.loss, expected)


def test_kept_logits_are_places_among_the_latents():
    model, ids = perceiver_ar(), prompt(length=20)
    whole = model(ids).logits
    for kept, expected in ((2, whole[:, -2:]), ([0, 4], whole[:, [0, 4]]), ([-1], whole[:, -1:])):
        kept = torch.tensor(kept) if isinstance(kept, list) else kept
        assert_same_maths(model(ids, logits_to_keep=kept).logits, expected)
    for place in (19, LATENTS, -LATENTS - 1):
        with pytest.raises(ValueError, match=rf"places among the 5 outputs, below 5, got \[{place}\]; a perceiver_ar"):
            model(ids, logits_to_keep=torch.tensor([place]))


def test_generate_follows_the_mode_that_is_set_and_without_a_cache_exact():
    model, made_so = perceiver_ar(), perceiver_ar(decode="refill", refill=2)
    exact = model.generate(**PLAIN, **NEW)
    model.decoder.set_decode("refill", 2)
    refilled = model.generate(**PLAIN, **NEW)
    assert_exact(refilled, made_so.generate(**PLAIN, **NEW))
    assert refilled.tolist() != exact.tolist()
    assert_exact(model.generate(**PLAIN, **NEW, use_cache=False), exact)
