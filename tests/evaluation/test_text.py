"""Scores against a loop that reads one window and one token at a time."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from subquad.evaluation import evaluate
from subquad.evaluation.text import plan
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_exact, assert_same_maths

VOCAB = 11


@pytest.fixture(scope="module", params=["llp", "linear"])
def model(request) -> Decoder:
    torch.manual_seed(0)
    position = "rope" if request.param == "llp" else "sinusoidal"
    options = {"llp": {"segment": 4}} if request.param == "llp" else {}
    config = DecoderConfig(
        vocab_size=VOCAB, dim=8, num_layers=1, num_heads=2, attention=request.param, options=options, position=position
    )
    decoder = Decoder(config).double()
    with torch.no_grad():
        for p in decoder.parameters():
            p.add_(torch.randn_like(p) / 2)  # far from uniform predictions
    return decoder


def text(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, tokens).astype(np.uint16)


def exact(value: float | list[float]) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@torch.no_grad()
def brute_force(
    model: Decoder, tokens: np.ndarray, length: int, stride: int
) -> tuple[dict[int, float], dict[int, int]]:
    """Nats and context of each token, from the first window (in order) that reaches it: one forward pass a token."""
    nats, context = {}, {}
    for start in range(0, len(tokens), stride):
        for target in range(start + 1, min(start + length, len(tokens) - 1) + 1):
            if target not in nats:
                read = torch.tensor(tokens[start:target].astype(np.int64))[None]
                logits_BTV, _ = model(read)
                nats[target] = float(-F.log_softmax(logits_BTV[0, -1], -1)[int(tokens[target])])
                context[target] = target - start
    return nats, context


@pytest.mark.parametrize(("tokens", "length", "stride"), [
    (29, 7, 7), (29, 7, 3), (29, 7, 1), (28, 7, 7), (30, 7, 7), (5, 16, 16), (5, 16, 2), (2, 1, 1), (12, 1, 1)
])  # fmt: skip
def test_every_token_but_the_first_is_scored_once_and_right(model, tokens, length, stride):
    ids = text(tokens)
    nats, context = brute_force(model, ids, length, stride)
    assert sorted(nats) == list(range(1, tokens))
    result = evaluate(model, ids, length=length, stride=stride, batch_size=3, text_bytes=100, words=17)
    total = sum(nats.values())
    whole = total + math.log(VOCAB)
    assert result.tokens == tokens - 1
    expected = [total / (tokens - 1), math.exp(total / (tokens - 1)), math.exp(whole / 17), whole / math.log(2) / 100]
    actual = [result.loss, result.perplexity, result.word_perplexity, result.bits_per_byte]
    assert_same_maths(exact(actual), exact(expected))
    assert sum(part.tokens for part in result.by_position) == tokens - 1
    for part in result.by_position:
        inside = [nats[target] for target in nats if part.start <= context[target] < part.stop]
        assert part.tokens == len(inside)
        assert_same_maths(exact(part.loss), exact(np.mean(inside)))


def test_ranges_of_positions_double(model):
    parts = evaluate(model, text(60), length=11).by_position
    assert [(part.start, part.stop) for part in parts] == [(1, 2), (2, 4), (4, 8), (8, 12)]


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_batches_do_not_change_the_scores(model, batch_size):
    one, many = (evaluate(model, text(100), length=9, stride=4, batch_size=n) for n in (7, batch_size))
    assert_same_maths(exact(many.loss), exact(one.loss))
    assert many.tokens == one.tokens


@pytest.mark.parametrize("tokens", range(2, 12))
@pytest.mark.parametrize("length", [1, 2, 3, 5, 11])
def test_plan_scores_each_token_once_with_the_promised_context(tokens, length):
    for stride in range(1, length + 1):
        windows = plan(tokens, length, stride)
        scored = [target for window in windows for target in range(window.scored, window.stop + 1)]
        assert scored == list(range(1, tokens))
        for window in windows:
            assert window.stop - window.start <= length
            assert window.scored - window.start >= (1 if window.start == 0 else length - stride + 1)


def test_arrays_lists_and_tensors_are_the_same_text(model):
    ids = text(20)
    losses = [evaluate(model, tokens, length=6).loss for tokens in (ids, ids.tolist(), torch.from_numpy(ids.copy()))]
    assert losses[0] == losses[1] == losses[2]


def test_windows_cut_the_text_and_count_what_is_left(model):
    ids = text(50)
    cut = evaluate(model, ids, length=7, windows=3, text_bytes=50, words=9, decode=lambda ids: "é " * len(ids))
    whole = evaluate(model, ids[:22], length=7, text_bytes=22 * 3, words=22)
    assert (cut.tokens, cut.text_bytes, cut.words) == (21, 66, 22)
    assert (cut.loss, cut.bits_per_byte, cut.word_perplexity) == (
        whole.loss, whole.bits_per_byte, whole.word_perplexity
    )  # fmt: skip
    silent = evaluate(model, ids, length=7, windows=3, text_bytes=50, words=9)
    assert (silent.bits_per_byte, silent.word_perplexity) == (None, None)


@pytest.mark.parametrize("stride", [2, 4])
def test_what_is_skipped_is_the_predictions_with_less_context(model, stride):
    tokens, length = text(30), 6
    nats, context = brute_force(model, tokens, length, stride)
    kept = [target for target in nats if target > length]
    found = evaluate(model, tokens, length=length, stride=stride, skip=length, text_bytes=30, words=5)
    assert found.tokens == len(kept)
    assert_same_maths(exact(found.loss), exact(sum(nats[target] for target in kept) / len(kept)))
    assert min(context[target] for target in kept) == length - stride + 1
    assert found.bits_per_byte is None
    assert found.word_perplexity is None


def test_more_windows_than_there_are_is_the_whole_text(model):
    whole, more = (evaluate(model, text(50), length=7, windows=n, text_bytes=50, words=9) for n in (None, 100))
    assert more.bits_per_byte == whole.bits_per_byte is not None


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary(model):
    uniform = Decoder(model.config).double()
    with torch.no_grad():
        for p in uniform.parameters():
            p.zero_()
    result = evaluate(uniform, text(41), length=8, text_bytes=41, words=5)
    assert_same_maths(exact(result.bits_per_byte), exact(math.log2(VOCAB)))
    assert_same_maths(exact(result.perplexity), exact(VOCAB))


def test_mode_and_gradients_are_left_alone_and_dropout_is_off(model):
    config = model.config.replace(dropout=0.5)
    decoder = Decoder(config).train()
    first, second = (evaluate(decoder, text(30), length=8).loss for _ in range(2))
    assert first == second
    assert decoder.training
    assert all(p.grad is None for p in decoder.parameters())


def test_a_hopeless_model_has_infinite_perplexity_instead_of_an_error(model):
    hopeless = Decoder(model.config).double()
    with torch.no_grad():
        hopeless.embedding.tokens.weight.copy_(torch.randn_like(hopeless.embedding.tokens.weight) * 1e6)
    result = evaluate(hopeless, text(30), length=8, text_bytes=30, words=1)
    assert math.isinf(result.word_perplexity)
    assert math.isfinite(result.loss)


def test_progress_counts_the_windows(model):
    seen = []
    evaluate(model, text(30), length=7, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_the_result_is_json(model):
    values = json.loads(json.dumps(evaluate(model, text(30), length=8, stride=4).to_dict()))
    assert values["tokens"] == 29
    assert values["by_position"][0]["start"] == 1


def test_repeating_gives_the_same_bits(model):
    first, second = (evaluate(model, text(30), length=8) for _ in range(2))
    assert_exact(exact(first.loss), exact(second.loss))


@pytest.mark.parametrize(("options", "match"), [
    ({"length": 0}, "length must be at least 1, got 0"),
    ({"length": 8, "stride": 0}, r"stride must be between 1 and length \(8\), so that every token is scored, got 0"),
    ({"length": 8, "stride": 9}, r"stride must be between 1 and length \(8\), so that every token is scored, got 9"),
    ({"length": 8, "windows": 0}, "windows must be at least 1, got 0"),
    ({"length": 8, "batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"length": 8, "skip": -1}, "skip must be at least 0 and leave some of the 30 tokens to predict, got -1"),
    ({"length": 8, "skip": 30}, "skip must be at least 0 and leave some of the 30 tokens to predict, got 30"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(model, options, match):
    with pytest.raises(ValueError, match=match):
        evaluate(model, text(30), **options)


def test_one_token_is_refused(model):
    with pytest.raises(ValueError, match=r"at least 2 tokens \(the first is context only\), got 1"):
        evaluate(model, text(1), length=8)


def test_tokens_of_another_vocabulary_are_refused(model):
    with pytest.raises(
        ValueError, match="between 0 and 10, the model's vocabulary, got 3 to 11; were they made by another"
    ):
        evaluate(model, [3, 4, 11], length=8)
