import math

import pytest
import torch
from torch.nn import functional as F

from subquad import State
from subquad.attention import mechanism, names
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths

SMALL = {
    "bigbird": {"block": 3, "num_global": 1, "num_random": 1},
    "dilated": {"width": 2, "dilation": 3},
    "latte_macchiato": {"width": 4},
    "llp": {"segment": 6},
    "longformer": {"width": 4},
    "shifted": {"group": 4},
    "strided": {"stride": 4, "columns": 2},
    "window": {"width": 4},
}
VOCABULARY, TOKENS = 23, 17


def tiny(attention, **fields):
    """A decoder of two layers whose segments and windows are shorter than the sequence."""
    mechanisms = [attention] if isinstance(attention, str) else attention
    rotates = any(mechanism(name).rotates for name in mechanisms)
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "options": SMALL,
        "position": "rope" if rotates else "sinusoidal",
        "init_std": 0.3,
    }
    torch.manual_seed(0)
    return Decoder(DecoderConfig(attention=attention, **(shape | fields))).eval()


def some_tokens(batch=3, tokens=TOKENS):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def some_mask():
    """Padding on the left, on the right and in the middle."""
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, :5] = False
    mask[1, 11:] = False
    mask[2, 3:9] = False
    return mask


every_mechanism = pytest.mark.parametrize("name", [name for name in names() if "causal" in mechanism(name).forms])
every_position = pytest.mark.parametrize("position", ["rope", "sinusoidal", "learned", "none"])


@every_mechanism
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_decoder_is_its_equation(name, tie_embeddings):
    layers = 1 if name == "luna" else 2  # a layer that is handed a memory has no definition of its own
    decoder = tiny(name, num_layers=layers, tie_embeddings=tie_embeddings, position="none").double()
    tokens = some_tokens()
    x = decoder.embedding.tokens.weight[tokens]
    for block in decoder.blocks():
        x = x + block.attention.definition(block.attention_norm(x))
        x = x + block.feedforward(block.feedforward_norm(x))
    matrix = decoder.embedding.tokens.weight if tie_embeddings else decoder.head.weight
    assert_same_maths(decoder(tokens)[0], decoder.norm(x) @ matrix.mT)
    assert_same_maths(decoder.hidden(tokens)[0], decoder.norm(x))
    assert_same_maths(decoder.vectors(tokens), decoder.norm(x))


@pytest.mark.parametrize("silent", ["attention", "feedforward"])
def test_dropout_acts_on_each_branch(silent):
    block = tiny("full", dropout=0.5).blocks()[0].train()
    silenced = block.attention.out if silent == "attention" else block.feedforward.down
    torch.nn.init.zeros_(silenced.weight)
    x = torch.randn(4, 64, 16)
    untouched = (block(x, None, None)[0] == x).double().mean().item()
    assert math.isclose(untouched, 0.5, abs_tol=0.05)
    block.eval()
    assert not (block(x, None, None)[0] == x).all()


@every_mechanism
@pytest.mark.parametrize("cuts", [[9], [1, 5, 6, 6, 14], list(range(1, TOKENS))])
def test_any_split_equals_the_whole(name, cuts):
    decoder, tokens = tiny(name).double(), some_tokens()
    whole, _ = decoder(tokens)
    parts, state = [], None
    for part in tokens.tensor_split(cuts, dim=1):
        logits, state = decoder(part, state)
        parts.append(logits)
    assert_same_maths(torch.cat(parts, 1), whole)
    assert state.seen == TOKENS


@every_mechanism
def test_padding_does_not_exist_wherever_it_stands(name):
    decoder, tokens, mask = tiny(name).double(), some_tokens(), some_mask()
    logits, state = decoder(tokens, mask=mask)
    assert_exact(state.seen, mask.sum(1))
    after, _ = decoder(tokens[:, :4], state)
    for row in range(3):
        alone, alone_state = decoder(tokens[row : row + 1, mask[row]])
        assert_same_maths(logits[row, mask[row]], alone[0])
        assert not logits[row, ~mask[row]].any()
        assert_same_maths(after[row], decoder(tokens[row : row + 1, :4], alone_state)[0][0])


@every_mechanism
def test_what_stands_in_padding_changes_nothing(name):
    decoder, tokens, mask = tiny(name), some_tokens(), some_mask()
    other = torch.where(mask, tokens, -7)
    assert_exact(decoder(tokens, mask=mask)[0], decoder(other, mask=mask)[0])
    labels = torch.where(mask, tokens, 3)
    loss = decoder.loss(tokens, tokens, mask)
    assert_exact(loss, decoder.loss(other, labels, mask))


@every_mechanism
def test_padding_gets_no_gradient(name):
    decoder, mask = tiny(name, tie_embeddings=False), some_mask()
    tokens = torch.where(mask, some_tokens().clamp(min=2), 1)
    decoder(tokens, mask=mask)[0].square().sum().backward()
    gradient = decoder.embedding.tokens.weight.grad
    assert not gradient[:2].any()
    assert gradient[tokens[mask].unique()].abs().amax(1).all()


@every_position
def test_positions_of_every_kind_count_real_tokens_and_go_on_from_a_state(position):
    decoder, tokens, mask = tiny("full", position=position, max_positions=32).double(), some_tokens(), some_mask()
    logits, state = decoder(tokens, mask=mask)
    more, state = decoder(tokens, state, mask.flip(1))
    for row in range(3):
        real = torch.cat([tokens[row, mask[row]], tokens[row, mask.flip(1)[row]]])
        alone, _ = decoder(real[None])
        assert_same_maths(torch.cat([logits[row, mask[row]], more[row, mask.flip(1)[row]]]), alone[0])


