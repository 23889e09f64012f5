"""The counts of Perceiver AR and V1 to V3: in the papers' setting, and against torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.models import DecoderConfig, PerceiverAR
from subquad.ops import flops

PAPER = {"latents": 2048, "history_tokens": 2048}
SMALL = {"latents": 300, "history_tokens": 100}


def forms(segment, projected):
    compressed = {"history": "compressed", "projected": projected}
    segments = {"history": "segments", "segment": segment}
    return [{"history": "cross"}, {"history": "self"}, segments, compressed, {**compressed, "first_layer": "full"}]


FORMS, PAPER_FORMS = forms(24, 16), forms(256, 256)


def build(options, device="cpu", **fields):
    config = DecoderConfig(vocab_size=40, attention="perceiver_ar", options={"perceiver_ar": options}, **fields)
    with torch.device(device):
        return PerceiverAR(config)


@pytest.mark.parametrize(
    ("form", "papers", "unread"),
    [
        (PAPER_FORMS[0], 2_517_762_048, 0),
        (PAPER_FORMS[1], 12_080_775_168, 24 * 2048 * 2048),
        (PAPER_FORMS[2], 7_852_916_736, 24 * 2048 * 256),
        (PAPER_FORMS[3], 3_096_576_000, 24 * 256 * 256),
        (PAPER_FORMS[4], 3_183_083_520, 24 * 256 * 256),
    ],
)
def test_the_papers_setting(form, papers, unread):
    """n = 4096 tokens, 48 layers, 24 heads, h = m = 2048, s = p = 256 (arXiv:2412.06106, table 8).

    The papers' count has the last layer's history rows, which nothing reads and which are not computed.
    """
    model = build(PAPER | form, "meta", dim=48, num_heads=24, num_layers=48)
    cost = model.cost(4096)
    assert (cost.tokens, cost.unmasked_entries) == (4096, papers - unread)
    assert cost.unmasked_entries < cost.score_entries


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 250, 300, 350, 700])
@pytest.mark.parametrize(
    "fields", [{}, {"num_kv_heads": 1, "lookup": 8, "feedforward": "gelu", "tie_embeddings": False}]
)
def test_operations_are_those_that_are_done(form, tokens, fields):
    flops.register()
    model = build(SMALL | form, dim=16, num_heads=2, num_layers=3, **fields).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64))
    cost = model.cost(tokens)
    assert cost.mixing_flops + cost.projection_flops == counter.get_total_flops()
    products = 2 * 2 * 8 * cost.score_entries  # of scores and of values, in heads of 8 channels
    compressed = cost.mixing_flops - products
    assert (compressed > 0) == ("projected" in form and tokens > SMALL["latents"])
    assert cost.backward_flops == 5 * products // 2 + 2 * (compressed + cost.projection_flops)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.state_bytes == model.state_bytes(tokens)


def test_the_backward_pass_costs_what_is_said():
    flops.register()
    model = build(SMALL | FORMS[1], dim=16, num_heads=2, num_layers=3, tie_embeddings=False)
    ids = torch.zeros(1, 350, dtype=torch.int64)
    logits, _ = model(ids)
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == model.cost(350).backward_flops


def test_what_training_keeps_grows_as_the_work_and_leaves_the_modes_alone():
    kept = []
    for form in (FORMS[0], FORMS[3], FORMS[1]):
        model = build(SMALL | form | {"vary_latents": True, "prefix_dropout": 0.5}, dim=16, num_heads=2, num_layers=3)
        model.layers[1].eval()
        state = torch.get_rng_state()
        kept.append(model.cost(400).activation_bytes)
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
        assert not model.layers[1].training
    assert 0 < kept[0] < kept[1] < kept[2]


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        build(SMALL, "meta").cost(-1)
