"""Scores against a loop that scores one token at a time, and of packed documents against each document alone."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from subquad.evaluation import evaluate
from subquad.models import DecoderConfig
from subquad.models.build import build_model
from subquad.testing import assert_same_maths

VOCAB, LATENTS = 11, 4
STACK = {"latents": LATENTS, "history": "self", "vary_latents": True, "prefix_dropout": 0.5}
KINDS = {
    "llp": {"options": {"llp": {"segment": 4}}},
    "linear": {"position": "sinusoidal"},
    "perceiver_ar": {"num_layers": 2, "options": {"perceiver_ar": STACK}},
}


def make(attention="llp", **changes):
    torch.manual_seed(0)
    values = {"vocab_size": VOCAB, "dim": 8, "num_layers": 1, "num_heads": 2, "attention": attention, "init_std": 0.7}
    return build_model(DecoderConfig(**values | KINDS[attention] | changes)).double()


@pytest.fixture(scope="module")
def model():
    return make()


def text(tokens):
    return np.random.default_rng(0).integers(0, VOCAB, tokens).astype(np.uint16)


def close(actual, expected):
    assert_same_maths(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


@torch.no_grad()
def brute_force(model, ids, length, stride, latents):
    """Nats and context of each token but the first, from the first window that predicts it: one pass a token."""
    nats, context, end = [], [], min(latents, length)
    for target in range(1, len(ids)):
        while end < target:
            end += stride
        start, stop = max(0, end - length), min(end, len(ids) - 1)
        logits, _ = model.eval()(torch.from_numpy(ids[start:stop].astype(np.int64))[None])
        place = target - 1 - stop  # counted from the window's end
        nats.append(float(-F.log_softmax(logits[0, place], -1)[int(ids[target])]))
        context.append(target - start)
    model.train()
    return np.array(nats), np.array(context)


WINDOWS = [  # tokens, length, stride, batch size
    (29, 7, 7, 3), (29, 7, 3, 1), (29, 7, 1, 50), (28, 7, 7, 2), (30, 7, 7, 3), (5, 16, 16, 3), (5, 16, 2, 3),
    (2, 1, 1, 3), (12, 1, 1, 3),
]  # fmt: skip
LATENT_WINDOWS = [(9, None), (9, 3), (9, 1), (3, None), (30, None)]


@pytest.mark.parametrize(("attention", "tokens", "length", "stride", "batch_size"), [
    *(("llp", *case) for case in WINDOWS), *(("linear", *case) for case in WINDOWS[:3]),
    *(("perceiver_ar", tokens, *case, 3) for tokens, case in product((2, 9, 26), LATENT_WINDOWS)),
])  # fmt: skip
def test_every_token_but_the_first_is_scored_once_and_right(attention, tokens, length, stride, batch_size):
    model, ids = make(attention).train(), text(tokens)
    result = evaluate(model, ids, length=length, stride=stride, batch_size=batch_size, text_bytes=77, words=17)
    latents = LATENTS if attention == "perceiver_ar" else length
    stride = stride or min(latents, length)
    nats, context = brute_force(model, ids, length, stride, latents)
    assert (result.tokens, result.stride) == (tokens - 1, stride)
    whole = nats.sum() + math.log(VOCAB)
    close(
        [result.loss, result.perplexity, result.word_perplexity, result.bits_per_byte],
        [nats.mean(), math.exp(nats.mean()), math.exp(whole / 17), whole / math.log(2) / 77],
    )
    assert sum(part.tokens for part in result.by_position) == tokens - 1
    for part in result.by_position:
        inside = nats[(part.start <= context) & (context < part.stop)]
        assert part.tokens == len(inside)
        close(part.loss, inside.mean())


def test_one_latent_scores_each_token_once_and_counts_its_bits():
    model, ids = make("perceiver_ar", options={"perceiver_ar": {"latents": 1}}), text(9)
    result = evaluate(model, ids, length=4, text_bytes=9)
    nats, context = brute_force(model, ids, length=4, stride=1, latents=1)
    assert (result.tokens, result.stride, context.tolist()) == (8, 1, [1, 2, 3, 4, 4, 4, 4, 4])
    close([result.loss, result.bits_per_byte], [nats.sum() / 8, (nats.sum() + math.log(VOCAB)) / math.log(2) / 9])


def test_ranges_of_positions_double(model):
    parts = evaluate(model, text(60), length=11).by_position
    assert [(part.start, part.stop) for part in parts] == [(1, 2), (2, 4), (4, 8), (8, 12)]


def test_arrays_lists_and_tensors_are_the_same_text(model):
    ids = text(20)
    tensor = torch.from_numpy(ids.astype(np.int64))
    losses = [evaluate(model, tokens, length=6).loss for tokens in (ids, ids.tolist(), tensor)]
    assert losses[0] == losses[1] == losses[2]


def test_windows_cut_the_text_and_count_what_is_left(model):
    ids, counts = text(50), {"text_bytes": 50, "words": 9}
    cut = evaluate(model, ids, length=7, windows=3, **counts, decode=lambda ids: "é " * len(ids))
    whole = evaluate(model, ids[:22], length=7, text_bytes=22 * 3, words=22)
    assert (cut.tokens, cut.text_bytes, cut.words) == (21, 66, 22)
    assert (cut.loss, cut.bits_per_byte, cut.word_perplexity) == (
        whole.loss, whole.bits_per_byte, whole.word_perplexity
    )  # fmt: skip
    silent = evaluate(model, ids, length=7, windows=3, **counts)
    assert (silent.bits_per_byte, silent.word_perplexity) == (None, None)
    whole, more = (evaluate(model, ids, length=7, windows=windows, **counts) for windows in (None, 100))
    assert more.bits_per_byte == whole.bits_per_byte is not None


@pytest.mark.parametrize("stride", [2, 4])
def test_what_is_skipped_is_the_predictions_with_less_context(model, stride):
    ids, length = text(30), 6
    nats, context = brute_force(model, ids, length, stride, length)
    found = evaluate(model, ids, length=length, stride=stride, skip=length, text_bytes=30, words=5)
    assert found.tokens == len(nats[length:])
    close(found.loss, nats[length:].mean())
    assert context[length:].min() == length - stride + 1
    assert (found.bits_per_byte, found.word_perplexity) == (None, None)


def test_mode_and_gradients_are_left_alone_and_dropout_is_off():
    model = make(dropout=0.5).train()
    first, second = (evaluate(model, text(30), length=8).loss for _ in range(2))
    assert first == second
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_hopeless_model_has_infinite_perplexity_instead_of_an_error():
    model = make()
    with torch.no_grad():
        model.embedding.tokens.weight.copy_(torch.randn_like(model.embedding.tokens.weight) * 1e6)
    result = evaluate(model, text(30), length=8, text_bytes=30, words=1)
    assert math.isinf(result.word_perplexity)
    assert math.isfinite(result.loss)


def test_progress_counts_the_windows(model):
    seen = []
    evaluate(model, text(30), length=7, batch_size=2, progress=lambda *counts: seen.append(counts))
    assert seen == [(2, 5), (4, 5), (5, 5)]


# --- documents


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
    documents = np.array([0, 10, 10, 11, 30])
    found = evaluate(model, text(30), length=8, documents=documents, text_bytes=40, words=5, batch_size=2)
    nats = found.loss * found.tokens + 3 * math.log(VOCAB)
    close([found.bits_per_byte, found.word_perplexity], [nats / math.log(2) / 40, math.exp(nats / 5)])


def test_some_windows_of_documents_count_their_own_text(model):
    counts = {"windows": 2, "decode": lambda ids: "a" * len(ids), "text_bytes": 99}
    found = evaluate(model, text(30), length=16, documents=np.array([0, 10, 20, 30]), **counts)
    assert (found.tokens, found.text_bytes) == (18, 20)
    close(found.bits_per_byte, (found.loss * 18 + 2 * math.log(VOCAB)) / math.log(2) / 20)


OFFSETS = "documents must be rising offsets from 0 to the number of tokens, 30, got"
ALL_30 = np.array([0, 30])


@pytest.mark.parametrize(("attention", "tokens", "options", "match"), [
    ("llp", 30, {"length": 0}, "length must be at least 1, got 0"),
    ("llp", 30, {"stride": 0}, r"stride must be between 1 and length \(8\), so that every token is scored, got 0"),
    ("llp", 30, {"stride": 9}, r"stride must be between 1 and length \(8\), so that every token is scored, got 9"),
    ("perceiver_ar", 20, {"stride": 5}, r"stride must be at most the model's latents \(4\).*; got 5"),
    ("llp", 30, {"skip": -1}, "skip must be at least 0 and leave some of the 30 tokens to predict, got -1"),
    ("llp", 30, {"skip": 30}, "skip must be at least 0 and leave some of the 30 tokens to predict, got 30"),
    ("llp", 1, {}, r"at least 2 tokens \(the first is context only\), got 1"),
    *(("llp", 30, {"documents": np.array(offsets)}, OFFSETS) for offsets in ([0], [1, 30], [0, 29], [0, 20, 10, 30])),
    ("llp", 2, {"documents": np.array([0, 1, 2])}, "leave some of the 2 tokens to predict, got"),
    ("llp", 30, {"skip": 3, "documents": ALL_30}, "skip counts tokens of one text and can't be combined with doc"),
    ("perceiver_ar", 30, {"documents": ALL_30}, "perceiver_ar predicts only a row's last tokens and takes no packed"),
])  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(attention, tokens, options, match):
    with pytest.raises(ValueError, match=match):
        evaluate(make(attention), text(tokens), **{"length": 8} | options)


@pytest.mark.parametrize("documents", [None, np.array([0, 3])])
def test_tokens_of_another_vocabulary_are_refused(model, documents):
    with pytest.raises(ValueError, match=r"between 0 and 10, the model's vocabulary, got [34] to 11; were they made"):
        evaluate(model, [3, 4, 11], length=8, documents=documents)
