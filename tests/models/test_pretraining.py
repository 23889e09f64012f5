"""Pretraining: which tokens are hidden, and what is predicted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from subquad.models import EncoderConfig
from subquad.models.pretraining import Hiding, PretrainingModel
from subquad.testing import assert_same_maths
from tests.models import small

VOCABULARY, MASK = 7, 7


def tiny(objective="denoise", name="full", **fields):
    torch.manual_seed(0)
    fields = {"vocab_size": VOCABULARY + (objective == "denoise"), "causal": objective == "causal"} | fields
    options = {"position": "learned", "max_positions": 12, "options": {"perceiver_io": {"latents": 4}}}
    config = EncoderConfig(**small.SHAPE | {"num_layers": 1, "attention": name} | options | fields)
    return PretrainingModel(config, objective).double().eval()


def some_tokens(tokens=11):
    return small.tokens(3, tokens) % VOCABULARY


def some_mask():
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[0, :5] = mask[1, 4:7] = False
    return mask


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
    offset=st.integers(0, 3),
)
def test_a_share_of_the_real_tokens_is_hidden(lengths, fraction, seed, offset):
    tokens = torch.randint(VOCABULARY, (len(lengths), 15), generator=drawn(seed))
    mask = torch.zeros(len(lengths), 15, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, offset : offset + length] = True
    shown, hidden = Hiding(fraction, 0.0)(tokens, mask, MASK, drawn(seed))
    assert not (hidden & ~mask).any()
    for row, length in enumerate(lengths):
        expected = min(length, max(1, torch.tensor(fraction * length).round().int().item()))
        assert hidden[row].sum().item() == expected
    assert torch.equal(shown, torch.where(hidden, MASK, tokens))


def test_every_token_is_equally_likely_to_be_hidden_and_some_become_random_ones_but_never_the_mask():
    _, hidden = Hiding(0.3, 0.0)(torch.zeros(4000, 10, dtype=torch.int64), None, MASK, drawn())
    assert hidden.sum() == 4000 * 3
    assert ((hidden.sum(0) - 1200).abs() < 200).all()  # 7 standard deviations of a binomial count
    tokens = torch.zeros(500, 20, dtype=torch.int64)
    shown, hidden = Hiding(0.5, 0.5)(tokens, None, MASK, drawn())
    replaced = shown[hidden] != MASK
    assert torch.equal(shown[~hidden], tokens[~hidden])
    assert 2250 < replaced.sum().item() < 2750  # half of 5,000: 7 standard deviations
    assert torch.equal(shown[hidden][replaced].unique(), torch.arange(VOCABULARY))


@pytest.mark.parametrize("name", ["full", "llp", "latte", "perceiver_io"])
def test_hidden_tokens_are_predicted_from_what_is_shown(name):
    model, tokens, mask, hiding = tiny(name=name), some_tokens(), some_mask(), Hiding(0.4, 0.3)
    shown, hidden = hiding(tokens, mask, MASK, drawn())
    logits = model.vectors(shown, mask) @ model.encoder.embedding.tokens.weight[:VOCABULARY].T
    assert_same_maths(model(shown, mask), logits)
    expected = F.cross_entropy(logits[hidden], tokens[hidden])
    assert_same_maths(model.loss(tokens, hiding, mask, generator=drawn()), expected)


def test_the_next_token_is_predicted_from_those_before():
    model, tokens, mask = tiny("causal"), some_tokens(), some_mask()
    losses = []
    for row in range(3):
        alone = tokens[row : row + 1, mask[row]]
        losses.append(F.cross_entropy(model(alone)[0, :-1], alone[0, 1:], reduction="none"))
    assert_same_maths(model.loss(tokens, Hiding(0.1, 0.0), mask), torch.cat(losses).mean())


def test_a_perceiver_answers_for_each_position_wherever_its_padding_stands():
    model, tokens, mask = tiny(name="perceiver_io"), some_tokens(), some_mask()
    vectors = model.vectors(tokens, mask)
    for row in range(3):
        assert_same_maths(vectors[row, mask[row]], model.vectors(tokens[row : row + 1, mask[row]])[0])
        assert not vectors[row, ~mask[row]].any()
    with pytest.raises(ValueError, match="there are queries for 12 tokens, got 13; raise max_positions"):
        model.vectors(some_tokens(13))


@pytest.mark.parametrize(("objective", "name"), [("denoise", "full"), ("denoise", "perceiver_io"), ("causal", "llp")])
def test_every_trainable_parameter_gets_a_gradient(objective, name):
    model = tiny(objective, name)
    model.loss(some_tokens(), Hiding(0.5, 0.0), some_mask()).backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key
    assert name != "perceiver_io" or not model.encoder.query.requires_grad


@pytest.mark.parametrize(("objective", "name", "message"), [
    ("denoise", "perceiver", "attention 'perceiver' keeps no vector for each token and cannot predict"),
    ("causal", "full", "only a causal encoder can predict the next token; set causal=true"),
])  # fmt: skip
def test_objectives_that_the_encoder_cannot_learn_are_refused(objective, name, message):
    with pytest.raises(ValueError, match=message):
        tiny(objective, name, causal=False)
