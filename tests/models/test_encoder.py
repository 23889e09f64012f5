"""The bidirectional stack and the classifier on it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention import mechanism, names
from subquad.models import Classifier, Decoder, DecoderConfig, Encoder, EncoderConfig
from subquad.models.stacks import STACKS
from subquad.ops import flops
from subquad.testing import assert_exact, assert_same_maths

BIDIRECTIONAL = [name for name in names() if "bidirectional" in mechanism(name).forms]
CAUSAL_ONLY = [name for name in names() if "bidirectional" not in mechanism(name).forms]
SMALL = {"llp": {"segment": 6}, "window": {"width": 4}}
VOCABULARY, TOKENS = 23, 17
POOLINGS = ("mean", "last", "class")

every_mechanism = pytest.mark.parametrize("name", BIDIRECTIONAL)
every_pooling = pytest.mark.parametrize("pooling", POOLINGS)


def config_of(attention, **fields):
    mechanisms = [attention] if isinstance(attention, str) else attention
    rotates = any(mechanism(name).rotates for name in mechanisms if name not in STACKS)
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "options": SMALL,
        "position": "rope" if rotates else "learned",
        "max_positions": 64,
        "init_std": 0.3,
    }
    return EncoderConfig(attention=attention, **(shape | fields))


def tiny(attention="full", **fields):
    torch.manual_seed(0)
    return Encoder(config_of(attention, **fields)).double().eval()


def classifier(attention="full", **fields):
    torch.manual_seed(0)
    return Classifier(config_of(attention, num_classes=3, **fields)).double().eval()


def some_tokens(batch=3, tokens=TOKENS):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def some_mask():
    """Padding on the left, on the right and in the middle."""
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, :5] = False
    mask[1, 11:] = False
    mask[2, 3:9] = False
    return mask


# --- the stack


READINGS = [(name, form == "causal") for name in names() for form in mechanism(name).forms]
"""Each mechanism in each of its forms, which is how an encoder reads."""


@pytest.mark.parametrize(("name", "causal"), READINGS)
def test_the_encoder_is_its_equation(name, causal):
    encoder, tokens = tiny(name, causal=causal), some_tokens()
    x, memory = encoder.embedding(tokens), None
    for block in encoder.layers:
        assert block.attention.causal == causal
        z = block.attention_norm(x)
        if name == "luna":
            y, _, memory = block.attention.mix(z, None, None, memory)
        else:
            y = block.attention.definition(z)
        x = x + y
        x = x + block.feedforward(block.feedforward_norm(x))
    assert_same_maths(encoder(tokens), encoder.norm(x))


def test_the_first_token_sees_the_last():
    encoder, tokens = tiny("full"), some_tokens()
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % VOCABULARY
    assert not torch.isclose(encoder(other)[:, 0], encoder(tokens)[:, 0]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_llp_reads_its_neighbours_or_its_past(causal):
    """Half segments of 3 tokens: of block i a token sees blocks i - 1 to i + 1, or i - 1 and its own up to itself."""
    encoder, tokens = tiny("llp", num_layers=1, num_heads=1, position="none", causal=causal), some_tokens()
    (block,) = encoder.layers
    x = encoder.embedding(tokens)
    z = block.attention_norm(x)
    q, k, v = block.attention.query(z), block.attention.key(z), block.attention.value(z)
    place = torch.arange(TOKENS)
    away = place[:, None] // 3 - place // 3
    seen = ((away == 0) | (away == 1)) & (place[:, None] >= place) if causal else away.abs() <= 1
    scores = (q @ k.transpose(1, 2) / 16**0.5).masked_fill(~seen, -torch.inf)
    x = x + block.attention.out(scores.softmax(-1) @ v)
    x = x + block.feedforward(block.feedforward_norm(x))
    assert_same_maths(encoder(tokens), encoder.norm(x))


@pytest.mark.parametrize(("name", "pooling"), [("llp", "last"), ("full", "mean"), ("elita", "last"), ("luna", "last")])
def test_a_causal_encoder_does_not_see_what_follows(name, pooling):
    encoder, tokens = tiny(name, causal=True, pooling=pooling), some_tokens()
    other = tokens.clone()
    other[:, 9:] = (other[:, 9:] + 1) % VOCABULARY
    assert_same_maths(encoder(other)[:, :9], encoder(tokens)[:, :9])
    assert not torch.isclose(encoder.pooled(other), encoder.pooled(tokens)).all()


def test_one_pass_gives_the_vectors_and_what_is_pooled():
    for pooling in POOLINGS:
        encoder, tokens, mask = tiny("full", pooling=pooling), some_tokens(), some_mask()
        vectors, pooled = encoder.read(tokens, mask)
        assert_exact(vectors, encoder(tokens, mask))
        assert_exact(pooled, encoder.pooled(tokens, mask))


@every_mechanism
@every_pooling
def test_padding_does_not_exist_wherever_it_stands(name, pooling):
    encoder, tokens, mask = tiny(name, pooling=pooling), some_tokens(), some_mask()
    vectors, pooled = encoder(tokens, mask), encoder.pooled(tokens, mask)
    for row in range(3):
        alone = tokens[row : row + 1, mask[row]]
        assert_same_maths(vectors[row, mask[row]], encoder(alone)[0])
        assert_same_maths(pooled[row], encoder.pooled(alone)[0])
        assert not vectors[row, ~mask[row]].any()


@every_mechanism
def test_what_stands_in_padding_changes_no_bit(name):
    model, tokens, mask = classifier(name).float(), some_tokens(), some_mask()
    assert_exact(model(torch.where(mask, tokens, -7), mask), model(tokens, mask))


@every_mechanism
def test_padding_gets_no_gradient_and_all_else_does(name):
    model, mask = classifier(name), some_mask()
    tokens = torch.where(mask, some_tokens().clamp(min=2), 1)
    model(tokens, mask).square().sum().backward()
    table = model.encoder.embedding.tokens.weight.grad
    assert not table[:2].any()
    assert table[tokens[mask].unique()].abs().amax(1).all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), pooling=st.sampled_from(POOLINGS))
def test_pooling_is_over_real_tokens(lengths, pooling):
    encoder, tokens = tiny("full", pooling=pooling, num_layers=1), some_tokens(len(lengths), 9)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    vectors, pooled = encoder(tokens, mask), encoder.pooled(tokens, mask)
    for row, length in enumerate(lengths):
        if pooling == "class":
            assert not torch.isclose(pooled[row], vectors[row].mean(0)).all()
        elif length == 0:
            assert not pooled[row].any()
        else:
            real = vectors[row, :length]
            assert_same_maths(pooled[row], real.mean(0) if pooling == "mean" else real[-1])


@every_pooling
def test_the_shortest_sequences(pooling):
    model = classifier("full", pooling=pooling)
    for tokens in (0, 1):
        assert model(some_tokens(2, tokens)).isfinite().all()
        assert model.encoder(some_tokens(2, tokens)).shape == (2, tokens, 16)


def test_the_class_token_is_a_token_before_the_others():
    encoder, tokens = tiny("full", pooling="class", position="none"), some_tokens()
    x = torch.cat([encoder.class_token.expand(3, 1, -1), encoder.embedding(tokens)], 1)
    for block in encoder.layers:
        x = block(x, None, None)[0]
    assert_same_maths(encoder.pooled(tokens), encoder.norm(x)[:, 0])
    assert_same_maths(encoder(tokens), encoder.norm(x)[:, 1:])


def test_a_batch_is_its_rows():
    model, tokens, mask = classifier(["full", "llp"]), some_tokens(), some_mask()
    rows = [model(tokens[i : i + 1], mask[i : i + 1]) for i in range(3)]
    assert_same_maths(model(tokens, mask), torch.cat(rows))


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope"])
def test_positions_count_real_tokens(position):
    encoder, tokens, mask = tiny("full", position=position), some_tokens(), some_mask()
    assert_same_maths(encoder(tokens, mask)[0, 5:], encoder(tokens[:1, 5:])[0])
    assert not torch.isclose(encoder(tokens.flip(1)).flip(1), encoder(tokens)).all()


# --- Luna's memory


@pytest.mark.parametrize("stack", ["luna", ["luna", "full"]])
def test_the_memory_is_handed_from_layer_to_layer(stack):
    encoder, tokens = tiny(stack, num_layers=4), some_tokens()
    luna = [block.attention for block in encoder.layers if block.attention.name == "luna"]
    assert [layer.config.own_memory for layer in luna] == [True] + [False] * (len(luna) - 1)
    calls = []
    for layer in luna:
        inner = layer.mix

        def spy(*args, inner=inner):
            result = inner(*args)
            calls.append((args[3], result[2]))
            return result

        layer.mix = spy
    encoder(tokens)
    assert calls[0][0] is None
    for (_, handed), (taken, _) in itertools.pairwise(calls):
        assert taken is handed


def test_a_decoder_hands_the_memory_on_too():
    decoder = Decoder(DecoderConfig(vocab_size=VOCABULARY, dim=16, num_layers=3, attention="luna", position="none"))
    taken = []
    for block in decoder.blocks():
        block.register_forward_hook(lambda _, given, result: taken.append((given[3], result[2])))
    decoder(some_tokens())
    assert [block.attention.config.own_memory for block in decoder.blocks()] == [True, False, False]
    assert taken[0][0] is None
    assert all(given is not None and given is handed for (_, handed), (given, _) in itertools.pairwise(taken))


# --- gradients again, compiled, counted


@every_mechanism
def test_gradients_are_the_same_with_checkpointing(name):
    encoder, tokens, mask = tiny(name, dropout=0.1).float().train(), some_tokens(), some_mask()
    gradients = []
    for checkpointing in (False, True):
        encoder.gradient_checkpointing = checkpointing
        encoder.zero_grad()
        torch.manual_seed(3)
        encoder.pooled(tokens, mask).square().sum().backward()
        gradients.append([p.grad.clone() for p in encoder.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert_exact(checkpointed, plain)


def test_checkpointing_computes_the_blocks_again():
    encoder = tiny("full").train()
    calls = []
    encoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    encoder.gradient_checkpointing = True
    encoder.pooled(some_tokens()).sum().backward()
    assert len(calls) == 2


@torch.no_grad()
def test_compiled_equals_eager():
    torch._dynamo.reset()
    model, tokens, mask = classifier("full", num_layers=1), some_tokens(), some_mask()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_maths(compiled(tokens, mask), model(tokens, mask))


@every_mechanism
@pytest.mark.parametrize("pooling", ["mean", "class"])
def test_the_cost_is_what_torch_counts(name, pooling):
    flops.register()
    model, tokens = classifier(name, pooling=pooling).float().train(), some_tokens(1)
    cost = model.cost(TOKENS)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert forward.get_total_flops() == cost.mixing_flops + cost.projection_flops
    assert cost.parameters == sum(p.numel() for p in model.parameters()) == model.num_parameters()
    assert (cost.tokens, cost.state_bytes) == (TOKENS, 0)
    assert cost.activation_bytes > 0
    if name == "full":
        assert backward.get_total_flops() == cost.backward_flops


# --- two towers


def other_tokens():
    return some_tokens().flip(0).flip(1)


@pytest.mark.parametrize("name", ["full", "latte", "perceiver", "perceiver_io"])
def test_two_towers_are_one_encoder_and_a_head_on_both_vectors(name):
    config = {"position": "learned", "towers": 2, "dropout": 0.3}
    model, one, other, mask = classifier(name, **config), some_tokens(), other_tokens(), some_mask()
    a, b = model.encoder.pooled(one, mask), model.encoder.pooled(other)
    head = model.head
    hidden = torch.nn.functional.gelu(head.hidden(torch.cat([a, b, a - b, a * b], 1)))
    assert head.hidden.weight.shape == (16, 64)
    assert_same_maths(model(one, mask, other), head.out(hidden))
    assert not torch.isclose(model(one, mask, other), model(other, None, one, mask)).all()


def test_the_cost_of_a_pair_is_what_torch_counts():
    flops.register()
    model, tokens = classifier("full", towers=2).float().train(), some_tokens(1)
    cost = model.cost(TOKENS)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens, None, tokens)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert forward.get_total_flops() == cost.mixing_flops + cost.projection_flops
    assert backward.get_total_flops() == cost.backward_flops
    assert cost.activation_bytes > 1.5 * classifier("full").float().cost(TOKENS).activation_bytes


def test_a_pair_is_needed_where_there_are_two_towers_and_nowhere_else():
    tokens = some_tokens()
    with pytest.raises(ValueError, match="labels pairs of sequences .towers=2., but the second sequence is missing"):
        classifier(towers=2)(tokens)
    with pytest.raises(ValueError, match="labels single sequences, but a pair was given; towers=2 makes"):
        classifier()(tokens, None, tokens)


# --- first weights, dropout


def test_first_weights_are_the_decoders():
    encoder = Encoder(config_of("full", dim=64, num_layers=8, vocab_size=500, init_std=0.02, pooling="class"))
    blocks = list(encoder.layers)
    for weight, std in (
        (encoder.embedding.tokens.weight, 0.02),
        (encoder.class_token, 0.02),
        (blocks[0].attention.query.weight, 0.02),
        (blocks[0].attention.out.weight, 0.02 / 4),
        (blocks[0].feedforward.down.weight, 0.02 / 4),
    ):
        assert 0.7 * std < weight.std().item() < 1.3 * std
    assert_exact(blocks[0].attention_norm.weight.detach(), torch.ones(64))


def test_dropout_acts_before_the_head():
    model = classifier("full", dropout=0.5)
    torch.nn.init.eye_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    model.encoder.eval()
    model.dropout.train()
    logits = torch.cat([model(some_tokens()) for _ in range(20)])
    assert 0 < (logits == 0).double().mean().item() < 1


# --- mistakes


@pytest.mark.parametrize("name", CAUSAL_ONLY)
def test_a_mechanism_without_the_form_says_so(name):
    with pytest.raises(ValueError, match=f"attention {name!r} has no bidirectional form; it has: causal"):
        tiny(name)


def test_a_stack_without_the_form_says_so():
    with pytest.raises(ValueError, match="'perceiver_ar' has no bidirectional form; it has: causal"):
        Classifier(EncoderConfig(attention="perceiver_ar"))


@pytest.mark.parametrize("name", ["perceiver", "perceiver_io"])
def test_a_perceiver_is_not_causal(name):
    with pytest.raises(ValueError, match=f"{name} reads whole sequences and has no causal form"):
        classifier(name, position="learned", causal=True)


def test_an_option_that_contradicts_the_model_is_refused():
    with pytest.raises(ValueError, match="this model is bidirectional, but the options of attention 'full' say causal"):
        tiny("full", options={"full": {"causal": True}})


def test_wrong_tokens_and_masks_are_refused():
    encoder, tokens = tiny("full"), some_tokens()
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\], got \[17\]"):
        encoder(tokens[0])
    with pytest.raises(TypeError, match=r"tokens must be int64 or int32, got torch\.float32"):
        encoder(tokens.float())
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        encoder(tokens, torch.ones(3, TOKENS))
    with pytest.raises(ValueError, match=r"mask must have shape \(3, 17\)"):
        encoder.pooled(tokens, torch.ones(3, 4, dtype=torch.bool))


def test_a_learned_table_that_is_too_short_is_named():
    with pytest.raises(ValueError, match="position 10 is outside of the learned table of 10 positions"):
        tiny("full", position="learned", max_positions=10)(some_tokens(1, 11))


@pytest.mark.parametrize(("fields", "message"), [
    ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
    ({"pooling": "max"}, "unknown pooling 'max'; valid: class, last, mean"),
    ({"loops": 3}, "an encoder has neither loops nor a look-up head, got loops=3, lookup=None"),
    ({"towers": 3}, "towers must be 1 or 2, got 3"),
    ({"causal": True, "pooling": "class"}, "pooling='class' does not work with causal=true: the class token comes"),
    ({"lookup": 64}, "an encoder has neither loops nor a look-up head, got loops=1, lookup=64"),
])  # fmt: skip
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**fields)


def test_a_decoders_settings_carry_over():
    config = config_of("llp", ff_mult=2.0, norm="layer")
    made = EncoderConfig.from_decoder(config, num_classes=5, pooling="last")
    assert made == config.replace(num_classes=5, pooling="last")
    assert EncoderConfig.from_dict(made.to_dict()) == made
