"""Comparisons of several ranks with one process. Each function runs on every rank; inputs and weights are the same."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from subquad.attention import build, mechanism, names
from subquad.models import Decoder, DecoderConfig
from subquad.parallel import ContextGroup, Sent, context_parallel
from subquad.testing import assert_same_maths
from subquad.testing.tools import assert_same_state

DIM, HEADS, BATCH = 16, 2, 2
SEEDED = threading.Lock()
"""Held while drawing weights: ranks that are threads share torch's generator."""
CAUSAL = [name for name in names() if "causal" in mechanism(name).forms]
DECODERS = {
    "hybrid with rope": {"attention": ["llp", "latte", "full", "linear"], "num_layers": 4, "position": "rope"},
    "loops with lookup": {"attention": ["elita", "window"], "loops": 2, "loop_loss": "all", "lookup": 4},
    "learned positions": {"attention": ["latte_macchiato", "longformer"], "position": "learned", "max_positions": 69},
    "sines and luna": {
        "attention": ["luna", "performer", "luna", "strided"],
        "num_layers": 4,
        "position": "sinusoidal",
    },
    "one block of llp": {"attention": "llp_printed", "position": "rope"},
    "recurrences": {"attention": ["mlstm", "mamba2", "hgrn2"], "num_layers": 3, "position": "none"},
    "sinks": {
        "attention": ["window", "llp"],
        "options": {"window": {"width": 3, "sinks": 7, "learned_sink": True}, "llp": {"segment": 4, "sinks": 3}},
    },
}
OPTIONS = {
    "llp": {"segment": 12}, "llp_printed": {"segment": 12, "first_block_projections": True, "shared_kv": False},
    "window": {"width": 7}, "latte_macchiato": {"width": 6}, "longformer": {"width": 5, "num_global": 3},
    "luna": {"memory_tokens": 3}, "strided": {"stride": 5}, "elita": {"horizon": 16}, "bigbird": {"block": 4},
    "dilated": {"width": 3, "dilation": 4}, "shifted": {"group": 10},
}  # fmt: skip


def make_layer(name, dtype=torch.float64):
    with SEEDED:
        torch.manual_seed(0)
        return build(name, dim=DIM, num_heads=HEADS, **OPTIONS.get(name, {})).to(dtype)


def make_decoder(case, **changes):
    shape = {"vocab_size": 20, "dim": DIM, "num_layers": 2, "num_heads": HEADS, "options": OPTIONS, "init_std": 0.3}
    config = DecoderConfig(**{**shape, **DECODERS[case], **changes})
    with SEEDED:
        torch.manual_seed(0)
        return Decoder(config).double()


def draw(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw_tokens(tokens, seed=1):
    return torch.randint(0, 20, (BATCH, tokens), generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module, loss, *inputs):
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, [*inputs, *named.values()], materialize_grads=True)
    return found[: len(inputs)], dict(zip(named, found[len(inputs) :], strict=True))


def compare_summed(group, actual, expected):
    """Compare sums over ranks with `expected`, by name; all are exchanged before any is compared."""
    sums = {name: group.gather(grad[None]).sum(0) for name, grad in actual.items()}
    for name, total in sums.items():
        assert_same_maths(total, expected[name], f"gradient of {name}")


def a_layer(group, name, tokens):
    """Compare outputs and every gradient of a layer on `tokens` tokens per rank."""
    layer, T = make_layer(name), tokens * group.size
    x, weight = draw(BATCH, T, DIM).requires_grad_(), draw(BATCH, T, DIM, seed=2)
    y = layer(x)[0]
    (dx,), expected = gradients(layer, (y * weight).sum(), x)
    part = group.part(x).detach().requires_grad_()
    with context_parallel(group):
        y_part = layer(part)[0]
    (dx_part,), actual = gradients(layer, (y_part * group.part(weight)).sum(), part)
    compare_summed(group, actual, expected)
    assert_same_maths(y_part, group.part(y), "output")
    assert_same_maths(dx_part, group.part(dx), "gradient of x")


