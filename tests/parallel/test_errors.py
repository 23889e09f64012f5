"""What several processes cannot share is refused, with the reason."""

import threading
from typing import ClassVar

import pytest
import torch

from subquad import attention
from subquad.attention import Attention, build
from subquad.models import Decoder, DecoderConfig, Encoder, ImageModel, ImageModelConfig
from subquad.models.build import build_model
from subquad.models.encoder import EncoderConfig
from subquad.parallel import ContextGroup, active_group, context_parallel
from subquad.parallel.group import refuse
from subquad.state import State
from tests.parallel.ranks import Threads

BIDIRECTIONAL = [name for name in attention.names() if "bidirectional" in attention.mechanism(name).forms]
SHAPE = {"vocab_size": 20, "dim": 16, "num_layers": 1, "num_heads": 2, "position": "none"}
IDS = torch.zeros(1, 4, dtype=torch.int64)
X = torch.zeros(1, 4, 16)


@pytest.fixture
def group():
    """The first of two ranks; nothing that is refused may reach the other one."""
    with context_parallel(Threads(0, 2, {})) as group:
        yield group


def test_a_group_needs_torch_distributed():
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
        ContextGroup()


def test_a_process_outside_of_the_process_group_holds_nothing(monkeypatch):
    for name, value in {"is_initialized": True, "get_rank": -1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    with pytest.raises(ValueError, match="is not in this process group"):
        ContextGroup()


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_bidirectional_forms(group, name):
    layer = build(name, dim=16, num_heads=2, causal=False)
    with pytest.raises(ValueError, match=f"this {name} layer is not causal: it reads whole sequences"):
        layer(X)
    with pytest.raises(ValueError, match=f"this {name} layer is not causal"):
        layer.communication(8, 2)


def test_a_form_that_leaks(group):
    with pytest.raises(ValueError, match="this shifted layer is not causal"):
        build("shifted", dim=16, num_heads=2, wrap=True, group=4)(X)


@pytest.mark.parametrize("name", ["latte", "window", "luna"])
def test_states_and_padding(group, name):
    layer = build(name, dim=16, num_heads=2)
    with pytest.raises(ValueError, match="it takes no state"):
        layer(X, State({"seen": 1}, layer.config_hash))
    with pytest.raises(ValueError, match="has no padding"):
        layer(X, mask=torch.ones(1, 4, dtype=torch.bool))


def test_dropout_in_training(group):
    layer = build("latte", dim=16, num_heads=2, dropout=0.5)
    with pytest.raises(ValueError, match=r"dropout=0.5 draws other numbers on several processes"):
        layer(X)
    decoder = Decoder(DecoderConfig(**SHAPE, attention="latte", dropout=0.25))
    with pytest.raises(ValueError, match=r"dropout=0.25 draws other numbers on several processes"):
        decoder(IDS)


def test_a_decoder_takes_neither_state_nor_padding(group):
    decoder = Decoder(DecoderConfig(**SHAPE, attention="latte"))
    with pytest.raises(ValueError, match="it takes no state"):
        decoder(IDS, State({"seen": 1}, decoder.config_hash))
    with pytest.raises(ValueError, match="has no padding"):
        decoder.loss(IDS, IDS, torch.ones(1, 4, dtype=torch.bool))


def test_packed_documents(group):
    with pytest.raises(ValueError, match="is one document: leave doc_ids out"):
        build("linear", dim=16, num_heads=2)(X, doc_ids=IDS)
    with pytest.raises(ValueError, match="is one document: leave doc_ids out"):
        Decoder(DecoderConfig(**SHAPE, attention="linear"))(IDS, doc_ids=IDS)


def test_a_mixer_of_ones_own_that_does_not_say_parallel(group, monkeypatch):
    monkeypatch.setattr(Attention, "registry", dict(Attention.registry))

    class Own(attention.mechanism("latte")):
        name: ClassVar[str] = "test_errors"

        def mix_tokens(self, x_BTD, state, lengths_B):
            return super().mix_tokens(x_BTD, state, lengths_B)

    layer = Own(Own.Config(dim=16, num_heads=2))
    assert attention.mechanism("latte").parallel
    with pytest.raises(ValueError, match="attention 'test_errors' has no way to read a sequence that several"):
        layer(X)


def test_one_that_says_parallel_must_say_what_it_sends(monkeypatch):
    monkeypatch.setattr(Attention, "registry", dict(Attention.registry))

    class Own(attention.mechanism("latte")):
        name: ClassVar[str] = "test_errors"
        parallel = True
        sent = Attention.sent

    layer = Own(Own.Config(dim=16, num_heads=2))
    with pytest.raises(NotImplementedError, match="Own must define sent"):
        layer.communication(8, 2)


@pytest.mark.parametrize(("tokens", "ranks"), [(7, 2), (8, 0), (-2, 2)])
def test_parts_are_equal(tokens, ranks):
    with pytest.raises(ValueError, match=f"must be a multiple of ranks, got {tokens} and {ranks}"):
        build("latte", dim=16, num_heads=2).communication(tokens, ranks)


def test_stacks_encoders_and_images(group):
    options = {"perceiver_ar": {"latents": 2, "history_tokens": 2}}
    stack = build_model(DecoderConfig(**SHAPE, attention="perceiver_ar", options=options))
    with pytest.raises(ValueError, match="perceiver_ar cannot read a sequence that several processes share"):
        stack(IDS)
    with pytest.raises(ValueError, match="perceiver_ar cannot read a sequence that several processes share"):
        stack.communication(8, 2)
    with pytest.raises(ValueError, match="an encoder, which reads whole sequences, cannot read a sequence that"):
        Encoder(EncoderConfig(**SHAPE, attention="latte"))(IDS)
    with pytest.raises(ValueError, match="an image model cannot read a sequence that"):
        ImageModel(ImageModelConfig(dim=16, num_layers=1, num_heads=2, attention="linear", position="none"))(IDS)


def test_a_group_is_active_in_its_block_and_its_thread_alone():
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
