"""One sequence, token by token; test_states.py compares its tokens with full passes."""

from dataclasses import fields

import pytest
import torch

from subquad.generation import Generation, SamplingConfig, generate
from subquad.models.build import build_model
from tests.generation.models import config_of, make, numbers

PROMPT = numbers(11)
GREEDY = {"max_new_tokens": 12, "temperature": 0.0}


def test_a_stop_token_is_returned_and_ends_the_sequence():
    model = make("llp")
    free = list(generate(model, PROMPT, **GREEDY))
    assert list(generate(model, PROMPT, **GREEDY, stop_tokens=[free[4]])) == free[: free.index(free[4]) + 1]


def test_generate_passes_all_its_options_on(monkeypatch):
    monkeypatch.setitem(generate.__globals__, "SamplingConfig", dict)
    monkeypatch.setitem(generate.__globals__, "Generation", lambda *arguments, **others: (*arguments, others))
    options = {field.name: object() for field in fields(SamplingConfig)}
    others = {"state": object(), "stop_tokens": object(), "record": object(), "draft": object()}
    given = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in options.items()}
    assert generate("model", "prompt", **given, **others) == ("model", "prompt", options, others)


def test_mode_and_gradients_are_left_alone():
    model, found = make("llp").train(), []
    stream = generate(model, PROMPT, max_new_tokens=2, seed=0)
    list(stream)
    stream.state.map(lambda tensor: found.append(tensor.requires_grad) or tensor)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert set(found) == {False}


def test_exact_decoding_of_a_perceiver_takes_one_pass_a_token_and_none_for_the_prompt():
    model, passes = make("perceiver_ar self exact"), []
    model.norm.register_forward_hook(lambda *_: passes.append(1))
    generation = Generation(model, list(range(20)), SamplingConfig(max_tokens=2, prefill_chunk=3))
    generation.prefill()
    assert (passes, generation.state.seen) == ([], 19)
    list(generation)
    assert len(passes) == 2


def test_a_frozen_model_raises_after_most_new_tokens():
    options = {"perceiver_ar": {"latents": 5, "history": "self", "history_tokens": 6, "decode": "frozen"}}
    torch.manual_seed(0)
    model = build_model(config_of("perceiver_ar self exact").replace(options=options, init_std=0.5)).double().eval()
    most = model.most_new_tokens(9)
    generation = generate(model, range(9), temperature=0, max_new_tokens=most + 1)
    tokens = [next(generation) for _ in range(most)]
    logits, _ = model(torch.tensor([[*range(9), *tokens[:-1]]]))
    assert tokens == logits[0, -most:].argmax(-1).tolist()
    with pytest.raises(ValueError, match="decode='frozen' has used all 5 latents"):
        next(generation)


@pytest.mark.parametrize(("prompt", "error", "match"), [
    ([], ValueError, "the prompt must hold at least one token, got none"),
    ([1, 23], ValueError, "the prompt's tokens must be between 0 and 22, got 23"),
    ([-1], ValueError, "the prompt's tokens must be between 0 and 22, got -1"),
    ([1, 1.5], TypeError, r"the prompt's tokens must be whole numbers, got 1\.5"),
])  # fmt: skip
def test_bad_prompts_are_refused(prompt, error, match):
    with pytest.raises(error, match=match):
        generate(make("full"), prompt)
