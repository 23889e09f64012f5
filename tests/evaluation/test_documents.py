"""Measuring with boundaries is measuring each document alone."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.evaluation import evaluate
from subquad.models import DecoderConfig
from subquad.models.build import build_model
from subquad.testing import assert_same_maths

VOCABULARY = 20


def make(attention="llp", **options):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "dim": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.3}
    model = build_model(DecoderConfig(attention=attention, options=options, **shape))
    return model.double()


@pytest.fixture(scope="module")
def model():
    return make(llp={"segment": 4})


def text(tokens):
    return np.random.default_rng(1).integers(VOCABULARY, size=tokens)


def close(actual, expected):
    assert_same_maths(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=8).filter(lambda lengths: max(lengths) > 1),
    length=st.integers(2, 12),
    overlap=st.integers(0, 5),
    batch_size=st.integers(1, 3),
)
def test_documents_are_measured_as_if_alone(model, lengths, length, overlap, batch_size):
    documents, stride = np.cumsum([0, *lengths]), max(1, length - overlap)
    tokens = text(int(documents[-1]))
    found = evaluate(model, tokens, length=length, stride=stride, documents=documents, batch_size=batch_size)
    alone = [
        evaluate(model, tokens[start:stop], length=length, stride=stride)
        for start, stop in pairwise(documents)
        if stop - start > 1
    ]
    assert found.tokens == sum(each.tokens for each in alone)
    close(found.loss * found.tokens, sum(each.loss * each.tokens for each in alone))
    for part in found.by_position:
        same = [p for each in alone for p in each.by_position if (p.start, p.stop) == (part.start, part.stop)]
        assert part.tokens == sum(p.tokens for p in same)
        close(part.loss * part.tokens, sum(p.loss * p.tokens for p in same))


def test_the_first_token_of_each_document_is_charged(model):
    tokens = text(30)
    found = evaluate(
        model, tokens, length=8, documents=np.array([0, 10, 10, 11, 30]), text_bytes=40, words=5, batch_size=2
    )
    nats = found.loss * found.tokens + 3 * math.log(VOCABULARY)
    close(found.bits_per_byte, nats / math.log(2) / 40)
    close(found.word_perplexity, math.exp(nats / 5))


def test_some_windows_of_documents_count_their_own_text(model):
    tokens = text(30)
    documents = np.array([0, 10, 20, 30])
    found = evaluate(
        model, tokens, length=16, documents=documents, windows=2, decode=lambda ids: "a" * len(ids), text_bytes=99
    )
    assert (found.tokens, found.text_bytes) == (18, 20)
    close(found.bits_per_byte, (found.loss * 18 + 2 * math.log(VOCABULARY)) / math.log(2) / 20)


@pytest.mark.parametrize("documents", [[0], [1, 30], [0, 29], [0, 20, 10, 30]])
def test_offsets_that_are_none(model, documents):
    with pytest.raises(ValueError, match="documents must be rising offsets from 0 to the number of tokens, 30, got"):
        evaluate(model, text(30), length=8, documents=np.array(documents))


def test_what_documents_do_not_go_with(model):
    with pytest.raises(ValueError, match="skip counts tokens of one text and can't be combined with documents, got 3"):
        evaluate(model, text(30), length=8, skip=3, documents=np.array([0, 30]))
    with pytest.raises(
        ValueError, match="perceiver_ar predicts only a row's last tokens and takes no packed documents"
    ):
        evaluate(make("perceiver_ar", perceiver_ar={"latents": 4}), text(30), length=8, documents=np.array([0, 30]))


def test_no_document_with_a_prediction(model):
    with pytest.raises(ValueError, match="leave some of the 2 tokens to predict, got"):
        evaluate(model, text(2), length=8, documents=np.array([0, 1, 2]))


def test_a_token_that_the_model_does_not_have(model):
    with pytest.raises(ValueError, match="tokens must be between 0 and 19, the model's vocabulary, got"):
        evaluate(model, text(30) + 15, length=8, documents=np.array([0, 30]))
