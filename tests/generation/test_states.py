"""Decoding with a state gives the tokens that reading the whole text again gives, for all causal mechanisms and stacks.

These tests use our own generation; those of tests/hf use `transformers.generate`.
"""

import pytest
import torch

from subquad.generation import BatchDecoder, SamplingConfig, generate
from subquad.generation.sampling import Sampler
from subquad.hf import SubquadCache, SubquadConfig, SubquadForCausalLM
from subquad.models import PerceiverAR
from subquad.state import State
from subquad.testing import assert_exact
from tests.generation.models import ALL, EXACT, REFILL, VOCABULARY, make, numbers, with_models

PROMPT = numbers(11)
FEW = ["full", "latte", "llp", "perceiver_ar self exact"]
EXACT_DECODING = [name for name in ALL if name not in REFILL]
SAVED = [*FEW, "bigbird", "luna", "performer", "shifted", "perceiver_ar self refill", "hybrid", "learned"]
JOINED = [
    *SAVED, "delta_net", "longformer", "mamba2", "strided", "sinks",
    *(f"perceiver_ar {history} exact" for history in ("cross", "segments", "compressed")),
]  # fmt: skip
"""States of each kind; the others join the same slots in `make test-long`."""
KEPT_LONGER = ("first_keys", "first_values", "own_keys", "own_values")
"""Entries that a batch keeps until no later token needs them."""


def sizes(state, place=""):
    """The shape of each tensor by its place."""
    found = {}
    for name, entry in state.entries.items():
        if isinstance(entry, State):
            found |= sizes(entry, f"{place}{name}/")
        elif isinstance(entry, torch.Tensor) and name not in KEPT_LONGER:
            found[place + name] = entry.shape
    return found


def check_against_full_passes(name, prompt, chunk):
    sampling = {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "min_p": 0.01, "seed": 4}
    model, ids, choose = make(name), numbers(prompt), Sampler(SamplingConfig(**sampling), VOCABULARY)
    found = list(generate(model, ids, max_new_tokens=7, **sampling, prefill_chunk=chunk))
    assert len(set(found)) > 1
    for token in found:
        with torch.no_grad():
            assert choose(model(torch.tensor([ids]))[0][0, -1]) == token
        ids.append(token)


@with_models(names=EXACT_DECODING)
def test_tokens_are_those_sampled_from_full_passes(name):
    check_against_full_passes(name, 11, 4)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4096])
@pytest.mark.parametrize("name", EXACT_DECODING)
def test_a_sample_does_not_depend_on_the_chunks_of_the_prompt(name, chunk):
    check_against_full_passes(name, 11, chunk)


@pytest.mark.parametrize("prompt", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_a_prompt_may_be_shorter_than_the_latents(name, prompt):
    check_against_full_passes(name, prompt, 2)


@with_models(SAVED)
def test_a_text_continues_from_a_saved_state(name, tmp_path):
    model, greedy = make(name), {"max_new_tokens": 4, "temperature": 0.0}
    first = generate(model, PROMPT, **greedy)
    text = [*PROMPT, *first]
    state = first.read_all()
    assert (state.seen, list(first)) == (len(text), [])
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors", config_hash=model.config_hash)
    expected = list(generate(model, [5, 6], state=state, **greedy))
    assert list(generate(model, [5, 6], state=loaded, **greedy)) == expected
    if name not in REFILL:
        assert expected == list(generate(model, [*text, 5, 6], **greedy))


@with_models(FEW)
def test_a_text_continues_from_a_saved_cache_of_transformers(name, tmp_path):
    model = make(name)
    wrapped = SubquadForCausalLM(SubquadConfig.from_decoder(model.config)).double().eval()
    wrapped.decoder.load_state_dict(model.state_dict())
    cache, prompt = SubquadCache(), torch.tensor([PROMPT])
    with torch.no_grad():
        wrapped(prompt[:, :8], past_key_values=cache)
        cache.state.save(tmp_path / "state.safetensors")
        loaded = SubquadCache()
        loaded.update_state(State.load(tmp_path / "state.safetensors", config_hash=model.config_hash), 8)
        expected = wrapped(prompt[:, 8:], past_key_values=cache).logits
        assert_exact(wrapped(prompt[:, 8:], past_key_values=loaded).logits, expected)


def joined(model, asked):
    """The decoder and the requests of (prompt length, new tokens), each added a step after the one before."""
    decoder, running = BatchDecoder(model, slots=2, max_context=64, prefill_chunk=4), []
    for prompt, tokens in asked:
        sampling = SamplingConfig(max_tokens=tokens, temperature=0)
        running.append(decoder.add(numbers(prompt, prompt), sampling, keep_state=True))
        decoder.step()
    decoder.run()
    return decoder, running


@with_models(JOINED)
def test_sequences_join_and_leave_a_batch_as_if_alone(name):
    model, asked = make(name), ((1, 2), (9, 3), (4, 4))
    decoder, running = joined(model, asked)
    total = BatchDecoder(model, slots=2, max_context=64).state_bytes
    assert decoder.state_bytes == total
    if model.static_shapes:
        assert [request.state_bytes for request in running] == [total // 2] * 3
    for request, (prompt, tokens) in zip(running, asked, strict=True):
        alone = list(generate(model, numbers(prompt, prompt), max_new_tokens=tokens + 2, temperature=0))
        assert request.tokens == alone[:tokens]
        assert request.state.seen == prompt + tokens - 1
        last = request.tokens[-1:]
        assert list(generate(model, last, state=request.state, max_new_tokens=2, temperature=0)) == alone[tokens:]
        if not isinstance(model, PerceiverAR):
            with torch.no_grad():
                usual = model.hidden(torch.tensor([[*numbers(prompt, prompt), *request.tokens[:-1]]]))[1]
            assert sizes(request.state) == sizes(usual)
    again = decoder.add(last, SamplingConfig(max_tokens=2, temperature=0), state=request.state)
    decoder.run()
    assert again.tokens == alone[tokens:]


def test_a_row_without_kept_latents_joins_one_with_them():
    model, asked = make("perceiver_ar self exact"), ((1, 5), (12, 3), (5, 6))
    for request, (prompt, tokens) in zip(joined(model, asked)[1], asked, strict=True):
        assert request.tokens == list(generate(model, numbers(prompt, prompt), max_new_tokens=tokens, temperature=0))
