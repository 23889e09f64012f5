"""A recorded step gives the model's logits, in a state whose keys are in a static cache."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from subquad.attention import build
from subquad.attention.conversions import to_static_cache
from subquad.generation import generate, replayed
from subquad.generation.batch_state import StaticBatchState
from subquad.generation.recorded import Recorded, joined
from subquad.generation.replayed import Replayed
from subquad.generation.static_step import log_not_recorded
from subquad.models.precision import set_precision
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from tests.generation.models import MECHANISMS, make, numbers, with_models


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


NAMED = ("loops", "hybrid", "sinks", "gated", "post", "diagonal")


@with_models(("linear", "full", "loops", "sinks", "gated", "post", "diagonal"), (*MECHANISMS, *NAMED))
def test_a_recorded_step_has_the_models_logits(name):
    model = make(name)
    static, states = StaticBatchState(model, 2, 40), []
    with torch.no_grad():
        for slot, tokens in enumerate((3, 20)):
            states.append(model.hidden(torch.tensor([numbers(tokens)]))[1])
            static.insert(slot, states[-1])
        for token in range(8):
            before = joined(static._like, [x.clone() for x in static._tensors])
            expected_BV, _ = static._forward(torch.tensor([[token], [token + 1]]), static._active_B, before)
            logits_BV = static.step([token, token + 1])
            assert_exact(logits_BV, expected_BV)
            for slot, state in enumerate(states):
                out_11V, states[slot] = model(torch.tensor([[token + slot]]), state)
                assert_same_maths(logits_BV[slot], out_11V[0, 0])
        last_11 = torch.tensor([[1]])
        for slot, state in enumerate(states):
            assert_same_maths(model(last_11, static.state_of(slot))[0], model(last_11, state)[0])


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@with_models(("gated", "latte", "window"), MECHANISMS)
def test_recorded_steps_of_each_precision_are_those_called(name, dtype, quantize):
    model = make(name).float()
    set_precision(model, dtype, quantize)
    static, called = StaticBatchState(model, 2, 40), StaticBatchState(model, 2, 40, record=False)
    with torch.no_grad():
        for token in range(5):
            logits_BV = static.step([token, token + 1])
            assert logits_BV.isfinite().all()
            assert_exact(logits_BV, called.step([token, token + 1]))
    if name != "elita":  # beyond its horizon it warns, and reads the count for that
        assert isinstance(static._step.made[False], Replayed)


@pytest.mark.parametrize(("rows", "same", "calls"), [(1, True, 6), (1, False, 1), (2, True, 2), (9, True, 1)])
def test_a_matrix_is_read_in_tiles_before_one_row_is_multiplied(rows, same, calls, monkeypatch):
    """Three tiles of 16 outputs, each summed and multiplied; where a tile has other bits, the whole product.

    A few rows are multiplied the other way around, and copied.
    """
    monkeypatch.setattr(replayed, "READ_AHEAD", 1)
    monkeypatch.setattr(replayed, "TILE", 64 * 8)
    if not same:
        monkeypatch.setattr(torch, "equal", lambda x, y: False)
    x, w = random(rows, 8), random(40, 8)
    out = torch.zeros(rows, 40)
    made = replayed._multiplied(torch.ops.aten.mm.default, out, x, w.t())
    assert len(made) == calls
    out.zero_()
    for call in made:
        call()
    if calls == 2:
        assert_in_budget(out, x @ w.t(), x.double() @ w.double().t(), torch.float32)
    else:
        assert_exact(out, x @ w.t())


def test_a_step_of_few_rows_has_their_products(monkeypatch):
    monkeypatch.setattr(replayed, "READ_AHEAD", 1)
    model = make("window").float()
    steps = [StaticBatchState(model, 3, 1, record=record) for record in (True, False)]
    steps.append(StaticBatchState(make("window"), 3, 1, record=False))
    with torch.no_grad():
        for token in range(4):
            found, called, exact = (static.step([token, 1, 2]) for static in steps)
            assert_in_budget(found, called, exact, torch.float32)


def test_a_step_is_recorded_once_and_sees_changed_weights():
    model, token = make("linear"), torch.tensor([[2]])
    static = StaticBatchState(model, 1, 1)
    with torch.no_grad():
        static.step([1])
        before = static.step([2])
        model.embedding.tokens.weight.mul_(0.5)
        expected_BV, _ = static._forward(token, static._active_B, joined(static._like, static._tensors))
        after = static.step([2])
        assert_exact(after, expected_BV)
        assert not torch.equal(after, before)
        assert len(static._step.made) == 1
        weight = model.layers[0].attention.query.weight
        weight.data = weight + 1
        expected_BV, _ = static._forward(token, static._active_B, joined(static._like, static._tensors))
        assert_exact(static.step([2]), expected_BV)


@pytest.mark.parametrize("name", ["latte", "window"])
def test_steps_recorded_with_and_without_autocast_share_the_state(name):
    model = make(name).float()
    static, called = StaticBatchState(model, 1, 1), StaticBatchState(model, 1, 1, record=False)
    for token, half in enumerate((False, False, False, True, False, True, True, True, False)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            assert_exact(static.step([token]), called.step([token]))
    assert all(isinstance(step, Replayed) for step in static._step.made.values())


def test_equal_operations_become_one_unless_they_change_a_tensor_or_have_other_keywords():
    def step(tokens_B1, active_B, seen_B):
        once_B, again_B, third_B = seen_B + 1, seen_B + 2, seen_B + 1
        twice_B, thrice_B = torch.add(seen_B, seen_B, alpha=2), torch.add(seen_B, seen_B, alpha=3)
        again_B[:1].add_(10)
        again_B[:1].add_(10)
        return [torch.stack([once_B, again_B, twice_B, thrice_B, third_B], 1), once_B]

    tokens_B1, active_B, seen_B = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2), torch.tensor([3, 5])
    recorded = Recorded(step, [tokens_B1, active_B, seen_B])
    assert sum(call.function is torch.ops.aten.add.Tensor for call in recorded.calls) == 4
    replayed = Replayed(recorded, tokens_B1, active_B, [seen_B])
    for seen in (replayed.logits_BV, replayed(tokens_B1)):
        assert seen.tolist() == step(tokens_B1, active_B, seen_B - 1)[0].tolist()
    assert seen_B.tolist() == [5, 7]


def test_views_of_a_repeated_result_keep_its_memory():
    def step(tokens_B1, active_B, held_B):
        first_B, again_B = held_B + 1, held_B + 1
        view_1B = again_B[None]
        other_B = first_B.sin()
        return [other_B.expm1() + view_1B[0].expm1(), held_B * 2]

    tokens_B1, active_B, held_B = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2), torch.tensor([0.5, 0.25])
    expected_B, _ = step(tokens_B1, active_B, held_B)
    replayed = Replayed(Recorded(step, [tokens_B1, active_B, held_B]), tokens_B1, active_B, [held_B])
    assert_exact(replayed.logits_BV, expected_B)
    expected_B, _ = step(tokens_B1, active_B, held_B)
    assert_exact(replayed(tokens_B1), expected_B)


def test_a_roll_of_two_dimensions_is_right_although_all_recorded_values_were_equal():
    def step(tokens_B1, active_B, held_BB):
        return [held_BB.roll((1, 1), (0, 1)), held_BB + torch.arange(4).view(2, 2)]

    tokens_B1, active_B, held_BB = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2), torch.zeros(2, 2)
    recorded = Recorded(step, [tokens_B1, active_B, held_BB])
    replayed = Replayed(recorded, tokens_B1, active_B, [held_BB])
    assert replayed(tokens_B1).tolist() == [[3, 2], [1, 0]]


@pytest.mark.parametrize(("step", "why"), [
    (lambda x: x * x.sum().item(), "aten._local_scalar_dense.default reads values"),
    (lambda x: x * x.tolist()[0], "tolist reads values"),
    (lambda x: x * float(x.numpy()[0]), "numpy reads values"),
    (lambda x: x[x > 0], "the shape that aten.index.Tensor returns depends on values"),
    (lambda x: x.nonzero(), "the shape that aten.nonzero.default returns depends on values"),
    (lambda x: x.clone().t_(), "aten.t_.default changes the shape of a tensor"),
    (lambda x: x + TwoTensor(x, x), "a tensor is a TwoTensor"),
])  # fmt: skip
def test_steps_that_depend_on_values_are_not_recorded(step, why):
    assert why in (Recorded(lambda x: [step(x)], [torch.tensor([1.0, 2.0])]).refused or "")


@with_models(("latte", "full", "sinks"), ("latte", "llp", "full", "sinks"))
def test_a_step_in_place_keeps_the_memory_of_all_tensors(name):
    """Such a step can be captured in a CUDA graph."""
    model = make(name)
    usual, in_place = StaticBatchState(model, 2, 20), StaticBatchState(model, 2, 20)
    with torch.no_grad():
        places = [x.data_ptr() for x in in_place._tensors]
        for token in range(9):
            if token == 5:
                for static in (usual, in_place):
                    static.insert(1, model.hidden(torch.tensor([[3, 4]]))[1])
            tokens_21 = torch.tensor([[token], [token]])
            assert_exact(in_place.step_in_place(tokens_21), usual.step([token, token]))
        assert places == [x.data_ptr() for x in in_place._tensors]


@pytest.mark.parametrize(("name", "options"), [("window", {"width": 8}), ("llp", {"segment": 8}), ("full", {})])
def test_a_static_cache_has_the_reach_or_the_capacity(name, options):
    layer = build(name, dim=16, num_heads=2, **options)
    cache = to_static_cache(layer, layer(torch.randn(1, 5, 16))[1], 40)
    assert cache.tensor("near_ring_keys").shape[2] == (40 if name == "full" else 8)


@pytest.mark.parametrize("name", ["latte", "window"])
def test_recorded_steps_generate_the_same_text(name, caplog):
    model, prompt = make(name), numbers(9)
    settings = {"max_new_tokens": 20, "temperature": 0}
    log_not_recorded.cache_clear()
    with caplog.at_level("INFO", "subquad"):
        expected = list(generate(model, prompt, **settings))
        assert list(generate(model, prompt, **settings)) == expected
        assert caplog.text.count("are not recorded: 20 tokens are fewer than") == 1
        assert list(generate(model, prompt, record=False, **settings)) == expected
        assert "are not recorded: it is switched off" in caplog.text
        found = generate(model, prompt, record=True, **settings)
        tokens = [next(found) for _ in range(12)]
        assert "the decoding step is recorded" in caplog.text
    middle = found.state
    assert tokens + list(found) == expected
    assert list(generate(model, tokens[-1:], state=middle, max_new_tokens=8, temperature=0)) == expected[12:]
    assert found.read_all().seen == len(prompt) + 20
