"""Continuous batching: joining, leaving, limits, and independence of what else runs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from subquad.generation import BatchDecoder, SamplingConfig, generate, generate_batch
from subquad.models import Decoder
from tests.generation.models import MECHANISMS, SMALL, VOCABULARY, config_of, make, numbers

GREEDY = SamplingConfig(max_tokens=6, temperature=0)


def single(name):
    """A model in float32, whose kernels may round rows differently."""
    torch.manual_seed(1)
    return Decoder(config_of(name)).eval()


def requests(count, seed=0, longest=40):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count, 2), generator=random).tolist()
    return [(numbers(prompt, i), tokens) for i, (prompt, tokens) in enumerate(lengths)]


@pytest.mark.parametrize("name", ["latte", "llp", "linear", "elita", "window", "full"])
def test_with_others_in_the_batch_each_gets_what_it_gets_alone_in_it(name):
    model, asked = single(name), requests(20, longest=16)
    together = BatchDecoder(model, slots=16, max_context=80, prefill_chunk=7)
    running = [together.add(prompt, SamplingConfig(max_tokens=n, temperature=0)) for prompt, n in asked]
    together.run()
    empty = BatchDecoder(model, slots=16, max_context=80, prefill_chunk=7)
    for request, (prompt, n) in zip(running, asked, strict=True):
        alone = empty.add(prompt, SamplingConfig(max_tokens=n, temperature=0))
        empty.run()
        assert request.tokens == alone.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_two_hundred_requests_through_sixteen_slots(name):
    model, asked = single(name), requests(200, 1)
    together = BatchDecoder(model, slots=16, max_context=80)
    running = [together.add(prompt, SamplingConfig(max_tokens=n, temperature=0)) for prompt, n in asked]
    together.run()
    empty = BatchDecoder(model, slots=16, max_context=80)
    for request, (prompt, n) in zip(running, asked, strict=True):
        alone = empty.add(prompt, SamplingConfig(max_tokens=n, temperature=0))
        empty.run()
        assert request.tokens == alone.tokens


def test_samples_have_random_numbers_of_their_own():
    model, prompt = make("latte"), numbers(5)
    drawn = {"max_tokens": 12, "temperature": 2.0}
    alone = [list(generate(model, prompt, **drawn, seed=seed)) for seed in (3, 4, 5)]
    found = generate_batch(model, [prompt], SamplingConfig(**drawn, seed=3), samples=3, slots=2)
    assert [request.tokens for request in found] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    unseeded = generate_batch(model, [prompt], SamplingConfig(**drawn), samples=3)
    assert len({tuple(request.tokens) for request in unseeded}) == 3


def test_a_penalty_and_a_stop_token_are_those_of_one_sequence():
    model, prompt = make("llp"), numbers(9)
    held_back = {"max_tokens": 12, "temperature": 0.0, "repetition_penalty": 1.5}
    alone = list(generate(model, prompt, **held_back))
    stop = alone[4]
    decoder = BatchDecoder(model, slots=2)
    free = decoder.add(prompt, SamplingConfig(**held_back))
    stopped = decoder.add(prompt, SamplingConfig(**held_back), stop_tokens=[stop])
    decoder.run()
    assert free.tokens == alone
    assert free.finished == "length"
    assert stopped.tokens == alone[: alone.index(stop) + 1]
    assert stopped.finished == "stop"


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
    decoder = BatchDecoder(model, slots=1)
    first, second, third = (decoder.add(numbers(n, n), GREEDY) for n in (5, 6, 7))
    decoder.step()
    decoder.cancel(first)
    decoder.cancel(first)
    decoder.cancel(second)
    decoder.run()
    assert (first.finished, len(first.tokens)) == ("cancelled", 1)
    assert (second.finished, second.tokens) == ("cancelled", [])
    assert third.tokens == list(generate(model, numbers(7, 7), max_tokens=6, temperature=0))


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_state_of_a_batch_never_changes_its_shapes(name):
    decoder = BatchDecoder(make(name), slots=3, max_context=40)
    before = decoder.state_bytes
    found = []
    for tokens in (1, 4, 20):
        request = decoder.add(numbers(tokens), SamplingConfig(max_tokens=20, temperature=0))
        decoder.step()
        found.append(request.state_bytes)
    decoder.run()
    assert decoder.state_bytes == before > 0
    assert found == [before // 3] * 3
    assert request.state_bytes == before // 3


@pytest.mark.parametrize("name", ["llp", "full", "window 32"])
def test_a_compiled_step_is_compiled_once_and_gives_the_same_tokens(name):
    """A cache of 31 keys drops one a token without a copy, so that its strides are others than those of a new row."""
    config = config_of(name.partition(" ")[0])
    if name == "window 32":
        config = config.replace(options={"window": {"width": 32}})
    torch.manual_seed(1)
    model, asked = Decoder(config).double().eval(), requests(6)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    decoder = BatchDecoder(model, slots=4, max_context=80)
    decoder._slots._advance = torch.compile(
        decoder._slots.compact_forward, dynamic=False, fullgraph=True, backend=counter
    )
    running = [decoder.add(prompt, SamplingConfig(max_tokens=n, temperature=0)) for prompt, n in asked]
    decoder.run()
    assert counter.frame_count == 1
    for request, (prompt, n) in zip(running, asked, strict=True):
        assert request.tokens == list(generate(model, prompt, max_tokens=n, temperature=0))


def test_one_bad_row_ends_alone():
    model = make("linear")
    decoder = BatchDecoder(model, slots=2)
    good = decoder.add(numbers(4), GREEDY)
    with torch.no_grad():
        model.embedding.tokens.weight[VOCABULARY - 1] = float("nan")
        model.head = torch.nn.Linear(16, VOCABULARY, bias=False).double()
    bad = decoder.add([VOCABULARY - 1], GREEDY)
    decoder.run()
    assert bad.finished == "error"
    assert "the model's logits must be finite" in str(bad.error)
    assert (good.finished, len(good.tokens)) == ("length", 6)


def test_a_prompt_that_cannot_be_read_ends_alone(monkeypatch):
    model = make("linear")
    decoder = BatchDecoder(model, slots=2)
    bad, good = decoder.add(numbers(4), GREEDY), decoder.add([1], GREEDY)

    def broken(*_):
        raise ValueError("it broke")

    monkeypatch.setattr(model, "hidden", broken)
    decoder._read_prompts()
    assert (bad.finished, str(bad.error)) == ("error", "it broke")
    assert decoder.running == 1
    monkeypatch.undo()
    decoder.run()
    assert good.finished == "length"


def test_memory_that_is_missing_for_one_prompt_ends_it_alone(monkeypatch):
    model = make("linear")
    decoder = BatchDecoder(model, slots=2)
    bad, good = decoder.add(numbers(4), GREEDY), decoder.add([1], GREEDY)

    def too_large(*_):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "hidden", too_large)
        decoder._read_prompts()
    decoder.run()
    assert (bad.finished, str(bad.error)) == ("error", "no memory")
    assert good.finished == "length"


def test_no_tokens_asked_for_end_at_once():
    decoder = BatchDecoder(make("latte"), slots=1)
    state = generate(make("latte"), [1, 2], max_tokens=0).read_all()
    request = decoder.add([1], SamplingConfig(max_tokens=0), state=state)
    assert (request.finished, request.tokens, request.state) == ("length", [], None)
    with pytest.raises(
        ValueError, match=r"keep_state needs a token to generate, got max_tokens=0; Generation\.read_all"
    ):
        decoder.add([1], SamplingConfig(max_tokens=0), keep_state=True)


def test_a_request_is_cancelled_where_it_was_added():
    one, other = (BatchDecoder(make("latte"), slots=1) for _ in range(2))
    request = one.add([1], GREEDY)
    with pytest.raises(ValueError, match="the request is one of another decoder; cancel it there"):
        other.cancel(request)
    one.run()
    assert request.finished == "length"


def test_the_state_of_another_mode_is_refused():
    model = make("perceiver_ar self exact")
    state = generate(model, numbers(9), max_tokens=0).read_all()
    model.set_decode("refill", None)
    decoder = BatchDecoder(model, slots=1)
    with pytest.raises(ValueError, match="the state was made with decode=exact and the model has decode=refill"):
        decoder.add([1], GREEDY, state=state)
    assert decoder.waiting == 0


def test_idle_slots_run_into_no_limit():
    model = make("learned")
    decoder = BatchDecoder(model, slots=2)
    for _ in range(3):
        request = decoder.add([1], SamplingConfig(max_tokens=60, temperature=0))
        decoder.run()
    assert request.tokens == list(generate(model, [1], max_tokens=60, temperature=0))


def test_the_model_keeps_its_mode():
    model = make("latte").train()
    decoder = BatchDecoder(model, slots=1)
    request = decoder.add([1, 2], GREEDY)
    decoder.run()
    assert model.training
    assert len(request.tokens) == 6


@pytest.mark.parametrize(("name", "arguments", "match"), [
    ("latte", {"slots": 0}, "slots must be at least 1, got 0"),
    ("latte", {"max_context": 0}, "max_context must be at least 1, got 0"),
    ("latte", {"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
    ("perceiver_ar self exact", {"compile": True}, "compile=True needs states of fixed shape, which perceiver_ar"),
])  # fmt: skip
def test_bad_arguments_are_refused(name, arguments, match):
    with pytest.raises(ValueError, match=match):
        BatchDecoder(make(name), **arguments)


@pytest.mark.parametrize(("name", "tokens", "match"), [
    ("full", 35, r"may have 40 tokens \(max_context\) and this one asks for 41: 35 of the prompt and max_tokens=6"),
    ("hybrid", 35, r"may have 40 tokens \(max_context\) and this one asks for 41"),
    ("learned", 60, r"may have 65 tokens \(max_positions=64 of the model, .*\) and this one asks for 66"),
    ("latte", 0, "the prompt must hold at least one token"),
])  # fmt: skip
def test_sequences_that_do_not_fit_are_refused(name, tokens, match):
    decoder = BatchDecoder(make(name), slots=2, max_context=40)
    with pytest.raises(ValueError, match=match):
        decoder.add(numbers(tokens), GREEDY)
    if tokens:
        decoder.add(numbers(tokens - 1), GREEDY)
        decoder.run()


def test_what_was_read_before_counts():
    model = make("full")
    first = generate(model, numbers(30), max_tokens=1, temperature=0)
    list(first)
    decoder = BatchDecoder(model, slots=2, max_context=40)
    with pytest.raises(ValueError, match="asks for 41: 30 tokens before, 5 of the prompt and max_tokens=6"):
        decoder.add(numbers(5), GREEDY, state=first.state)
    with pytest.raises(ValueError, match="the state was made by configuration"):
        BatchDecoder(make("latte"), slots=1).add([1], GREEDY, state=first.state)


def test_frozen_latents_are_counted_before_they_are_used():
    options = {"latents": 5, "history": "cross", "decode": "frozen"}
    config = config_of("perceiver_ar cross exact").replace(options={"perceiver_ar": options})
    from subquad.models.build import build_model

    model = build_model(config).double().eval()
    most = model.most_new_tokens(9)
    decoder = BatchDecoder(model, slots=2)
    with pytest.raises(ValueError, match=f"decode=frozen has latents for {most} tokens after these 9 of the prompt"):
        decoder.add(numbers(9), GREEDY.replace(max_tokens=most + 1))
    first = decoder.add(numbers(9), GREEDY.replace(max_tokens=1), keep_state=True)
    decoder.run()
    with pytest.raises(ValueError, match=f"has latents for {most - 1} tokens after these 1 of the prompt"):
        decoder.add(first.tokens, GREEDY.replace(max_tokens=most), state=first.state)
    rest = decoder.add(first.tokens, GREEDY.replace(max_tokens=most - 1), state=first.state)
    decoder.run()
    assert first.tokens + rest.tokens == list(generate(model, numbers(9), max_tokens=most, temperature=0))


def test_samples_below_one_are_refused():
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        generate_batch(make("latte"), [[1]], samples=0)


def test_the_small_options_are_of_mechanisms_that_exist():
    assert set(SMALL) <= set(MECHANISMS)
