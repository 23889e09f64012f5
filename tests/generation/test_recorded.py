"""A recorded step does what the model does, and a ring of keys holds what a cache holds."""

import sys

import pytest
import torch

from subquad.attention import build
from subquad.attention.conversions import to_ring
from subquad.generation import generate
from subquad.generation.recorded import joined, record
from subquad.generation.slots import FixedSlots
from subquad.state import State
from subquad.testing import assert_exact, assert_same_maths
from tests.generation.models import MECHANISMS, every, make, numbers

NAMED = ("loops", "hybrid", "sinks", "gated", "post", "diagonal")


@every(("linear", "full", "loops", "sinks", "gated", "post", "diagonal"), (*MECHANISMS, *NAMED))
def test_a_recorded_step_has_the_models_logits(name):
    model = make(name)
    fixed, states = FixedSlots(model, 2, 40), []
    with torch.no_grad():
        for slot, tokens in enumerate((3, 20)):
            states.append(model.hidden(torch.tensor([numbers(tokens)]))[1])
            fixed.insert(slot, states[-1])
        for token in range(8):
            before = joined(fixed._like, [x.clone() for x in fixed._tensors])
            expected_BV, _ = fixed._forward(torch.tensor([[token], [token + 1]]), fixed._active_B, before)
            logits_BV = fixed.step([token, token + 1])
            assert_exact(logits_BV, expected_BV)
            for slot, state in enumerate(states):
                out_11V, states[slot] = model(torch.tensor([[token + slot]]), state)
                assert_same_maths(logits_BV[slot], out_11V[0, 0])
        last_11 = torch.tensor([[1]])
        for slot, state in enumerate(states):
            assert_same_maths(model(last_11, fixed.take(slot))[0], model(last_11, state)[0])


def test_a_step_is_recorded_once_and_changed_weights_count():
    model, token = make("linear"), torch.tensor([[2]])
    fixed = FixedSlots(model, 1, 1)
    with torch.no_grad():
        fixed.step([1])
        before = fixed.step([2])
        model.embedding.tokens.weight.mul_(0.5)
        expected_BV, _ = fixed._forward(token, fixed._active_B, joined(fixed._like, fixed._tensors))
        after = fixed.step([2])
        assert_exact(after, expected_BV)
        assert not torch.equal(after, before)
        assert len(fixed._steps) == 1


def test_equal_operations_become_one_unless_they_change_a_tensor_or_have_other_keywords():
    def step(tokens_B1, active_B, state):
        seen_B = state.tensor("seen")
        once_B, again_B = seen_B + 1, seen_B + 2
        twice_B, thrice_B = torch.add(seen_B, seen_B, alpha=2), torch.add(seen_B, seen_B, alpha=3)
        again_B[:1].add_(10)
        again_B[:1].add_(10)
        return torch.stack([once_B, again_B, twice_B, thrice_B], 1), State({"seen": once_B}, "")

    tokens_B1, active_B = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    state = State({"seen": torch.tensor([3, 5])}, "")
    graph = record(step, tokens_B1, active_B, state)
    assert graph(tokens_B1, active_B, state.tensor("seen"))[0].tolist() == [[4, 25, 9, 12], [6, 7, 15, 20]]


@every(("latte", "full", "sinks"), ("latte", "llp", "full", "sinks"))
def test_a_step_in_place_keeps_every_tensor_where_it_was(name):
    """Such a step can be captured in a CUDA graph."""
    model = make(name)
    usual, in_place = FixedSlots(model, 2, 20), FixedSlots(model, 2, 20)
    with torch.no_grad():
        places = [x.data_ptr() for x in in_place._tensors]
        for token in range(9):
            if token == 5:
                for fixed in (usual, in_place):
                    fixed.insert(1, model.hidden(torch.tensor([[3, 4]]))[1])
            tokens_21 = torch.tensor([[token], [token]])
            assert_exact(in_place.step_in_place(tokens_21), usual.step([token, token]))
        assert places == [x.data_ptr() for x in in_place._tensors]


@pytest.mark.parametrize(("name", "options"), [("window", {"width": 8}), ("llp", {"segment": 8}), ("full", {})])
def test_a_ring_has_the_reach_or_the_capacity(name, options):
    layer = build(name, dim=16, num_heads=2, **options)
    ring = to_ring(layer, layer(torch.randn(1, 5, 16))[1], 40)
    assert ring.tensor("near_ring_keys").shape[2] == (40 if name == "full" else 8)


@pytest.mark.parametrize("name", ["latte", "window"])
def test_a_long_text_goes_on_in_recorded_steps_and_is_the_same(name, monkeypatch):
    model, prompt = make(name), numbers(9)
    settings = {"max_tokens": 20, "temperature": 0}
    expected = list(generate(model, prompt, **settings))
    monkeypatch.setattr(sys.modules["subquad.generation.generate"], "RECORD_AFTER", 5)
    found = generate(model, prompt, **settings)
    tokens = [next(found) for _ in range(12)]
    assert found._slots is not None
    middle = found.state
    assert tokens + list(found) == expected
    assert list(generate(model, tokens[-1:], state=middle, max_tokens=8, temperature=0)) == expected[12:]
    assert found.read_all().seen == len(prompt) + 20
