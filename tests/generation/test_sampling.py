"""One token from its logits."""

import pytest
import torch

from subquad.generation import SamplingConfig
from subquad.generation.sampling import Sampler
from subquad.testing import assert_same_maths

LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def draws(logits: torch.Tensor, n: int = 4000, **options) -> torch.Tensor:
    """Frequencies of `n` samples."""
    choose = Sampler(SamplingConfig(seed=0, **options), len(logits))
    return torch.bincount(torch.tensor([choose(logits) for _ in range(n)]), minlength=len(logits)) / n


@pytest.mark.parametrize(("options", "expected"), [
    ({}, [0.1, 0.4, 0.2, 0.3]),
    ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
    ({"temperature": 0.0}, [0, 1, 0, 0]),
    ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
    ({"top_k": 100}, [0.1, 0.4, 0.2, 0.3]),
    ({"top_p": 0.35}, [0, 1, 0, 0]),
    ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
    ({"top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
    ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
    ({"min_p": 0.0}, [0.1, 0.4, 0.2, 0.3]),
    ({"min_p": 0.45}, [0, 4 / 9, 2 / 9, 3 / 9]),
    ({"min_p": 1.0}, [0, 1, 0, 0]),
    ({"min_p": 0.45, "temperature": 0.5}, [0, 0.64, 0, 0.36]),
    ({"min_p": 0.2, "top_k": 3}, [0, 4 / 9, 2 / 9, 3 / 9]),
])  # fmt: skip
def test_frequencies_follow_the_cut_distribution(options, expected):
    frequencies = draws(LOGITS, **options)
    expected = torch.tensor(expected)
    assert ((frequencies > 0) == (expected > 0)).all()
    # five standard deviations of a frequency of 4,000 draws
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all()


def test_a_tiny_temperature_is_greedy_and_finite():
    assert draws(LOGITS * 1e4, n=20, temperature=1e-30)[1] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    with pytest.raises(ValueError, match="logits must be finite, got NaN or infinity; its weights may be damaged"):
        Sampler(SamplingConfig(temperature=temperature), 2)(torch.tensor([0.0, bad]))


def test_a_penalty_keeps_said_tokens_back_whatever_their_sign():
    logits = torch.tensor([3.0, 2.9, -1.0, -1.1])
    greedy = {"temperature": 0.0, "repetition_penalty": 1.2}
    assert Sampler(SamplingConfig(**greedy), 4, [2])(logits) == 0
    assert Sampler(SamplingConfig(**greedy), 4, [0])(logits) == 1
    # -1 becomes -1.2, below the other one; a division would have raised it
    assert Sampler(SamplingConfig(**greedy), 2, [0])(logits[2:]) == 1


def test_what_the_sampler_said_counts_too():
    choose = Sampler(SamplingConfig(temperature=0.0, repetition_penalty=2.0), 3)
    assert [choose(torch.tensor([4.0, 3.0, 2.5])) for _ in range(3)] == [0, 1, 2]


def test_a_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    from subquad.generation.sampling import penalised

    logits, said = torch.randn(50, dtype=torch.float64), torch.randint(50, (1, 9))
    mask = torch.zeros(50, dtype=torch.bool).scatter(0, said[0], True)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(said, logits[None].clone())[0]
    assert_same_maths(penalised(logits, mask, 1.7), theirs)


@pytest.mark.parametrize(("options", "match"), [
    ({"min_p": -0.1}, "min_p must be between 0 and 1, got -0.1"),
    ({"min_p": 1.1}, "min_p must be between 0 and 1, got 1.1"),
    ({"seed": 2**64}, r"seed must be at least -2\*\*63 and below 2\*\*64, got 18446744073709551616"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0 and finite, got 0.0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty must be above 0 and finite, got inf"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        SamplingConfig(**options)
