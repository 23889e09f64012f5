"""Layers, models and inputs that several processes can't share are refused with the reason."""

import re
import threading

import pytest
import torch

from subquad import attention
from subquad.attention import build
from subquad.models import Decoder, DecoderConfig, Encoder, ImageModel, ImageModelConfig
from subquad.models.build import build_model
from subquad.models.encoder import EncoderConfig
from subquad.parallel import ContextGroup, active_group, context_parallel
from subquad.parallel.group import refuse
from subquad.state import State
from subquad.testing.ranks import Threads

BIDIRECTIONAL = [name for name in attention.names() if "bidirectional" in attention.mechanism(name).forms]
SIZES = {"dim": 16, "num_heads": 2}
SHAPE = {"vocab_size": 20, "num_layers": 1, "position": "none", **SIZES}
IDS = torch.zeros(1, 4, dtype=torch.int64)
PADDING = torch.ones(1, 4, dtype=torch.bool)
X = torch.zeros(1, 4, 16)
PERCEIVER = {"attention": "perceiver_ar", "options": {"perceiver_ar": {"latents": 2, "history_tokens": 2}}}


@pytest.fixture
def group():
    """The first of two ranks; a refused call must not reach the other one."""
    with context_parallel(Threads(0, 2, {})) as group:
        yield group


def test_a_group_needs_torch_distributed_and_this_process_in_it(monkeypatch):
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
        ContextGroup()
    for name, value in {"is_initialized": True, "get_rank": -1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    with pytest.raises(ValueError, match="is not in this process group"):
        ContextGroup()


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_bidirectional_layers(group, name):
    layer = build(name, causal=False, **SIZES)
    with pytest.raises(ValueError, match=f"this {name} layer is not causal: it reads whole sequences"):
        layer(X)
    with pytest.raises(ValueError, match=f"this {name} layer is not causal"):
        layer.communication(8, 2)


@pytest.mark.parametrize("name", ["latte", "window", "luna"])
def test_states_and_padding_of_layers(group, name):
    layer = build(name, **SIZES)
    with pytest.raises(ValueError, match="it takes no state"):
        layer(X, State({"seen": 1}, layer.config_hash))
    with pytest.raises(ValueError, match="has no padding"):
        layer(X, mask=PADDING)


def decoder(**changes):
    return Decoder(DecoderConfig(**{**SHAPE, "attention": "latte", **changes}))


@pytest.mark.parametrize(("call", "match"), [
    (lambda: build("shifted", wrap=True, group=4, **SIZES)(X), "this shifted layer is not causal"),
    (lambda: build("latte", dropout=0.5, **SIZES)(X), r"dropout=0.5 draws other numbers on several processes"),
    (lambda: decoder(dropout=0.25)(IDS), r"dropout=0.25 draws other numbers on several processes"),
    (lambda: decoder()(IDS, State({"seen": 1}, decoder().config_hash)), "it takes no state"),
    (lambda: decoder().loss(IDS, IDS, PADDING), "has no padding"),
    (lambda: build("linear", **SIZES)(X, doc_ids=IDS), "is one document: leave doc_ids out"),
    (lambda: decoder(attention="linear")(IDS, doc_ids=IDS), "is one document: leave doc_ids out"),
    (lambda: build_model(DecoderConfig(**SHAPE, **PERCEIVER))(IDS), "perceiver_ar cannot read a sequence that several"),
    (lambda: build_model(DecoderConfig(**SHAPE, **PERCEIVER)).communication(8, 2), "perceiver_ar cannot read a seq"),
    (lambda: Encoder(EncoderConfig(**SHAPE, attention="latte"))(IDS),
     "an encoder, which reads whole sequences, cannot read a sequence that"),
    (lambda: ImageModel(ImageModelConfig(num_layers=1, attention="linear", position="none", **SIZES))(IDS),
     "an image model cannot read a sequence that"),
])  # fmt: skip
def test_unsupported_models_and_inputs(group, call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(("tokens", "ranks"), [(7, 2), (8, 0), (-2, 2)])
def test_parts_are_equal(tokens, ranks):
    with pytest.raises(ValueError, match=f"must be a multiple of ranks, got {tokens} and {ranks}"):
        build("latte", **SIZES).communication(tokens, ranks)


def test_some_ranks_are_counted_as_among_all():
    layer = build("full", **SIZES)
    every = layer.communication(12, 6)
    assert layer.communication(12, 6, of=(5, 0, 2)) == (every[5], every[0], every[2])
    for of in ([6], [-1]):
        with pytest.raises(ValueError, match=re.escape(f"the ranks in of must be from 0 to 5, got {of}")):
            layer.communication(12, 6, of=of)


def test_a_group_is_active_in_its_block_and_thread_only():
    assert active_group() is None
    refuse("nothing")
    first, second = Threads(0, 2, {}), Threads(1, 2, {})
    found = []
    with context_parallel(first):
        with context_parallel(second) as inner:
            assert active_group() is inner is second
        assert active_group() is first
        thread = threading.Thread(target=lambda: found.append(active_group()))
        thread.start()
        thread.join()
    assert found == [None]
    assert active_group() is None
