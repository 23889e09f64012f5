"""Continuous batching: joining, leaving, limits; test_states.py tests that each sequence is decoded as if alone."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from subquad.generation import BatchDecoder, Generation, SamplingConfig, generate, generate_batch
from subquad.models import Decoder
from subquad.models.build import build_model
from tests.generation.models import MECHANISMS, VOCABULARY, config_of, make, numbers
from tests.training.helpers import raising

GREEDY = SamplingConfig(max_tokens=6, temperature=0)
slow = pytest.mark.slow


def requests(count, seed=0, longest=40):
    """`count` pairs of a prompt and the tokens to generate after it."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count, 2), generator=random).tolist()
    return [(numbers(prompt, i), GREEDY.replace(max_tokens=tokens)) for i, (prompt, tokens) in enumerate(lengths)]


def alone(model, prompt, sampling=GREEDY):
    return list(Generation(model, prompt, sampling))


def state_of(model, tokens):
    return generate(model, tokens, max_new_tokens=0).read_all()


@pytest.mark.parametrize(("name", "slots", "count", "longest"), [
    *((name, 4, 5, 8) for name in ("latte", "full")),
    *(pytest.param(name, 16, 200, 40, marks=slow) for name in MECHANISMS),
])  # fmt: skip
def test_in_float32_the_other_slots_change_no_token(name, slots, count, longest):
    torch.manual_seed(1)
    model, asked = Decoder(config_of(name)).eval(), requests(count, 1, longest)
    together, empty = (BatchDecoder(model, slots=slots, max_context=80, prefill_chunk=7) for _ in range(2))
    running = [together.add(*request) for request in asked]
    together.run()
    for request, (prompt, sampling) in zip(running, asked, strict=True):
        found = empty.add(prompt, sampling)
        empty.run()
        assert request.tokens == found.tokens


def test_samples_have_their_own_random_numbers():
    model, prompts = make("latte"), [numbers(5), numbers(2)]
    drawn = {"temperature": 2.0}
    expected = [
        list(generate(model, prompt, max_new_tokens=12, **drawn, seed=seed)) for prompt in prompts for seed in (3, 4, 5)
    ]
    found = generate_batch(model, prompts, SamplingConfig(max_tokens=12, **drawn, seed=3), samples=3, slots=2)
    assert [request.tokens for request in found] == expected
    assert len({tuple(tokens) for tokens in expected}) == 6
    unseeded = [
        request.tokens
        for request in generate_batch(model, prompts[:1], SamplingConfig(max_tokens=12, **drawn), samples=3)
    ]
    unseeded += [list(generate(model, prompts[0], max_new_tokens=12, **drawn)) for _ in range(2)]
    assert len({tuple(tokens) for tokens in unseeded}) == 5


