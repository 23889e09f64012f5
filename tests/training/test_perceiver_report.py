"""The report and the samples of a run with Perceiver AR, whose state and speed depend on how it decodes."""

import pytest
import torch

from subquad.models import DecoderConfig, PerceiverAR
from subquad.training.report import decode_speed, state_sizes

SMALL = {"vocab_size": 23, "dim": 16, "num_layers": 2, "num_heads": 2, "attention": "perceiver_ar"}


def tiny(**options):
    return PerceiverAR(DecoderConfig(options={"perceiver_ar": {"latents": 6, "history": "self", **options}}, **SMALL))


@pytest.mark.parametrize("decode", ["exact", "refill", "frozen"])
@pytest.mark.parametrize("history_tokens", [None, 9])
def test_sizes_of_the_state(decode, history_tokens):
    model = tiny(decode=decode, history_tokens=history_tokens)
    sizes = state_sizes(model, list(range(20)), after=(10, 40, 5_000))
    assert [(size.tokens, size.measured) for size in sizes] == [(10, True), (40, False), (5_000, False)]
    _, state = model(torch.zeros(1, 40, dtype=torch.int64))
    assert sizes[1].bytes == state.nbytes
    assert (sizes[2].bytes > sizes[1].bytes) == (history_tokens is None)
    assert model.training


@pytest.mark.parametrize("decode", ["exact", "refill", "frozen"])
@pytest.mark.parametrize("latents", [2, 6])
def test_every_mode_decodes_for_the_measure_of_speed(decode, latents):
    model = tiny(decode=decode, latents=latents)
    assert decode_speed(model, list(range(20)), tokens=20) > 0
