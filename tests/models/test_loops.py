"""ELiTA's other parts in a decoder: loops, the look-up over the logits, the bilinear feed-forward network."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad import State
from subquad.attention import mechanism, names
from subquad.models import Decoder, DecoderConfig
from subquad.ops import flops, loss
from subquad.testing import assert_exact, assert_same_maths
from subquad.testing.tools import largest_allocation

VOCABULARY, TOKENS, LOOPS = 23, 17, 3
ELITAS = {"feedforward": "bilinear", "loops": LOOPS, "lookup": 31}
SOME = ["full", "llp", "latte", "elita"]
some_mechanisms = pytest.mark.parametrize("name", SOME)
every_mechanism = pytest.mark.parametrize("name", [name for name in names() if "causal" in mechanism(name).forms])


def tiny(attention="window", **fields):
    """Float64, with biases that are not zero, so that each pass differs from the others."""
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "options": {"llp": {"segment": 6}, "window": {"width": 4}},
        "position": "rope" if mechanism(attention).rotates else "sinusoidal",
        "init_std": 0.3,
    }
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(attention=attention, **(shape | ELITAS | fields))).double().eval()
    with torch.no_grad():
        for bias in decoder.pass_biases.parameters():
            bias.normal_()
    return decoder


def some_tokens(batch=3, tokens=TOKENS):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def some_mask():
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, :5], mask[1, 11:], mask[2, 3:9] = False, False, False
    return mask


def passes_of(decoder, tokens):
    """The logits after each pass, from the definitions."""
    x = decoder.embedding(tokens, 0, None)
    logits = []
    for p in range(decoder.config.loops):
        x = x + decoder.get_parameter(f"pass_biases.{p}.bias")
        for block in decoder.blocks():
            x = x + block.attention.definition(block.attention_norm(x))
            x = x + block.feedforward(block.feedforward_norm(x))
        z = decoder.norm(x) @ decoder.head_weight.mT
        logits.append(
            z if decoder.lookup is None else z + F.silu(z @ decoder.lookup.up.weight.mT) @ decoder.lookup.down.weight.mT
        )
    return logits


@some_mechanisms
def test_a_looped_decoder_is_its_equation(name):
    decoder, tokens = tiny(name), some_tokens()
    first, _, last = passes_of(decoder, tokens)
    assert_same_maths(decoder(tokens)[0], last)
    assert_same_maths(decoder.logits(decoder.vectors(tokens)[:, -1]), last[:, -1])
    assert not torch.isclose(first, last).any(-1).all()
    assert_same_maths(tiny(name, lookup=None)(tokens)[0], passes_of(tiny(name, lookup=None), tokens)[-1])


def test_one_pass_has_nothing_of_its_own():
    plain, tokens = tiny(loops=1, lookup=None), some_tokens()
    names = {name.partition(".")[0] for name, _ in plain.named_parameters()}
    assert names == {"embedding", "layers", "norm"}
    x = plain.embedding(tokens, 0, None)
    for block in plain.blocks():
        x, _, _ = block(x, None, None)
    assert_exact(plain(tokens)[0], F.linear(plain.norm(x), plain.head_weight))
    assert set(plain(tokens)[1]) == {"seen", "layers.0", "layers.1"}
    assert_exact(
        plain.train().loss(tokens, tokens), tiny(loops=1, lookup=None, loop_loss="all").train().loss(tokens, tokens)
    )


def test_passes_share_their_layers_and_have_a_bias_each():
    once, looped = tiny(loops=1, lookup=None), tiny(lookup=None)
    assert looped.num_parameters() == once.num_parameters() + LOOPS * 16
    assert [p.ndim for p in looped.pass_biases.parameters()] == [1] * LOOPS  # vectors, which do not decay
    with_lookup = tiny()
    assert with_lookup.num_parameters() == looped.num_parameters() + 2 * VOCABULARY * 31


@some_mechanisms
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, TOKENS), max_size=4).map(sorted))
def test_any_split_equals_the_whole(name, cuts):
    decoder, tokens = tiny(name), some_tokens()
    parts, state = [], None
    for part in tokens.tensor_split(cuts, dim=1):
        logits, state = decoder(part, state)
        parts.append(logits)
    assert_same_maths(torch.cat(parts, 1), decoder(tokens)[0])
    assert set(state) == {"seen", *(f"passes.{p}.layers.{i}" for p in range(LOOPS) for i in range(2))}


@every_mechanism
def test_one_token_at_a_time_equals_the_whole(name):
    decoder, tokens = tiny(name), some_tokens()
    parts, state = [], None
    for part in tokens.split(1, dim=1):
        logits, state = decoder(part, state)
        parts.append(logits)
    assert_same_maths(torch.cat(parts, 1), decoder(tokens)[0])


@every_mechanism
def test_padding_does_not_exist(name):
    decoder, tokens, mask = tiny(name, bias=True), some_tokens(), some_mask()
    logits, state = decoder(tokens, mask=mask)
    assert_exact(logits, decoder(torch.where(mask, tokens, 2), mask=mask)[0])
    after, _ = decoder(tokens[:, :4], state)
    for row in range(3):
        alone, alone_state = decoder(tokens[row : row + 1, mask[row]])
        assert_same_maths(logits[row, mask[row]], alone[0])
        assert not logits[row, ~mask[row]].any()
        assert_same_maths(after[row], decoder(tokens[row : row + 1, :4], alone_state)[0][0])


def test_a_later_token_changes_no_bit_of_an_earlier_output():
    decoder, tokens = tiny("llp").float(), some_tokens()
    other = tokens.clone()
    other[:, 9:] = (other[:, 9:] + 1) % VOCABULARY
    before, after = decoder(tokens)[0], decoder(other)[0]
    assert_exact(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("lookup", [None, 31])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_training_takes_the_losses_of_all_passes_and_evaluation_that_of_the_last(lookup, reduction):
    decoder, tokens, mask = tiny(loop_loss="all", lookup=lookup), some_tokens(), some_mask()
    labels = some_tokens().flip(0).masked_fill(tokens == 3, -100)
    losses = [F.cross_entropy(z.mT, labels, reduction=reduction) for z in passes_of(decoder, tokens)]
    assert_same_maths(decoder.train().loss(tokens, labels, reduction=reduction), torch.stack(losses).mean(0))
    assert_same_maths(decoder.eval().loss(tokens, labels, reduction=reduction), losses[-1])
    last = tiny(loop_loss="last", lookup=lookup).train()
    assert_same_maths(last.loss(tokens, labels, reduction=reduction), losses[-1])
    padded = decoder.train().loss(tokens, labels, mask, reduction="sum")
    alone = [decoder.loss(tokens[b : b + 1, mask[b]], labels[b : b + 1, mask[b]], reduction="sum") for b in range(3)]
    assert_same_maths(padded, torch.stack(alone).sum())


def test_the_loss_of_all_passes_reaches_every_parameter():
    decoder, tokens = tiny(loop_loss="all").train(), some_tokens()
    decoder.loss(tokens, tokens).backward()
    assert all(p.grad.any() for p in decoder.parameters())


@pytest.mark.parametrize("loop_loss", ["last", "all"])
def test_gradients_are_the_same_with_checkpointing(loop_loss):
    decoder = tiny(loop_loss=loop_loss, dropout=0.1, attention_dropout=0.1).train()
    tokens, calls, grads = some_tokens(), [], []
    decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing in (False, True):
        decoder.gradient_checkpointing = checkpointing
        decoder.zero_grad()
        torch.manual_seed(3)
        decoder.loss(tokens, tokens).backward()
        grads.append([p.grad.clone() for p in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert len(calls) == LOOPS + 2 * LOOPS


@pytest.mark.parametrize("loop_loss", ["last", "all"])
def test_the_loss_in_chunks_is_that_of_the_logits_with_every_gradient(loop_loss, monkeypatch):
    decoder, tokens, results = tiny(loop_loss=loop_loss).train(), some_tokens(), []
    for entries in (loss.CHUNK_ENTRIES, 5 * 31):
        monkeypatch.setattr(loss, "CHUNK_ENTRIES", entries)
        decoder.zero_grad()
        nats = decoder.loss(tokens, tokens)
        nats.backward()
        results.append([nats.detach(), *(p.grad.clone() for p in decoder.parameters())])
    for whole, chunked in zip(*results, strict=True):
        assert_same_maths(chunked, whole)


def test_the_loss_never_holds_the_look_ups_rows_for_all_tokens(monkeypatch):
    decoder, tokens = tiny(lookup=512, dim=8).float().train(), some_tokens(2, 64)
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", 32 * 512)
    held = largest_allocation(lambda: decoder.loss(tokens, tokens).backward())
    assert held < 4 * tokens.numel() * 512
    assert largest_allocation(lambda: decoder(tokens)) == 4 * tokens.numel() * 512


def test_a_saved_state_comes_back_bit_for_bit_and_goes_on(tmp_path):
    decoder, tokens = tiny("latte"), some_tokens()
    _, state = decoder(tokens, mask=some_mask())
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors", config_hash=decoder.config_hash)
    assert loaded.nbytes == state.nbytes > 0
    for name in state:
        if name != "seen":
            for entry in state.child(name):
                assert_exact(loaded.child(name).tensor(entry), state.child(name).tensor(entry), entry)
    assert_same_maths(decoder(tokens, loaded)[0], decoder(tokens, state)[0])
    with pytest.raises(ValueError, match=r"made by configuration .* but this decoder has"):
        tiny("latte", loops=2)(tokens, state)


def test_compiled_equals_eager():
    torch._dynamo.reset()
    decoder, tokens = tiny("latte", num_layers=1, loops=2, loop_loss="all").train(), some_tokens()
    gradients = []
    for function in (decoder.loss, torch.compile(decoder.loss, fullgraph=True, backend="aot_eager")):
        decoder.zero_grad()
        function(tokens, tokens).backward()
        gradients.append([p.grad.clone() for p in decoder.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        assert_same_maths(actual, expected)


def test_first_weights_count_every_pass_as_depth():
    torch.manual_seed(0)
    shape = {"dim": 128, "num_layers": 3, "attention": "full", "loops": 3, "lookup": 300, "feedforward": "bilinear"}
    decoder = Decoder(DecoderConfig(vocab_size=200, init_std=0.05, **shape))
    block, small = decoder.blocks()[0], 0.05 / math.sqrt(2 * 3 * 3)
    assert block.feedforward.down in block.output_projections()
    for layer, std in (
        (block.attention.out, small), (block.feedforward.down, small), (block.feedforward.wide, 0.05),
        (decoder.lookup.up, 0.05), (decoder.lookup.down, 0.05),
    ):  # fmt: skip
        assert math.isclose(layer.weight.std().item(), std, rel_tol=0.1)
    assert not any(bias.any() for bias in decoder.pass_biases.parameters())


@pytest.mark.parametrize("loop_loss", ["last", "all"])
def test_cost_counts_layers_for_every_pass_and_parameters_once(loop_loss):
    once, looped = tiny("latte", loops=1, lookup=None).cost(100), tiny("latte", lookup=None).cost(100)
    decoder = tiny("latte", loop_loss=loop_loss)
    cost, heads = decoder.cost(100), LOOPS if loop_loss == "all" else 1
    head, lookup = 200 * VOCABULARY * 16, 200 * 2 * VOCABULARY * 31
    assert looped.projection_flops - head == LOOPS * (once.projection_flops - head)
    for name in ("mixing_flops", "score_entries", "unmasked_entries", "state_bytes"):
        assert getattr(cost, name) == getattr(looped, name) == LOOPS * getattr(once, name)
    assert cost.projection_flops == looped.projection_flops + (heads - 1) * head + heads * lookup
    assert cost.backward_flops == looped.backward_flops + 2 * ((heads - 1) * head + heads * lookup)
    assert cost.parameters == decoder.num_parameters()
    assert once.activation_bytes < looped.activation_bytes < cost.activation_bytes
    _, state = decoder.float()(some_tokens(1, 50))
    assert state.nbytes == cost.state_bytes  # a state of constant size


@pytest.mark.parametrize("name", ["full", "latte", "linear"])
@pytest.mark.parametrize("feedforward", ["bilinear", "swiglu"])
def test_the_operations_are_those_that_torch_counts(name, feedforward):
    flops.register()
    decoder = tiny(name, feedforward=feedforward).float()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder(some_tokens(1, 64))
    cost = decoder.cost(64)
    assert counter.get_total_flops() == cost.mixing_flops + cost.projection_flops


def test_counting_the_cost_leaves_the_modes_and_the_weights_alone():
    decoder = tiny("latte").train()
    decoder.layers[1].eval()
    modes = [module.training for module in decoder.modules()]
    weights = [p.clone() for p in decoder.parameters()]
    decoder.cost(100)
    assert [module.training for module in decoder.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights, decoder.parameters(), strict=True))


def test_one_batch_overfits():
    torch.manual_seed(0)
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "attention": "latte", "position": "sinusoidal"}
    decoder = Decoder(DecoderConfig(vocab_size=VOCABULARY, loop_loss="all", **shape, **ELITAS)).train()
    tokens = some_tokens(2)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
    for _ in range(120):
        optimizer.zero_grad()
        nats = decoder.loss(tokens[:, :-1], tokens[:, 1:])
        nats.backward()
        optimizer.step()
    assert nats.item() < 0.5
