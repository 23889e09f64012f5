"""Sampling with a carried state against sampling that reads everything again."""

import pytest
import torch

from subquad import attention
from subquad.generation import generate
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import Decoder, DecoderConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def tiny(name: str, **options) -> DecoderConfig:
    position = "rope" if attention.mechanism(name).rotates else "sinusoidal"
    small = {
        "bigbird": {"block": 3, "num_global": 1, "num_random": 1},
        "dilated": {"width": 2, "dilation": 3},
        "latte_macchiato": {"width": 4},
        "llp": {"segment": 4},
        "llp_printed": {"segment": 4},
        "longformer": {"width": 4},
        "shifted": {"group": 4},
        "strided": {"stride": 4, "columns": 2},
        "window": {"width": 4},
    }
    own = {name: small[name]} if name in small else {}
    return DecoderConfig(
        vocab_size=17, dim=8, num_layers=2, num_heads=2, attention=name, options=own, position=position, **options
    )


@pytest.fixture(params=[name for name in attention.names() if "causal" in attention.mechanism(name).forms])
def model(request) -> Decoder:
    torch.manual_seed(1)
    decoder = Decoder(tiny(request.param)).double()
    with torch.no_grad():
        for p in decoder.parameters():
            p.add_(torch.randn_like(p) / 2)  # sharp and varied predictions
    return decoder


@torch.no_grad()
def uncached(model: Decoder, prompt: list[int], tokens: int) -> list[int]:
    """Greedy tokens, each from the whole sequence so far."""
    ids = list(prompt)
    for _ in range(tokens):
        logits_BTV, _ = model(torch.tensor([ids]))
        ids.append(int(logits_BTV[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 3, 4096])
def test_greedy_equals_reading_everything_again(model, chunk):
    tokens = list(generate(model, PROMPT, max_tokens=12, temperature=0, prefill_chunk=chunk))
    assert tokens == uncached(model, PROMPT, 12)


def test_greedy_equals_transformers(model):
    wrapped = SubquadForCausalLM(SubquadConfig.from_decoder(model.config)).double().eval()
    wrapped.model.load_state_dict(model.state_dict())
    prompt = torch.tensor([PROMPT])
    theirs = wrapped.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert list(generate(model, PROMPT, max_tokens=12, temperature=0)) == theirs[0, len(PROMPT) :].tolist()


def test_a_seed_repeats_a_sample_and_another_changes_it(model):
    one, again, other = (list(generate(model, PROMPT, max_tokens=30, temperature=2.0, seed=s)) for s in (5, 5, 6))
    assert one == again != other


def test_without_a_seed_samples_differ(model):
    assert len({tuple(generate(model, PROMPT, max_tokens=30, temperature=3.0)) for _ in range(3)}) > 1


def test_the_stop_token_is_returned_and_ends_the_sequence(model):
    free = list(generate(model, PROMPT, max_tokens=12, temperature=0))
    stop = free[4]
    assert (
        list(generate(model, PROMPT, max_tokens=12, temperature=0, stop_tokens=[stop])) == free[: free.index(stop) + 1]
    )


def test_a_kept_state_goes_on_where_it_stopped(model):
    whole = list(generate(model, PROMPT, max_tokens=12, temperature=0))
    first = generate(model, PROMPT, max_tokens=5, temperature=0)
    head = list(first)
    tail = list(generate(model, head[-1:], state=first.state, max_tokens=7, temperature=0))
    assert head + tail == whole


def test_prefill_reads_all_but_the_last_token(model):
    stream = generate(model, PROMPT, max_tokens=1, prefill_chunk=4)
    stream.prefill()
    assert stream.state.seen == len(PROMPT) - 1
    next(stream)
    assert stream.state.seen == len(PROMPT)


def test_the_state_of_a_constant_state_mechanism_does_not_grow(model):
    def nbytes(tokens: int) -> int:
        stream = generate(model, PROMPT, max_tokens=tokens, temperature=0)
        list(stream)
        return stream.state.nbytes

    grows = attention.mechanism(model.config.attention).state_grows
    assert (nbytes(60) > nbytes(20)) == grows


def test_all_may_be_read_for_another_text_to_go_on(model):
    first = generate(model, PROMPT, max_tokens=3, temperature=0)
    text = [*PROMPT, *first]
    state = first.read_all()
    assert state.seen == len(text)
    assert list(first) == []
    more = list(generate(model, [7, 8], state=state, max_tokens=6, temperature=0))
    assert more == list(generate(model, [*text, 7, 8], max_tokens=6, temperature=0))


def test_no_tokens_asked_for_is_no_tokens(model):
    assert list(generate(model, PROMPT, max_tokens=0)) == []


def test_mode_and_gradients_are_left_alone(model):
    model.train()
    stream = generate(model, PROMPT, max_tokens=2, seed=0)
    list(stream)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(t.requires_grad for t in tensors(stream.state))


def tensors(state) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    state.map(lambda tensor: found.append(tensor) or tensor)
    return found


@pytest.mark.parametrize(("options", "match"), [
    ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
    ({"temperature": -0.5}, "temperature must be at least 0 and finite, got -0.5"),
    ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
    ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        generate(Decoder(tiny("full")), PROMPT, **options)


def test_a_prompt_of_other_than_whole_numbers_is_refused():
    with pytest.raises(TypeError, match=r"the prompt's tokens must be whole numbers, got 1\.5"):
        generate(Decoder(tiny("full")), [1, 1.5])


@pytest.mark.parametrize(("prompt", "match"), [
    ([], "the prompt must hold at least one token, got none"),
    ([1, 17], "the prompt's tokens must be between 0 and 16, got 17"),
    ([-1], "the prompt's tokens must be between 0 and 16, got -1"),
])  # fmt: skip
def test_bad_prompts_are_refused(prompt, match):
    with pytest.raises(ValueError, match=match):
        generate(Decoder(tiny("full")), prompt)