def test_samples_of_one_prompt_together_are_those_of_each_alone():
    model, prompt, drawn = make("llp"), numbers(9), {"temperature": 2.0, "repetition_penalty": 1.2}
    free = [list(generate(model, prompt, max_new_tokens=12, **drawn, seed=seed)) for seed in range(4)]
    stops = {free[0][2], free[1][5], free[2][8]}  # rows leave the batch one after another
    reading = generate(model, prompt)
    reading.prefill()
    decoder = BatchDecoder(model, slots=4)
    found = [
        decoder.add(
            prompt[-1:],
            SamplingConfig(max_tokens=12, **drawn, seed=seed),
            stop_tokens=stops,
            state=reading.state,
            before=prompt[:-1],
        )
        for seed in range(4)
    ]
    decoder.run()
    for request, tokens in zip(found, free, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        assert request.tokens == tokens[:end]
        assert request.finished == ("stop" if tokens[end - 1] in stops else "length")
    assert len({len(request.tokens) for request in found}) > 2


def test_each_sequence_has_its_own_penalty_and_stop_token():
    model, prompt = make("llp"), numbers(9)
    held_back = SamplingConfig(max_tokens=12, temperature=0.0, repetition_penalty=1.5)
    expected = list(Generation(model, prompt, held_back))
    stop, decoder = expected[4], BatchDecoder(model, slots=2)
    free, stopped = decoder.add(prompt, held_back), decoder.add(prompt, held_back, stop_tokens=[stop])
    decoder.run()
    assert (free.tokens, free.finished) == (expected, "length")
    assert (stopped.tokens, stopped.finished) == (expected[: expected.index(stop) + 1], "stop")


def test_requests_wait_join_and_leave():
    decoder = BatchDecoder(make("latte"), slots=2, prefill_chunk=4)
    first, second, third = (decoder.add(numbers(n), GREEDY) for n in (1, 9, 1))
    assert (decoder.waiting, decoder.running, decoder.free) == (3, 0, 2)
    # the second prompt has 8 tokens to read before its last one: half of them in each of two steps
    assert [request for request, _ in decoder.step()] == [first]
    assert (decoder.waiting, decoder.running, decoder.free) == (2, 1, 1)
    assert [request for request, _ in decoder.step()] == [first, second]
    assert (decoder.waiting, decoder.running, decoder.free) == (1, 2, 0)
    decoder.run()
    assert (decoder.waiting, decoder.running, decoder.free) == (0, 0, 2)
    assert all(len(request.tokens) == 6 and request.finished == "length" for request in (first, second, third))
    assert decoder.step() == []


def test_a_cancelled_request_leaves_its_slot_to_the_next():
    model = make("llp")
    decoder, other = BatchDecoder(model, slots=1), BatchDecoder(model, slots=1)
    first, second, third = (decoder.add(numbers(n, n), GREEDY) for n in (5, 6, 7))
    with pytest.raises(ValueError, match="the request belongs to another decoder; cancel it there"):
        other.cancel(first)
    decoder.step()
    decoder.cancel(first)
    decoder.cancel(first)
    decoder.cancel(second)
    decoder.run()
    assert (first.finished, len(first.tokens)) == ("cancelled", 1)
    assert (second.finished, second.tokens) == ("cancelled", [])
    assert third.tokens == alone(model, numbers(7, 7))
    assert decoder._batch_state.state_of(0).seen == 0, "nothing of a sequence is left"


@pytest.mark.parametrize("name", ["window 32", pytest.param("llp", marks=slow), pytest.param("full", marks=slow)])
def test_a_step_is_compiled_once_and_gives_the_same_tokens(name, monkeypatch):
    """A cache of 31 keys drops one key a token without a copy, so its strides differ from those of a new row."""
    config = config_of(name.partition(" ")[0]).replace(num_layers=1)
    if name == "window 32":
        config = config.replace(options={"window": {"width": 32}})
    torch.manual_seed(1)
    model, asked = Decoder(config).double().eval(), requests(3)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    decoder = BatchDecoder(model, slots=2, max_context=80, compile=True)
    running = [decoder.add(*request) for request in asked]
    decoder.run()
    assert counter.frame_count == 1
    for request, (prompt, sampling) in zip(running, asked, strict=True):
        assert request.tokens == alone(model, prompt, sampling)


def test_a_row_with_damaged_logits_ends_alone():
    model = make("linear")
    decoder = BatchDecoder(model, slots=2)
    good = decoder.add(numbers(4), GREEDY)
    with torch.no_grad():
        model.embedding.tokens.weight[VOCABULARY - 1] = float("nan")
        model.head = torch.nn.Linear(16, VOCABULARY, bias=False).double()
    bad = decoder.add([VOCABULARY - 1], GREEDY)
    decoder.run()
    assert "the model's logits must be finite" in str(bad.error)
    assert (bad.finished, good.finished, len(good.tokens)) == ("error", "length", 6)


@pytest.mark.parametrize("error", [ValueError("it broke"), torch.OutOfMemoryError("no memory")])
def test_a_prompt_that_cannot_be_read_ends_alone(monkeypatch, error):
    model = make("linear")
    decoder = BatchDecoder(model, slots=2)
    bad, good = decoder.add(numbers(4), GREEDY), decoder.add([1], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(model, "hidden", raising(error))
        decoder._read_prompts()
    assert (bad.finished, bad.error, decoder.running) == ("error", error, 1)
    decoder.run()
    assert good.finished == "length"


def test_a_request_for_no_tokens_ends_at_once():
    decoder = BatchDecoder(make("latte"), slots=1)
    state = state_of(make("latte"), [1, 2])
    request = decoder.add([1], SamplingConfig(max_tokens=0), state=state)
    assert (request.finished, request.tokens, request.state) == ("length", [], None)


def test_empty_slots_reach_no_limit_of_positions():
    model, sampling = make("learned"), GREEDY.replace(max_tokens=40)
    decoder = BatchDecoder(model, slots=2)
    for _ in range(2):
        request = decoder.add([1], sampling)
        decoder.run()
    assert request.tokens == alone(model, [1], sampling)


@pytest.mark.parametrize(("call", "match"), [
    *((lambda name=name: BatchDecoder(make("latte"), **{name: 0}), f"{name} must be at least 1, got 0")
      for name in ("slots", "max_context", "prefill_chunk")),
    (lambda: BatchDecoder(make("perceiver_ar self exact"), compile=True),
     "compile=True needs states of static shape, which perceiver_ar"),
    (lambda: generate_batch(make("latte"), [[1]], samples=0), "samples must be at least 1, got 0"),
    (lambda: BatchDecoder(make("latte")).add([], GREEDY), "the prompt must hold at least one token"),
    (lambda: BatchDecoder(make("latte")).add([1], GREEDY, state=state_of(make("full"), [1, 2])),
     "the state was made by configuration"),
    (lambda: BatchDecoder(make("latte")).add([1], SamplingConfig(max_tokens=0), keep_state=True),
     r"keep_state needs a token to generate, got max_tokens=0; Generation"),
])  # fmt: skip
def test_bad_arguments_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(("name", "before", "tokens", "match"), [
    ("full", 0, 35, r"may have 40 tokens \(max_context\), but this one asks for 41: 35 of the prompt and max_tokens=6"),
    ("full", 30, 5, "asks for 41: 30 tokens before, 5 of the prompt and max_tokens=6"),
    ("hybrid", 0, 35, r"may have 40 tokens \(max_context\), but this one asks for 41"),
    ("learned", 0, 60, r"may have 65 tokens \(max_positions=64 of the model, .*\), but this one asks for 66"),
])  # fmt: skip
def test_sequences_that_do_not_fit_are_refused(name, before, tokens, match):
    model = make(name)
    state = state_of(model, numbers(before)) if before else None
    decoder = BatchDecoder(model, slots=2, max_context=40)
    with pytest.raises(ValueError, match=match):
        decoder.add(numbers(tokens), GREEDY, state=state)
    decoder.add(numbers(tokens - 1), GREEDY, state=state)
    decoder.run()


def test_frozen_latents_are_counted_before_they_are_used():
    options = {"latents": 5, "history": "cross", "decode": "frozen"}
    config = config_of("perceiver_ar cross exact").replace(options={"perceiver_ar": options})
    model = build_model(config).double().eval()
    most = model.most_new_tokens(9)
    decoder = BatchDecoder(model, slots=2)
    with pytest.raises(ValueError, match=f"decode=frozen has latents for {most} tokens after a prompt of 9, got max_t"):
        decoder.add(numbers(9), GREEDY.replace(max_tokens=most + 1))
    first = decoder.add(numbers(9), GREEDY.replace(max_tokens=1), keep_state=True)
    decoder.run()
    with pytest.raises(ValueError, match=f"has latents for {most - 1} tokens after a prompt of 1, got"):
        decoder.add(first.tokens, GREEDY.replace(max_tokens=most), state=first.state)
    rest = decoder.add(first.tokens, GREEDY.replace(max_tokens=most - 1), state=first.state)
    decoder.run()
    assert first.tokens + rest.tokens == list(generate(model, numbers(9), max_new_tokens=most, temperature=0))