def test_positions_change_the_logits():
    logits = {}
    for position in ("rope", "sinusoidal", "learned", "none"):
        decoder = tiny("full", position=position)
        logits[position] = decoder(torch.tensor([[5, 5, 5]]))[0]
    assert_exact(logits["none"][0, 0], logits["none"][0, 1])
    assert not torch.equal(logits["sinusoidal"][0, 0], logits["sinusoidal"][0, 1])
    assert not torch.equal(logits["learned"][0, 0], logits["learned"][0, 1])
    tokens = torch.tensor([[3, 9, 5], [9, 3, 5]])
    rotated, plain = (tiny("full", position=p, num_layers=1).double()(tokens)[0] for p in ("rope", "none"))
    assert not torch.isclose(rotated[0, 2], rotated[1, 2]).all()
    assert_same_maths(plain[0, 2], plain[1, 2])


def test_a_learned_table_that_is_too_short_names_both_numbers():
    decoder = tiny("full", position="learned", max_positions=10)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, :2] = False
    decoder(some_tokens(1, 12), mask=mask)
    with pytest.raises(ValueError, match="position 11 is outside of the learned table of 10 positions"):
        decoder(some_tokens(1, 12))


@every_mechanism
def test_the_loss_is_the_cross_entropy_of_the_logits(name):
    decoder, tokens = tiny(name).double(), some_tokens()
    labels = some_tokens().flip(0).clone()
    labels[1, 4:9] = -100
    logits = decoder(tokens)[0]
    expected = F.cross_entropy(logits.mT, labels, reduction="none")
    assert_same_maths(decoder.loss(tokens, labels, reduction="none"), expected)
    assert_same_maths(decoder.loss(tokens, labels, reduction="sum"), expected.sum())
    assert_same_maths(decoder.loss(tokens, labels), expected.sum() / (labels != -100).sum())


def test_the_loss_leaves_padding_out():
    decoder, tokens, mask = tiny("full").double(), some_tokens(), some_mask()
    expected = F.cross_entropy(decoder(tokens, mask=mask)[0][mask], tokens[mask])
    assert_same_maths(decoder.loss(tokens, tokens, mask), expected)
    assert not decoder.loss(tokens, tokens, mask, reduction="none")[~mask].any()


@every_mechanism
def test_gradients_are_the_same_with_checkpointing(name):
    decoder, tokens = tiny(name, dropout=0.1, attention_dropout=0.1).train(), some_tokens()
    grads = []
    for checkpointing in (False, True):
        decoder.gradient_checkpointing = checkpointing
        decoder.zero_grad()
        torch.manual_seed(3)
        decoder.loss(tokens, tokens).backward()
        grads.append([p.grad.clone() for p in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_checkpointing_computes_the_blocks_again():
    decoder, tokens = tiny("full").train(), some_tokens()
    calls = []
    decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    decoder.gradient_checkpointing = True
    decoder.loss(tokens, tokens).backward()
    assert len(calls) == 2


@every_mechanism
def test_a_saved_state_comes_back_bit_for_bit_and_goes_on(name, tmp_path):
    decoder, tokens, mask = tiny(name).double(), some_tokens(), some_mask()
    _, state = decoder(tokens, mask=mask)
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors", config_hash=decoder.config_hash)
    assert loaded.nbytes == state.nbytes > 0
    for layer in ("layers.0", "layers.1"):
        assert set(loaded.child(layer)) == set(state.child(layer))
        for entry in loaded.child(layer):
            assert_exact(loaded.child(layer).tensor(entry), state.child(layer).tensor(entry), entry)
    assert_same_maths(decoder(tokens, loaded)[0], decoder(tokens, state)[0])


@every_mechanism
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(name, tokens):
    decoder = tiny(name).double()
    logits, state = decoder(some_tokens(3, tokens))
    assert logits.shape == (3, tokens, VOCABULARY)
    assert state.seen == tokens
    assert decoder.loss(some_tokens(3, tokens), some_tokens(3, tokens)).isfinite()
    more, _ = decoder(some_tokens(), state)
    expected = decoder(torch.cat([some_tokens(3, tokens), some_tokens()], 1))[0][:, tokens:]
    assert_same_maths(more, expected)


@pytest.mark.parametrize("name", ["full", "llp", "latte", "linear"])  # the contract compiles every mechanism
def test_compiled_equals_eager(name):
    torch._dynamo.reset()
    decoder, tokens, mask = tiny(name, num_layers=1).double(), some_tokens(), some_mask()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    gradients = []
    for model in (decoder, compiled):
        decoder.zero_grad()
        model(tokens)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in decoder.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        assert_same_maths(actual, expected)
    with torch.no_grad():
        logits, state = decoder(tokens, mask=mask)
        compiled_logits, compiled_state = compiled(tokens, None, mask)
        assert_same_maths(compiled_logits, logits)
        assert_same_maths(compiled(tokens[:, :1], compiled_state)[0], decoder(tokens[:, :1], state)[0])


@every_mechanism
def test_autocast_computes_in_bfloat16_and_keeps_the_loss_in_float32(name):
    decoder, tokens = tiny(name).train(), some_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = decoder(tokens)
        loss = decoder.loss(tokens, tokens)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in decoder.parameters())
    exact, plain = tiny(name).double().loss(tokens, tokens), tiny(name).bfloat16().loss(tokens, tokens)
    assert_in_budget(loss, plain, exact, torch.bfloat16)
