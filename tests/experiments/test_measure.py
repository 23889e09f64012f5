"""Measurements of a byte model with known probabilities, worked out by hand."""

import math
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.harness import measure as measuring
from experiments.harness.measure import in_blocks, measure_classes, measure_text, token_nats, unigram
from experiments.harness.recipe import Held
from subquad.data import DataConfig, prepare
from subquad.evaluation import evaluate
from subquad.models import Decoder, DecoderConfig
from subquad.training import BatchConfig, TrainConfig


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measure a byte model with fixed `probabilities` of the next byte; its training text holds only the letter a."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))

    def measure(held_out, probabilities, held):
        for name, text in (("train", "a" * 400), ("held_out", held_out)):
            (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        files = {"path": str(tmp_path / "train.txt"), "held_out_path": str(tmp_path / "held_out.txt")}
        data = DataConfig(**files, tokenizer="bytes")
        model = DecoderConfig(vocab_size=256, dim=4, num_layers=1, num_heads=1, tie_embeddings=False, attention="full")
        decoder = Decoder(model).eval()
        rest = (1 - sum(probabilities.values())) / (256 - len(probabilities))
        logits_V = torch.tensor([probabilities.get(byte, rest) for byte in range(256)]).log()
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.zero_()  # each layer adds nothing to its input
            decoder.embedding.tokens.weight.fill_(1.0)
            decoder.norm.weight.fill_(1.0)
            decoder.head.weight.copy_(logits_V[:, None] / 4)
        config = TrainConfig(model=model, data=data, batch=BatchConfig(length=16, size=2))
        result = SimpleNamespace(config=config, decoder=decoder, corpus=prepare(data))
        return result, measure_text(result, held)

    return measure


ACUTE = {0xC3: 1 / 2, 0xA9: 1 / 4, ord("a"): 1 / 8}
"""Probabilities of the two bytes of an e acute: 1 + 2 bits, 1.5 a byte. An a, the training text, would take 3 bits."""


def test_held_out_text_is_measured_in_bits_a_byte(measured):
    _, part = measured("a" + 60 * "é", ACUTE, Held(tokens=81, stride=4))
    assert part["scored_tokens"] == 80
    assert part["loss"] == pytest.approx(1.5 * math.log(2), rel=1e-5)
    assert part["perplexity"] == pytest.approx(2**1.5, rel=1e-5)
    assert part["bits_per_byte"] == pytest.approx(1.5, rel=1e-5)
    assert part["word_perplexity"] == pytest.approx(2**120, rel=1e-3)  # 40 letters, 120 bits, one word
    _, whole = measured("a" + 60 * "é", ACUTE, Held(stride=4))  # a code length: 8 bits for the first of 121 bytes
    assert whole["scored_tokens"] == 120
    assert whole["bits_per_byte"] == pytest.approx((8 + 60 * 3) / 121, rel=1e-5)


def test_baselines_are_counted_on_the_same_text(measured):
    """400 training letters a and one more of each of 256 bytes: an e acute's have 1 of 656. gzip reads 80 bytes."""
    _, part = measured("a" + 60 * "é", ACUTE, Held(tokens=81, stride=4))
    assert part["unigram"] == pytest.approx(math.log(656))
    assert part["gzip"] == len(zlib.compress(("é" * 40).encode(), 9)) / 10
    counts = np.array([0, 0, 1])
    assert unigram(counts, np.array([0, 1]), 3) == pytest.approx(-(math.log(3 / 6) + math.log(2 / 6)) / 2)


def test_skipped_tokens_are_not_measured(measured):
    probabilities = {ord("x"): 1 / 256, ord("b"): 1 / 2, ord("a"): 1 / 4}
    _, row = measured("x" * 32 + "b" * 64, probabilities, Held(stride=1, skip=32))
    assert (row["scored_tokens"], row["loss"]) == (63, pytest.approx(math.log(2), rel=1e-5))
    assert measured("x" * 32 + "b" * 64, probabilities, Held(stride=1))[1]["loss"] > 3 * math.log(2)


def test_blocks_follow_the_text(measured):
    """The first 100 scored bytes take 1 bit, the last 100 take 2: 100 blocks of two bytes."""
    probabilities = {ord("b"): 1 / 2, ord("c"): 1 / 4}
    result, row = measured("b" * 101 + "c" * 100, probabilities, Held(stride=4))
    assert (row["block_size"], len(row["loss_blocks"])) == (2, 100)
    assert row["loss_blocks"] == [round(math.log(2), 4)] * 50 + [round(math.log(4), 4)] * 50
    assert measured("b" * 101 + "d" * 100, probabilities, Held(stride=4))[1]["text"] != row["text"]
    assert in_blocks("x", np.arange(205.0))["x_blocks"][:2] == [1.0, 4.0]  # of three, and the last one is left out
    tokens = result.corpus.held_out.tokens
    whole = evaluate(result.decoder, tokens, length=16, stride=3)
    assert token_nats(result, tokens, Held(stride=3)).mean() == pytest.approx(whole.loss)


def test_sequences_in_the_order_of_their_classes_are_dealt_to_the_blocks(monkeypatch):
    """Of 400 sequences the first half are right: contiguous blocks of four would all be 0 or 1, dealt ones one in 8."""
    right_N = np.arange(400) < 200

    def accuracy_of(model, part, *rest, **options):
        return SimpleNamespace(accuracy=right_N[part.indices].mean())

    monkeypatch.setattr(measuring, "evaluate_classifier", accuracy_of)
    corpus = SimpleNamespace(test=range(400), classes=("a", "b"), fingerprint="0123456789")
    config = SimpleNamespace(batch=SimpleNamespace(size=4))
    result = SimpleNamespace(corpus=corpus, model=SimpleNamespace(model=None), config=config)
    row = measure_classes(result)
    assert row == measure_classes(result)
    assert (row["block_size"], len(row["accuracy_blocks"]), row["chance"]) == (4, 100, 0.5)
    assert sum(row["accuracy_blocks"]) == 50
    assert sum(block in (0.0, 1.0) for block in row["accuracy_blocks"]) < 25


@pytest.mark.parametrize("held", [Held(stride=17), Held(skip=10**6)])
def test_what_leaves_nothing_to_score_is_refused(measured, held):
    with pytest.raises(
        ValueError, match=r"held\.stride must be at most 16, the predictions of a window, and held\.skip"
    ):
        measured("b" * 101, {ord("b"): 1 / 2}, held)
