"""Log-probabilities of generated tokens and of prompts, against one pass over the whole text; shared prompts."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from subquad.generation import BatchDecoder, SamplingConfig, generate, generate_batch, reading
from subquad.testing import assert_same_maths
from tests.generation.models import VOCABULARY, make, numbers
from tests.generation.test_speculative import Right, Wrong

DRAWN = SamplingConfig(max_tokens=7, temperature=1.7, top_k=5, repetition_penalty=1.5, logit_bias={3: 2.0}, seed=4)


@torch.no_grad()
def by_hand(model, tokens):
    """log p of each token after the first ones, `[T - 1, V]`, in one pass."""
    return model(torch.tensor([tokens]))[0][0, :-1].double().log_softmax(-1)


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


def check(found, logp_TV, tokens, top):
    """Each entry has the token's log-probability and the `top` likeliest tokens, the likeliest first."""
    assert [entry.token for entry in found] == tokens
    expected_T = logp_TV.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert_same_maths(exact([entry.logprob for entry in found]), expected_T)
    values, ids = logp_TV.topk(top, dim=-1)
    assert [[token for token, _ in entry.top] for entry in found] == ids.tolist()
    assert_same_maths(exact([[logprob for _, logprob in entry.top] for entry in found]), values)


@pytest.mark.parametrize("name", ["latte", "llp", "full", "gated_delta_net", "learned"])
def test_they_are_of_the_models_distribution_however_the_prompt_is_cut_and_the_tokens_are_chosen(name, monkeypatch):
    monkeypatch.setattr(reading, "LOGITS", 2 * VOCABULARY)  # two places at a time
    model, prompt = make(name), numbers(9)
    decoder = BatchDecoder(model, slots=3, max_context=40, prefill_chunk=5)
    plain = decoder.add(numbers(4), DRAWN)
    request = decoder.add(prompt, DRAWN, logprobs=4, prompt_logprobs=3)
    with patch.object(model, "logits", wraps=model.logits) as logits:
        decoder.run()
    places = [call.args[0].shape[0] for call in logits.call_args_list if call.args[0].ndim == 2]
    assert (sum(places), max(places)) == (8, 2)
    logp_TV = by_hand(model, prompt + request.tokens)
    check(request.prompt_logprobs, logp_TV[:8], prompt[1:], 3)
    check(request.logprobs, logp_TV[8:], request.tokens, 4)
    assert request.tokens == list(generate(model, prompt, max_new_tokens=7, temperature=1.7, top_k=5, seed=4,
                                           repetition_penalty=1.5, logit_bias={3: 2.0}))  # fmt: skip
    assert (plain.logprobs, plain.prompt_logprobs) == ([], [])


@pytest.mark.parametrize("draft", [Wrong, Right])
def test_guesses_change_none_of_them(draft):
    model, prompt = make("gated_delta_net"), numbers(9)
    text = prompt + list(generate(model, prompt, max_new_tokens=9, temperature=0))
    decoder = BatchDecoder(model, slots=2, draft=partial(Right, text) if draft is Right else Wrong)
    sampling = SamplingConfig(max_tokens=9, temperature=0)
    first, second = decoder.add_samples(prompt, [sampling, sampling], logprobs=2, prompt_logprobs=1)
    decoder.run()
    assert first.tokens == second.tokens == text[9:]
    assert decoder.guesses[1] > 0
    logp_TV = by_hand(model, text)
    for request in (first, second):
        check(request.prompt_logprobs, logp_TV[:8], prompt[1:], 1)
        check(request.logprobs, logp_TV[8:], text[9:], 2)


def test_a_continued_text_has_them_too():
    model, text = make("latte"), numbers(9)
    begun = generate(model, text[:5], max_new_tokens=0).read_all()
    decoder = BatchDecoder(model, slots=1)
    request = decoder.add(text[5:], SamplingConfig(max_tokens=2), state=begun, logprobs=0, prompt_logprobs=VOCABULARY)
    decoder.run()
    logp_TV = by_hand(model, text + request.tokens)
    check(request.prompt_logprobs, logp_TV[5:8], text[6:], VOCABULARY)
    check(request.logprobs, logp_TV[8:], request.tokens, 0)


