"""What a model remembers is counted right: against greedy decoding, oracles and the other evaluator."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from subquad.evaluation import evaluate
from subquad.evaluation.probes import (
    by_depth,
    by_distance,
    by_place,
    check_reach,
    context_loss,
    mean_and_error,
    overall,
    right_answers,
)
from subquad.models import Decoder, DecoderConfig
from subquad.models.build import build_model
from subquad.testing import assert_same_maths
from tests.data.rows import copy, mqar, passkey


def make(*, seed: int = 0, **changes) -> Decoder:
    torch.manual_seed(seed)
    values = {"vocab_size": 24, "dim": 16, "num_layers": 1, "num_heads": 2, "attention": "full", "init_std": 0.2}
    return build_model(DecoderConfig(**values | changes)).double().eval()


class Oracle(nn.Module):
    """Knows the labels within `reach` tokens of their source; elsewhere, and where nothing is asked, says token 0."""

    most_tokens = predicts_last = None

    def __init__(self, rows, vocab_size: int, reach: int) -> None:
        super().__init__()
        self.config = DecoderConfig(vocab_size=vocab_size)
        self.place = nn.Parameter(torch.zeros(()))
        near = np.arange(rows.tokens.shape[1]) - rows.source <= reach
        self.answers_BT = torch.from_numpy(np.where(rows.asked & near, rows.labels, 0)).roll(-1, 1)
        self.done = 0

    def vectors(self, tokens_BT):
        answers_BT = self.answers_BT[self.done : self.done + len(tokens_BT), : tokens_BT.shape[1]]
        self.done += len(tokens_BT)
        return F.one_hot(answers_BT, self.config.vocab_size).float()

    def logits(self, h_ND):
        return h_ND


def same_number(left: float, right: float) -> None:
    assert_same_maths(torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64))


def test_answers_are_the_likeliest_tokens_at_the_places_before():
    rows, model = mqar(40, 6, pairs=4, symbols=12), make()
    right_BT = right_answers(model, rows, batch_size=4)
    with torch.no_grad():
        likeliest_BT = model(torch.from_numpy(rows.tokens))[0].argmax(-1).roll(1, 1).numpy()
    assert np.array_equal(right_BT, rows.asked & (likeliest_BT == rows.labels))
    assert right_BT[rows.asked].any() or likeliest_BT[rows.asked].any()


def test_the_mode_is_restored_and_dropout_is_off():
    rows, model = copy(31, 8, symbols=2), make(vocab_size=3, dropout=0.5).train()
    first, again = right_answers(model, rows), right_answers(model, rows)
    assert np.array_equal(first, again)
    assert model.training


def test_a_perceiver_answers_with_its_latents():
    model = make(attention="perceiver_ar", options={"perceiver_ar": {"latents": 6}})
    rows = passkey(30, 8, digits=6, symbols=12)
    with torch.no_grad():
        likeliest_BM = model(torch.from_numpy(rows.tokens[:, :-1]))[0].argmax(-1).numpy()
    assert np.array_equal(right_answers(model, rows)[:, -6:], likeliest_BM == rows.labels[:, -6:])
    match = "the last 6 of 30 tokens, but position 23 is asked for, which takes 7 latents"
    with pytest.raises(ValueError, match=match):
        right_answers(model, passkey(30, 8, digits=7, symbols=12))


@given(st.lists(st.integers(0, 1), min_size=2, max_size=40))
def test_the_error_of_one_answer_a_row_is_that_of_a_share(answers):
    right_B = np.array(answers, dtype=float)
    mean, error = mean_and_error(right_B, np.ones(len(answers)))
    same_number(mean, right_B.mean().item())
    same_number(error, math.sqrt(mean * (1 - mean) / len(answers)))


def test_answers_of_one_row_are_not_taken_for_independent():
    right_B = np.array([1.0, 0, 0, 1, 1])
    once, tenfold = mean_and_error(right_B, np.ones(5)), mean_and_error(10 * right_B, np.full(5, 10.0))
    same_number(once[1], tenfold[1])


@pytest.mark.parametrize("reach", [3, 9, 40])
def test_what_is_in_reach_is_right_by_distance(reach):
    rows = mqar(64, 200, pairs=4, symbols=8, seed=0)
    right_BT = right_answers(Oracle(rows, 16, reach), rows)
    scores = by_distance(rows, right_BT)
    assert [(score.start, score.stop) for score in scores] == [(2**i, 2 ** (i + 1)) for i in range(1, 6)]
    assert sum(score.asked for score in scores) == 800
    for score in scores:
        if score.stop - 1 <= reach:
            assert (score.value, score.error) == (1, 0)
        elif score.start > reach:
            assert (score.value, score.error) == (0, 0)
        else:
            assert 0 < score.value < 1
    right = sum(score.asked * score.value for score in scores)
    same_number(overall(rows, right_BT).value, right / 800)


def test_what_is_in_reach_is_right_by_depth():
    for depth in (0.0, 0.5, 1.0):
        rows = passkey(40, 5, digits=3, depth=depth)
        assert by_depth(rows, right_answers(Oracle(rows, 44, 21), rows), depth).value == (depth >= 0.5)


def test_a_key_with_one_wrong_digit_is_not_found():
    rows = passkey(40, 4, digits=3, depth=0)
    right_BT = rows.asked.copy()
    right_BT[1, -2] = False
    score = by_depth(rows, right_BT, 0)
    assert (score.sequences, score.asked) == (4, 4)
    same_number(score.value, 0.75)
    same_number(overall(rows, right_BT).value, 11 / 12)


@given(parts=st.integers(1, 7), size=st.integers(1, 20))
def test_parts_of_a_string_hold_all_of_it_once(parts, size):
    rows = copy(2 * size + 1, 3, symbols=4)
    first_BT = rows.asked & (np.arange(2 * size + 1) == size + 1)
    scores = by_place(rows, first_BT, parts)
    assert sum(score.asked for score in scores) == 3 * size
    same_number(scores[0].value * scores[0].asked, 3.0)
    assert all(score.value == 0 for score in scores[1:])
    assert (scores[0].start, scores[-1].stop) == (0, 1) or parts > size


TOKENS = np.random.default_rng(0).integers(24, size=161)


def test_windows_side_by_side_are_those_of_the_other_evaluator():
    model = make(attention="llp", options={"llp": {"segment": 8}})
    (found,) = context_loss(model, TOKENS, lengths=[32], windows=9, batch_size=2)
    expected = evaluate(model, TOKENS, length=32)
    ranges = [(1, 2), (2, 3), (3, 5), (5, 9), (9, 17), (17, 33)]
    assert [(score.start, score.stop) for score in found.by_context] == ranges
    assert [score.asked for score in found.by_context] == [5 * (stop - start) for start, stop in ranges]
    same_number(sum(score.asked * score.value for score in found.by_context) / 160, expected.loss)
    same_number(found.by_context[0].value, expected.by_position[0].loss)
    assert found.same.asked == 5 * 16
    assert (found.same.value, found.same.error) == (found.by_context[-1].value, found.by_context[-1].error)


@given(st.sets(st.integers(2, 50), min_size=1, max_size=3))
@settings(max_examples=10)
def test_the_same_tokens_are_scored_at_every_length(lengths):
    model = make(attention="window", options={"window": {"width": 1}}, position="none")
    found = context_loss(model, TOKENS, lengths=sorted(lengths), windows=3)
    for entry, length in zip(found, sorted(lengths), strict=True):
        assert (entry.same.start, entry.same.stop) == (length - min(lengths) // 2 + 1, length + 1)
        same_number(entry.same.value, found[0].same.value)
        same_number(entry.same.error, found[0].same.error)
        assert sum(score.asked for score in entry.by_context) == entry.same.sequences * length


def test_only_the_latents_of_a_perceiver_count():
    model = make(attention="perceiver_ar", options={"perceiver_ar": {"latents": 6}})
    short, long = context_loss(model, TOKENS, lengths=[5, 24], windows=2)
    assert [(score.start, score.stop) for score in short.by_context] == [(1, 2), (2, 3), (3, 5), (5, 6)]
    assert [(score.start, score.stop, score.asked) for score in long.by_context] == [(19, 25, 12)]
    assert (long.same.start, long.same.asked) == (23, 4)
    with torch.no_grad():
        ends = [24, 160]
        windows_BT = torch.from_numpy(np.stack([TOKENS[end - 24 : end + 1] for end in ends]))
        loss_BM = model.loss(windows_BT[:, :-1], windows_BT[:, 1:], reduction="none").view(2, 6)
    same_number(long.by_context[0].value, loss_BM.mean().item())


@pytest.mark.parametrize(("call", "message"), [
    (lambda: right_answers(make(), copy(9, 2, symbols=40)), r"from 0 to 40, but the model's vocabulary has 24"),
    (lambda: right_answers(make(), copy(9, 2, symbols=4), batch_size=0), "batch_size must be at least 1, got 0"),
    (lambda: check_reach(make(position="learned", max_positions=9), 10, 5), "has learned 9 positions .* length=10"),
    (lambda: by_place(copy(9, 2), copy(9, 2).asked, 0), "parts must be at least 1, got 0"),
    (lambda: context_loss(make(), TOKENS, lengths=[]), r"lengths must be at least 2, .*, got \[\]"),
    (lambda: context_loss(make(), TOKENS, lengths=[1, 4]), r"lengths must be at least 2, .*, got \[1, 4\]"),
    (lambda: context_loss(make(), TOKENS, lengths=[4], windows=0), "must be at least 1, got 0 and 8"),
    (lambda: context_loss(make(), TOKENS, lengths=[161]), "the text has 161 tokens, too few for a window of 161"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
