"""Law 13 of the contract, for every causal mechanism and stack: decoding with a state is reading everything again.

Here the generation of our own; tests/hf has it through `transformers.generate`.
"""

import pytest
import torch

from subquad.generation import BatchDecoder, SamplingConfig, beam_search, generate, generate_batch
from subquad.hf import SubquadCache, SubquadConfig, SubquadForCausalLM
from subquad.models import PerceiverAR
from subquad.state import State
from subquad.testing import assert_exact
from tests.generation.models import EVERY, VOCABULARY, make, numbers

PROMPT = numbers(11)
GREEDY = {"max_tokens": 9, "temperature": 0.0}
every = pytest.mark.parametrize("name", EVERY)
without_refill = pytest.mark.parametrize("name", [name for name in EVERY if not name.endswith("refill")])


def sizes(state, without, place=""):
    """The shape of each tensor by its place."""
    found = {}
    for name, entry in state.entries.items():
        if isinstance(entry, State):
            found |= sizes(entry, without, f"{place}{name}/")
        elif isinstance(entry, torch.Tensor) and name not in without:
            found[place + name] = entry.shape
    return found


@torch.no_grad()
def read_again(model, choose, tokens=9):
    """Tokens that `choose` takes from the logits of a full pass over all before."""
    ids = list(PROMPT)
    for _ in range(tokens):
        ids.append(choose(model(torch.tensor([ids]))[0][0, -1]))
    return ids[len(PROMPT) :]


@without_refill
@pytest.mark.parametrize(
    "chunk", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(4096, marks=pytest.mark.slow)]
)
def test_greedy_with_any_chunks_of_the_prompt(name, chunk):
    model = make(name)
    expected = read_again(model, lambda logits: int(logits.argmax()))
    assert len(set(expected)) > 1
    assert list(generate(model, PROMPT, **GREEDY, prefill_chunk=chunk)) == expected


@without_refill
def test_a_seed_gives_the_same_sample_with_the_state_and_without(name):
    from subquad.generation.sampling import Sampler

    model, sampling = make(name), {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "min_p": 0.01, "seed": 4}
    choose = Sampler(SamplingConfig(**sampling), VOCABULARY)
    assert list(generate(model, PROMPT, max_tokens=9, **sampling)) == read_again(model, choose)


@without_refill
@torch.no_grad()
def test_beams_are_those_of_full_passes(name):
    model, beams = make(name), [((), 0.0)]
    for _ in range(6):
        longer = []
        for tokens, total in beams:
            log_p = model(torch.tensor([[*PROMPT, *tokens]]))[0][0, -1].log_softmax(-1).tolist()
            longer += [((*tokens, token), total + log_p[token]) for token in range(VOCABULARY)]
        beams = sorted(longer, key=lambda beam: -beam[1])[:3]
    found = beam_search(model, PROMPT, beams=3, max_tokens=6)
    assert [tuple(beam.tokens) for beam in found] == [tokens for tokens, _ in beams]


@every
def test_a_state_is_saved_loaded_and_gone_on_from(name, tmp_path):
    model = make(name)
    first = generate(model, PROMPT, **GREEDY)
    text = [*PROMPT, *first]
    first.read_all().save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors", config_hash=model.config_hash)
    expected = list(generate(model, [5, 6], state=first.state, **GREEDY))
    assert list(generate(model, [5, 6], state=loaded, **GREEDY)) == expected
    if not name.endswith("refill"):
        assert expected == list(generate(model, [*text, 5, 6], **GREEDY))


@every
def test_a_saved_state_goes_on_through_transformers(name, tmp_path):
    model = make(name)
    wrapped = SubquadForCausalLM(SubquadConfig.from_decoder(model.config)).double().eval()
    wrapped.model.load_state_dict(model.state_dict())
    cache, prompt = SubquadCache(), torch.tensor([PROMPT])
    with torch.no_grad():
        wrapped(prompt[:, :8], past_key_values=cache)
        cache.state.save(tmp_path / "state.safetensors")
        loaded = SubquadCache()
        loaded.update_state(State.load(tmp_path / "state.safetensors", config_hash=model.config_hash), 8)
        expected = wrapped(prompt[:, 8:], past_key_values=cache).logits
        assert_exact(wrapped(prompt[:, 8:], past_key_values=loaded).logits, expected)


@every
def test_prompts_of_any_lengths_share_a_batch(name):
    model, prompts = make(name), [numbers(tokens, tokens) for tokens in (1, 5, 11, 2, 30, 7)]
    alone = [list(generate(model, prompt, **GREEDY)) for prompt in prompts]
    together = generate_batch(model, prompts, SamplingConfig(**GREEDY), slots=4, max_context=64)
    assert [request.tokens for request in together] == alone


@every
@pytest.mark.parametrize("delay", [1, 3])
def test_prompts_join_and_leave_at_different_times(name, delay):
    model = make(name)
    asked = [(numbers(tokens, tokens), 3 + 2 * i) for i, tokens in enumerate((1, 12, 5, 2))]
    decoder, running = BatchDecoder(model, slots=2, max_context=64), []
    for prompt, tokens in asked:
        running.append(decoder.add(prompt, SamplingConfig(max_tokens=tokens, temperature=0), keep_state=True))
        for _ in range(delay):
            decoder.step()
    decoder.run()
    for request, (prompt, tokens) in zip(running, asked, strict=True):
        alone = list(generate(model, prompt, max_tokens=tokens + 4, temperature=0))
        assert request.tokens == alone[:tokens]
        more = generate(model, request.tokens[-1:], state=request.state, max_tokens=4, temperature=0)
        assert list(more) == alone[tokens:]


@every
def test_a_sequence_that_left_a_batch_goes_on_alone_and_in_another(name):
    model = make(name)
    whole = list(generate(model, PROMPT, max_tokens=14, temperature=0))
    decoder = BatchDecoder(model, slots=2, max_context=64, prefill_chunk=3)
    others = [decoder.add(numbers(tokens), SamplingConfig(**GREEDY)) for tokens in (3, 20)]
    request = decoder.add(PROMPT, SamplingConfig(**GREEDY), keep_state=True)
    decoder.run()
    assert all(other.finished == "length" and other.state is None for other in others)
    assert request.tokens == whole[:9]
    assert request.state.seen == len(PROMPT) + 8
    if not isinstance(model, PerceiverAR):
        with torch.no_grad():
            usual = model.hidden(torch.tensor([[*PROMPT, *whole[:8]]]))[1]
        kept = ("first_keys", "first_values", "global_keys", "global_values")  # until no later token needs them
        assert sizes(request.state, kept) == sizes(usual, kept)
    rest = {"max_tokens": 5, "temperature": 0.0}
    assert list(generate(model, request.tokens[-1:], state=request.state, **rest)) == whole[9:]
    again = decoder.add(request.tokens[-1:], SamplingConfig(**rest), state=request.state)
    decoder.run()
    assert again.tokens == whole[9:]


@every
def test_left_padding_changes_nothing(name):
    model = make(name)
    if isinstance(model, PerceiverAR):
        model.set_decode("exact", None)
    padded = torch.tensor([[0] * 7 + PROMPT, numbers(18, 1)])
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[0, :7] = False
    with torch.no_grad():
        logits, state = model(padded, None, mask)
        tokens = [int(logits[0, -1].argmax())]
        while len(tokens) < 9:
            logits, state = model(torch.tensor([[tokens[-1]], [1]]), state)
            tokens.append(int(logits[0, -1].argmax()))
    assert tokens == list(generate(model, PROMPT, **GREEDY))
