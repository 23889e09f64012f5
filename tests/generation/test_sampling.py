"""The choice of one token from its logits."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from subquad.generation import SamplingConfig
from subquad.generation.sampling import Sampler, penalised
from subquad.testing import assert_same_maths

LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()


def probabilities(monkeypatch, **options):
    """The probability of each token, by the weights from which the sampler draws."""
    found, weights = torch.zeros_like(LOGITS), []
    for place in range(len(LOGITS)):

        def draw(p, count, *, generator, place=place):
            weights.append(p / p.sum())
            return torch.tensor([min(place, len(p) - 1)])

        monkeypatch.setattr(torch, "multinomial", draw)
        token = Sampler(SamplingConfig(**options), len(LOGITS))(LOGITS)
        if place < len(weights[-1]):
            found[token] = weights[-1][place]
    return found


@pytest.mark.parametrize(("options", "expected"), [
    ({}, [0.1, 0.4, 0.2, 0.3]), ({"top_k": 100}, [0.1, 0.4, 0.2, 0.3]), ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
    ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]), ({"min_p": 0.0}, [0.1, 0.4, 0.2, 0.3]),
    ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]), ({"top_p": 0.35}, [0, 1, 0, 0]), ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
    ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]), ({"min_p": 0.45}, [0, 4 / 9, 2 / 9, 3 / 9]),
    ({"min_p": 1.0}, [0, 1, 0, 0]), ({"min_p": 0.45, "temperature": 0.5}, [0, 0.64, 0, 0.36]),
    ({"min_p": 0.2, "top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
])  # fmt: skip
def test_a_token_has_its_probability_in_the_cut_distribution(monkeypatch, options, expected):
    assert_same_maths(probabilities(monkeypatch, **options), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("temperature", "top_p", "expected"), [
    (0.5, 0.5, [0, 1, 0, 0]),  # 16/30 alone reaches a half, the plain 0.4 would not
    (2.0, 0.65, [0, 0.4**0.5, 0.2**0.5, 0.3**0.5]),  # the plain 0.4 and 0.3 alone would reach it
])  # fmt: skip
def test_the_nucleus_is_that_of_the_tempered_distribution(monkeypatch, temperature, top_p, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    found = probabilities(monkeypatch, temperature=temperature, top_p=top_p)
    assert_same_maths(found, expected / expected.sum())


def test_tokens_are_drawn_as_often_as_they_are_probable():
    choose, n = Sampler(SamplingConfig(seed=0), len(LOGITS)), 2000
    frequencies = torch.bincount(torch.tensor([choose(LOGITS) for _ in range(n)]), minlength=len(LOGITS)) / n
    expected = LOGITS.exp()
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt()).all()  # 5 standard deviations


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_the_likeliest_token_is_taken_at_temperature_zero_and_near_it(temperature):
    choose = Sampler(SamplingConfig(temperature=temperature), len(LOGITS))
    assert {choose(LOGITS * 1e4) for _ in range(20)} == {1}


@pytest.mark.parametrize(("bad", "temperature"), [(float("nan"), 0.0), (float("inf"), 0.0), (float("nan"), 1.0)])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    with pytest.raises(ValueError, match="logits must be finite, got NaN or infinity; its weights may be damaged"):
        Sampler(SamplingConfig(temperature=temperature), 2)(torch.tensor([0.0, bad]))


def test_a_penalty_counts_the_sampled_tokens_too():
    choose = Sampler(SamplingConfig(temperature=0.0, repetition_penalty=2.0), 3)
    assert [choose(torch.tensor([4.0, 3.0, 2.5])) for _ in range(3)] == [0, 1, 2]


def test_a_penalty_is_that_of_transformers():
    logits, said = torch.randn(50, dtype=torch.float64), torch.randint(50, (1, 9))
    mask = torch.zeros(50, dtype=torch.bool).scatter(0, said[0], True)
    theirs = RepetitionPenaltyLogitsProcessor(9.0)(said, logits[None].clone())[0]
    assert_same_maths(penalised(logits, mask, 9.0), theirs)
    choose = Sampler(SamplingConfig(temperature=0.0, repetition_penalty=9.0), 50, said[0].tolist())
    assert choose(logits) == theirs.argmax()


def test_presence_counts_once_frequency_each_time_and_bias_always():
    logits = torch.tensor([4.0, 3.0, 2.5])
    for options, expected in (
        ({"presence_penalty": 1.2}, [0, 1, 0, 0]),  # 4 3 2.5, 2.8 3 2.5, 2.8 1.8 2.5, as before
        ({"frequency_penalty": 0.6}, [0, 0, 1, 0, 2]),  # 4, 3.4, 2.8 < 3, 2.8 > 2.4, 2.2 2.4 2.5
        ({"logit_bias": {2: 1.6}}, [2, 2]),
        ({"logit_bias": {2: 1.6, 0: -100}, "presence_penalty": 1.2}, [2, 1, 2]),
    ):
        choose = Sampler(SamplingConfig(temperature=0.0, **options), 3, [0, 1, 2])
        assert [choose(logits) for _ in expected] == expected, options
        assert not choose.takes_the_likeliest


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_is_chosen_before_min_tokens(temperature):
    sampling = SamplingConfig(temperature=temperature, min_tokens=3, logit_bias={1: 100})
    choose = Sampler(sampling, len(LOGITS), stop_tokens=[1, 2, 77])
    found = [choose(LOGITS) for _ in range(5)]
    assert set(found[:3]) <= {0, 3}
    assert found[3:] == [1, 1]
    with pytest.raises(ValueError, match="min_tokens=3 needs a token that does not end the text; all do"):
        Sampler(sampling, 3, stop_tokens=range(3))


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="logit_bias has token 4; valid: 0 to 3"):
        Sampler(SamplingConfig(logit_bias={4: 1.0}), len(LOGITS))
    with pytest.raises(ValueError, match="logit_bias must be between -100 and 100, got nan for token 3"):
        SamplingConfig(logit_bias={3: float("nan")})


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("max_tokens", -1, "at least 0"), ("min_tokens", -1, "at least 0"), ("min_tokens", 257, "at most max_tokens=256"),
    ("presence_penalty", -3, "between -2 and 2"), ("frequency_penalty", float("nan"), "between -2 and 2"),
    ("top_k", 0, "at least 1"), ("prefill_chunk", 0, "at least 1"),
    ("temperature", -0.5, "at least 0 and finite"), ("temperature", float("nan"), "at least 0 and finite"),
    ("top_p", 0.0, "above 0 and at most 1"), ("top_p", 1.5, "above 0 and at most 1"),
    ("min_p", -0.1, "between 0 and 1"), ("min_p", 1.1, "between 0 and 1"),
    ("seed", 2**64, r"at least -2\*\*63 and below 2\*\*64"), ("repetition_penalty", 0.0, "above 0 and finite"),
    ("repetition_penalty", float("inf"), "above 0 and finite"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(name, value, rule):
    with pytest.raises(ValueError, match=f"{name} must be {rule}, got {value}"):
        SamplingConfig(**{name: value})
