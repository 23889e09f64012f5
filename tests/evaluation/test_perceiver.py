"""Windows of a model that predicts with its last tokens alone."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from subquad.evaluation import evaluate
from subquad.evaluation.text import plan
from subquad.models import DecoderConfig, PerceiverAR
from subquad.testing import assert_same_maths

VOCABULARY, LATENTS = 11, 4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    options = {"latents": LATENTS, "history": "self", "vary_latents": True, "prefix_dropout": 0.5}
    config = DecoderConfig(
        vocab_size=VOCABULARY, dim=8, num_layers=2, num_heads=2, attention="perceiver_ar", init_std=0.7,
        options={"perceiver_ar": options},
    )  # fmt: skip
    return PerceiverAR(config).double().train()


def text(tokens):
    return np.random.default_rng(0).integers(0, VOCABULARY, tokens)


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("latents", [1, 3, 4, 9])
@pytest.mark.parametrize("tokens", range(2, 14))
@pytest.mark.parametrize("length", [1, 3, 8])
def test_plan_scores_each_token_once_and_by_a_latent(latents, tokens, length):
    for stride in range(1, min(length, latents) + 1):
        windows = plan(tokens, length, stride, latents)
        scored = [target for window in windows for target in range(window.scored, window.stop + 1)]
        assert scored == list(range(1, tokens))
        for window in windows:
            assert 1 <= window.stop - window.start <= length
            assert window.stop + 1 - window.scored <= min(latents, window.stop - window.start)
            assert window.start == 0 or window.scored - window.start >= length - stride + 1
    assert plan(tokens, length, length, length) == plan(tokens, length, length)


@pytest.mark.parametrize(("length", "stride"), [(9, None), (9, 4), (9, 3), (9, 1), (3, None), (30, None)])
@pytest.mark.parametrize("tokens", [2, 9, 26])
@torch.no_grad()
def test_every_token_but_the_first_is_scored_once_and_right(model, tokens, length, stride):
    ids = text(tokens)
    result = evaluate(model, ids, length=length, stride=stride, batch_size=3, text_bytes=77, words=5)
    stride = stride or min(LATENTS, length)
    nats, by_context = [], {}
    end = min(LATENTS, length)
    for target in range(1, tokens):
        while end < target:
            end += stride
        window = ids[max(0, end - length) : min(end, tokens - 1)]
        first = max(0, end - length)
        logits, _ = model.eval()(torch.from_numpy(window)[None])
        place = target - 1 - first - len(window)  # counted from the window's end
        nats.append(float(-F.log_softmax(logits[0, place], -1)[int(ids[target])]))
        by_context.setdefault(int(math.log2(target - first)), []).append(nats[-1])
    model.train()
    assert result.tokens == tokens - 1
    assert result.stride == stride
    whole = (sum(nats) + math.log(VOCABULARY)) / math.log(2) / 77
    assert_same_maths(exact([result.loss, result.bits_per_byte]), exact([np.mean(nats), whole]))
    ranges = [part for _, part in sorted(by_context.items())]
    assert [part.tokens for part in result.by_position] == [len(part) for part in ranges]
    assert_same_maths(exact([p.loss for p in result.by_position]), exact([np.mean(part) for part in ranges]))


def test_a_stride_that_would_leave_tokens_out_is_refused(model):
    with pytest.raises(ValueError, match=r"stride must be at most the model's latents \(4\).*.*; got 5"):
        evaluate(model, text(20), length=9, stride=5)
