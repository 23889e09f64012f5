"""Tokens that are removed from a cache, and transformers' decoding that guesses ahead and removes what was wrong."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from subquad.hf import SubquadCache, from_transformers
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.hybrids import theirs
from tests.hf.small import FORMS, QUICK, language_model, perceiver_ar, prompt
from tests.models.small import VOCABULARY, assert_refused

NEW = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
DECODERS = [
    pytest.param(make, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, make in FORMS.items() if not name.startswith("perceiver_ar")
]  # fmt: skip


def llama():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=None, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("make", DECODERS)
def test_guesses_of_the_prompt_change_no_token(make):
    model, repeated = make(), prompt(1).repeat(1, 3)
    expected = model.generate(repeated, **NEW)
    assert_exact(model.generate(repeated, **NEW, prompt_lookup_num_tokens=6), expected)


@pytest.mark.parametrize("assistant", [llama, lambda: language_model("latte", seed=4), language_model])
def test_guesses_of_an_assistant_change_no_token(assistant):
    model = language_model()
    assert_exact(model.generate(prompt(1), **NEW, assistant_model=assistant()), model.generate(prompt(1), **NEW))


def test_our_model_assists_another():
    model = llama()
    expected = model.generate(prompt(1), **NEW)
    assert_exact(model.generate(prompt(1), **NEW, assistant_model=language_model("gated_delta_net")), expected)


@pytest.mark.parametrize("name", ["Mamba-2", "Granite 4, rotary", "Qwen3.5"])
def test_an_imported_hybrid_guesses_ahead(name):
    model = from_transformers(theirs(name).double())
    model.generation_config.pad_token_id = None  # transformers would take a guess of that token for padding
    tokens = torch.randint(1, 61, (1, 9), generator=torch.Generator().manual_seed(1)).repeat(1, 3)
    expected = model.generate(tokens, **NEW)
    assert_exact(model.generate(tokens, **NEW, prompt_lookup_num_tokens=6), expected)
    assert_exact(model.generate(tokens, **NEW, assistant_model=model), expected)


@torch.no_grad()
def test_removed_tokens_leave_no_trace():
    model, cache, tokens = language_model("gated_delta_net"), SubquadCache(room=4), prompt(2, 20)
    model(tokens[:, :5], past_key_values=cache)
    cache.activate_past_recording()
    cache.crop(0)
    assert cache.is_croppable
    for t in range(5, 15):
        model(tokens[:, t : t + 1], past_key_values=cache)
    cache.crop(-3)
    assert cache.get_seq_length() == cache.state.seen == 12
    cache.crop(-1)
    after = model(tokens[:, 11:], past_key_values=cache, output_hidden_states=True)
    assert_same_maths(after.logits, model(tokens).logits[:, 11:])
    assert [x.shape[1] for x in after.hidden_states] == [9] * len(after.hidden_states)
    assert_refused(
        (lambda: cache.crop(2), ValueError, "crop takes minus the number of tokens to remove, as -4, got 2"),
        (lambda: cache.crop(-16), ValueError, "tokens can be taken back, of room=4"),
        (
            lambda: SubquadCache().crop(-1),
            ValueError,
            r"crop\(-1\) needs what the last tokens wrote: call activate_past",
        ),
    )
    assert cache.get_seq_length() == 20
    for change in (lambda: cache.batch_select_indices(torch.tensor([1])), lambda: cache.batch_repeat_interleave(2)):
        change()
        assert_refused((lambda: cache.crop(-1), ValueError, "0 tokens can be taken back, of room=4"))
    cache.layers[0].record_past = False  # as transformers does
    assert not cache.is_croppable


@torch.no_grad()
def test_a_long_prompt_is_read_in_two_parts_with_the_same_outputs():
    model, tokens, cache = language_model("window"), prompt(1, 300), SubquadCache()
    cache.activate_past_recording()
    found = model(tokens, past_key_values=cache, output_hidden_states=True)
    expected = model(tokens, output_hidden_states=True)
    assert_same_maths(found.logits, expected.logits)
    for x, y in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert_same_maths(x, y)
    cache.crop(-200)
    assert_same_maths(model(tokens[:, 100:], past_key_values=cache).logits, expected.logits[:, 100:])


def test_a_perceiver_ar_removes_tokens_and_is_refused_as_a_main_model():
    model, cache = perceiver_ar(), SubquadCache()
    assert_refused(
        (
            lambda: model.generate(prompt(1), **NEW, prompt_lookup_num_tokens=3),
            ValueError,
            "assisted generation is not",
        ),
    )
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        cache.activate_past_recording()
        expected = model(prompt()[:, 3:5], past_key_values=cache).logits[:, 1:]
        cache.crop(-1)
        assert_same_maths(model(prompt()[:, 4:5], past_key_values=cache).logits, expected)