def test_a_prompt_is_scored_without_a_token_after_it():
    model, prompt = make("linear"), numbers(6)
    decoder = BatchDecoder(model, slots=1)
    request, other = (decoder.add(prompt, SamplingConfig(max_tokens=0), prompt_logprobs=1) for _ in range(2))
    assert (request.finished, decoder.waiting) == (None, 2)
    decoder.run()
    check(request.prompt_logprobs, by_hand(model, prompt), prompt[1:], 1)
    assert (request.finished, other.finished, request.tokens, decoder.free) == ("length", "length", [], 1)


def test_logits_that_are_not_finite_end_the_request_whose_prompt_they_are_of():
    model = make("latte")
    with torch.no_grad():
        model.embedding.tokens.weight[VOCABULARY - 1] = torch.inf
    decoder = BatchDecoder(model, slots=3)
    bad = decoder.add_samples([1, VOCABULARY - 1, 2], [DRAWN, DRAWN], prompt_logprobs=1)
    good = decoder.add([1], DRAWN)
    decoder.run()
    assert [request.finished for request in (*bad, good)] == ["error", "error", "length"]
    assert bad[0].error is bad[1].error
    assert "the model's logits must be finite" in str(bad[0].error)


SAMPLES = [DRAWN.replace(seed=seed) for seed in range(5)]


@pytest.mark.parametrize("name", ["llp", "full", "perceiver_ar self exact"])
def test_samples_read_their_prompt_once_and_are_those_of_each_alone(name):
    model, prompt = make(name), numbers(9)
    expected = []
    for sampling in SAMPLES:
        decoder = BatchDecoder(model, slots=4, max_context=40)
        expected.append(decoder.add(prompt, sampling))
        decoder.run()
    decoder = BatchDecoder(model, slots=4, max_context=40, prefill_chunk=3)
    with patch.object(model, "read", wraps=model.read) as read:
        found = decoder.add_samples(prompt, SAMPLES)  # one more than slots: it joins later, after the same reading
        decoder.run()
    assert sum(call.args[0].shape[1] for call in read.call_args_list) == 8
    assert [request.tokens for request in found] == [request.tokens for request in expected]
    assert len({tuple(request.tokens) for request in found}) == 5
    with patch.object(model, "read", wraps=model.read) as read:
        generate_batch(model, [prompt, prompt[:5]], DRAWN, samples=3, max_context=40)
    assert sum(call.args[0].shape[1] for call in read.call_args_list) == 8 + 4


def test_a_reading_goes_on_when_the_sample_that_began_it_is_cancelled():
    model, prompt = make("latte"), numbers(9)
    decoder = BatchDecoder(model, slots=4, prefill_chunk=3)
    first, second, third = decoder.add_samples(prompt, SAMPLES[:3])
    decoder.step()
    decoder.cancel(first)
    with patch.object(model, "read", wraps=model.read) as read:
        decoder.run()
    assert sum(call.args[0].shape[1] for call in read.call_args_list) == 5
    for request, sampling in ((second, SAMPLES[1]), (third, SAMPLES[2])):
        alone = BatchDecoder(model, slots=4)
        expected = alone.add(prompt, sampling)
        alone.run()
        assert request.tokens == expected.tokens


@pytest.mark.parametrize(("options", "match"), [
    ({"logprobs": 24}, "logprobs must be between 0 and 23, the size of the vocabulary, got 24"),
    ({"logprobs": -1}, "logprobs must be between 0 and 23, the size of the vocabulary, got -1"),
    ({"prompt_logprobs": 24}, "prompt_logprobs must be between 0 and 23, the size of the vocabulary, got 24"),
])  # fmt: skip
def test_more_tokens_than_the_vocabulary_are_refused(options, match):
    decoder = BatchDecoder(make("latte"), slots=1)
    with pytest.raises(ValueError, match=match):
        decoder.add([1], DRAWN, **options)
    assert decoder.waiting == 0


def test_prompts_of_a_model_that_predicts_its_last_tokens_alone_are_refused():
    decoder = BatchDecoder(make("perceiver_ar self exact"), slots=1)
    match = "of a prompt need predictions of all its tokens, but perceiver_ar predicts only the last 5; ask for those"
    with pytest.raises(ValueError, match=match):
        decoder.add([1], DRAWN, prompt_logprobs=1)
    assert decoder.add([1], DRAWN, logprobs=1).finished is None