def a_volume(group, name, tokens):
    """Compare the bytes that a layer's exchanges send with its formula."""
    layer = make_layer(name, torch.float32)
    x = draw(1, tokens, DIM).float().requires_grad_()
    before = group.sent
    with context_parallel(group):
        y = layer(x)[0]
    y.sum().backward()
    sent = Sent(group.sent.forward - before.forward, group.sent.backward - before.backward)
    expected = layer.communication(tokens * group.size, group.size)
    assert sent == expected[group.rank], (sent, expected)


def a_loss(group, case, tokens, checkpointing=False):
    """Compare the sums of a decoder's losses and gradients with one process."""
    decoder, T = make_decoder(case).train(), tokens * group.size
    ids, labels = draw_tokens(T), draw_tokens(T, seed=2)
    whole = decoder.loss(ids, labels, reduction="sum")
    _, expected = gradients(decoder, whole)
    decoder.gradient_checkpointing = checkpointing
    with context_parallel(group):
        loss = decoder.loss(group.part(ids), group.part(labels), reduction="sum")
    _, actual = gradients(decoder, loss)  # outside of the block: recomputed blocks must remember the group
    compare_summed(group, {"loss": loss.detach(), **actual}, {"loss": whole.detach(), **expected})


def a_prefill(group, case, tokens, more=5):
    """Compare the state after a prompt that the ranks read together, and one process's continuation from it."""
    decoder, T = make_decoder(case).eval(), tokens * group.size
    ids = draw_tokens(T + more)
    for grad in (contextlib.nullcontext(), torch.no_grad()):
        with grad:
            whole, expected = decoder(ids[:, :T])
            with context_parallel(group):
                logits, state = decoder(group.part(ids[:, :T]))
            after = decoder(ids[:, T:], expected)[0]
            assert_same_maths(logits, group.part(whole), "logits of the part")
            assert_same_state(state, expected, assert_same_maths, "state after the prompt")
            assert_same_maths(decoder(ids[:, T:], state)[0], after, "logits after it")
            one = decoder(ids[:, T : T + 1], state)[0]
            assert_same_maths(one, after[:, :1], "logits of one token after it")


def unequal_parts(group):
    decoder = make_decoder("one block of llp")
    with context_parallel(group), pytest.raises(ValueError, match="hold the same number of tokens, got"):
        decoder(draw_tokens(4 + group.rank))


def two_groups(group):
    pair = ContextGroup.neighbours(2)
    assert (pair.size, pair.rank) == (2, group.rank % 2)
    a_layer(pair, "latte", 5)
    a_prefill(pair, "learned positions", 5)
    with pytest.raises(ValueError, match="size must divide the number of processes, 4, got size=3"):
        ContextGroup.neighbours(3)


def averaged_by_ddp(group):
    """DistributedDataParallel's averages over two pairs of processes, one row per pair, are the batch's gradients."""
    from torch.nn.parallel import DistributedDataParallel

    pair = ContextGroup.neighbours(2)
    model, ids = small_model().train(), draw_tokens(24)
    _, expected = gradients(model, model(ids, labels=ids).loss)
    row = ids[group.rank // 2][None]
    model.model.decoder.gradient_checkpointing = True
    wrapped = DistributedDataParallel(model)
    with context_parallel(pair):
        wrapped(row, labels=row).loss.backward()
    for name, p in model.named_parameters():
        assert_same_maths(p.grad, expected[name], f"gradient of {name}")


def small_model():
    """Build a model of transformers with mechanisms that treat the first tokens differently."""
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    decoder = make_decoder("hybrid with rope")
    with SEEDED:
        torch.manual_seed(0)
        return SubquadForCausalLM(SubquadConfig.from_decoder(decoder.config)).double()


def fails_on_the_second(group):
    if group.rank == 1:
        raise RuntimeError("as it should")
