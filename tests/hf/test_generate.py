"""`generate` with and without a cache, and what a `SubquadCache` can and cannot do."""

import copy

import torch

from subquad.hf import SubquadCache
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import every_form, language_model, left_padded, prompt
from tests.models.small import assert_refused

NEW = {"max_new_tokens": 7, "eos_token_id": None}


def generated(model, **how):
    """The same tokens with and without a cache."""
    tokens = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        tokens.append(model.generate(**left_padded(), **NEW, **how, use_cache=use_cache))
    assert_exact(*tokens)
    assert tokens[0][:, 8:].unique().numel() > 2
    return tokens[0]


@every_form
def test_a_cache_changes_no_token_and_padding_none_either(make):
    model = make()
    together = generated(model)
    assert_exact(together[1, 3:], model.generate(prompt()[1:, 3:], **NEW)[0])
    generated(model, num_beams=3, num_return_sequences=2)


def test_a_cache_changes_no_sample():
    for how in ({"num_return_sequences": 3, "top_k": 5}, {"num_beams": 2}):
        generated(language_model(), do_sample=True, **how)


@every_form
def test_logits_with_a_cache_are_the_same_mathematics(make):
    model = make()
    tokens = torch.cat([left_padded()["inputs"], prompt()], 1)
    mask = torch.cat([left_padded()["attention_mask"], torch.ones(2, 8, dtype=torch.long)], 1)
    whole, cache, outputs = model(tokens, attention_mask=mask).logits, SubquadCache(), []
    for start, stop in ((0, 5), (5, 8), *((t, t + 1) for t in range(8, 16))):
        outputs.append(model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
    exact = whole.shape[1] if whole.shape[1] == 16 else 1  # Perceiver AR's last token sees all of its latents
    assert_same_maths(torch.cat(outputs, 1)[:, -exact:], whole[:, -exact:])


def test_a_cache_continues_in_chunks_of_a_prompt_and_in_the_next_call():
    model, cache = language_model(), SubquadCache()
    whole = model.generate(**left_padded(), **NEW)
    assert_exact(model.generate(**left_padded(), **NEW, prefill_chunk_size=3, past_key_values=cache), whole)
    assert cache.get_seq_length() == 8 + 7 - 1
    cache = SubquadCache()
    first = model.generate(**left_padded(), max_new_tokens=4, eos_token_id=None, past_key_values=cache)
    mask = torch.cat([left_padded()["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
    rest = {"max_new_tokens": 3, "eos_token_id": None, "past_key_values": cache}
    assert_exact(model.generate(first, attention_mask=mask, **rest), whole)


@torch.no_grad()
def test_a_cache_is_made_moved_copied_and_left_as_asked():
    model, tokens = language_model(), prompt()
    cache = model(tokens).past_key_values
    assert isinstance(cache, SubquadCache)
    assert cache.get_seq_length() == 8
    assert model(tokens, use_cache=False).past_key_values is None
    assert language_model(use_cache=False)(tokens).past_key_values is None
    after = model(tokens, past_key_values=cache, use_cache=False).logits
    assert cache.get_seq_length() == 8
    before = copy.deepcopy(cache)
    assert_exact(model(tokens, past_key_values=cache).logits, after)
    assert_exact(model(tokens, past_key_values=before).logits, after)
    assert cache.get_seq_length() == 16
    assert_same_maths(after, model(torch.cat([tokens, tokens], 1)).logits[:, 8:])
    cache.reset()
    assert (cache.state, cache.get_seq_length()) == (None, 0)


@every_form
def test_rows_are_reordered_repeated_and_selected(make):
    model, inputs, new = make(), left_padded(), torch.tensor([[3], [4]])

    def after(change, rows):
        cache = model(inputs["inputs"], attention_mask=inputs["attention_mask"]).past_key_values
        change(cache)
        return model(new[rows], past_key_values=cache).logits

    usual = after(lambda cache: None, [0, 1])
    for change, rows in (
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
        (lambda cache: cache.offload(0), [0, 1]),
    ):
        assert_same_maths(after(change, rows), usual[rows])


def test_the_cache_describes_itself_to_transformers():
    cache = SubquadCache()
    assert not cache.is_compileable
    assert not cache.is_initialized
    assert cache.get_mask_sizes(3, 0) == (3, 0)
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == -1
    cache.reorder_cache(torch.tensor([0]))
    language_model()(prompt(), past_key_values=cache)
    assert cache.get_mask_sizes(1, 0) == (9, 0)


def test_positions_other_than_the_default_and_earlier_states_are_refused():
    model, cache = language_model(), SubquadCache()
    positions = (left_padded()["attention_mask"].cumsum(1) - 1).clamp(min=0)
    given = model.generate(**left_padded(), **NEW, position_ids=positions)
    assert_exact(given, model.generate(**left_padded(), **NEW))
    model(prompt(), past_key_values=cache)
    assert_refused(
        (lambda: model.generate(**left_padded(), **NEW, position_ids=positions + 2), ValueError, "count the row's"),
        (lambda: cache.update(positions, positions, 0), TypeError, "cannot store another model's keys"),
        (lambda: language_model("full")(prompt(), past_key_values=cache), ValueError, "was made by configuration"),
    )
