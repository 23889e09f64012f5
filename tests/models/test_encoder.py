"""The encoder, and the classifier of sequences and pairs on it."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention import mechanism, names
from subquad.models import Classifier, Encoder, EncoderConfig
from subquad.ops import flops
from subquad.state import State
from subquad.testing import assert_exact, assert_same_maths
from tests.models import small

POOLINGS = ("mean", "last", "class")
every_mechanism = pytest.mark.parametrize("name", [*small.mechanisms("bidirectional"), ["full", "llp"]], ids=str)


def encoder(attention="full", **fields):
    torch.manual_seed(0)
    return Encoder(EncoderConfig(**small.settings_of(attention, **fields))).double().eval()


@pytest.mark.parametrize(("name", "causal", "fields"), [
    *(pytest.param(p.id, form == "causal", {}, marks=p.marks)
      for form in ("bidirectional", "causal") for p in small.mechanisms(form)),
    (["luna", "full"], False, {}), (["luna", "full"], False, {"norm_position": "post", "feedforward": "relu"}),
])  # fmt: skip
def test_the_encoder_is_its_equation_and_a_memory_passes_from_layer_to_layer(name, causal, fields):
    model = encoder(name, causal=causal, num_layers=2 if isinstance(name, str) else 4, **fields)
    tokens, post = small.tokens(), "norm_position" in fields
    x, memory = model.embedding(tokens), None
    for block in model.layers:
        assert block.attention.causal == causal
        z = x if post else block.attention_norm(x)
        if block.attention.name == "luna":
            assert block.attention.config.own_memory == (memory is None)
            handed = None if memory is None else State({"handed": memory}, block.attention.config_hash)
            y, state = block.attention(z, handed)
            memory = state["handed"]
        else:
            y = block.attention.definition(z)
        x = block.attention_norm(x + y) if post else x + y
        y = block.feedforward(x if post else block.feedforward_norm(x))
        x = block.feedforward_norm(x + y) if post else x + y
    assert_same_maths(model(tokens), x if post else model.norm(x))


@torch.no_grad()
def test_post_norm_blocks_are_torchs():
    fields = {"norm_position": "post", "norm": "layer", "feedforward": "relu", "bias": True, "position": "none"}
    model, tokens = encoder(**fields), small.tokens()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    x = model.embedding(tokens)
    for block in model.layers:
        theirs = torch.nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
        mix, feed, projections = block.attention, block.feedforward, ("query", "key", "value")
        for kind in ("weight", "bias"):
            joined = torch.cat([getattr(getattr(mix, name), kind) for name in projections])
            getattr(theirs.self_attn, f"in_proj_{kind}").copy_(joined)
        pairs = [(theirs.self_attn.out_proj, mix.out), (theirs.linear1, feed.up), (theirs.linear2, feed.down)]
        pairs += [(theirs.norm1, block.attention_norm), (theirs.norm2, block.feedforward_norm)]
        for to, source in pairs:
            to.load_state_dict(source.state_dict())
        x = theirs(x)
    assert_same_maths(model(tokens), x)


@every_mechanism
def test_padding_anywhere_is_as_if_removed(name):
    for pooling in POOLINGS:
        model, tokens, mask = encoder(name, pooling=pooling), small.tokens(), small.mask()
        vectors, pooled = model(tokens, mask, pooled=True)
        assert_exact(vectors, model(tokens, mask))
        assert_exact(pooled, model(tokens, mask, pooled=True)[1])
        for row, real in enumerate(mask):
            alone = tokens[row : row + 1, real]
            assert_same_maths(vectors[row, real], model(alone)[0])
            assert_same_maths(pooled[row], model(alone, pooled=True)[1][0])
            assert not vectors[row, ~real].any()


@settings(max_examples=10)
@example(lengths=[0], pooling="mean")
@example(lengths=[0, 1], pooling="last")
@example(lengths=[0, 0], pooling="class")
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), pooling=st.sampled_from(POOLINGS))
def test_pooling_is_over_real_tokens(lengths, pooling):
    model, tokens = encoder(pooling=pooling, num_layers=1), small.tokens(len(lengths), max(lengths))
    vectors, pooled = model(tokens, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], pooled=True)
    assert vectors.shape == (*tokens.shape, 16)
    assert pooled.isfinite().all()
    for row, length in enumerate(lengths):
        if pooling == "class":
            assert not torch.isclose(pooled[row], vectors[row].mean(0)).all()
        elif length == 0:
            assert not pooled[row].any()
        else:
            real = vectors[row, :length]
            assert_same_maths(pooled[row], real.mean(0) if pooling == "mean" else real[-1])


def test_the_class_token_is_a_token_before_the_others():
    model, tokens = encoder(pooling="class", position="none"), small.tokens()
    x = torch.cat([model.class_token.expand(3, 1, -1), model.embedding(tokens)], 1)
    for block in model.layers:
        x = block(x)[0]
    assert_same_maths(model(tokens, pooled=True)[1], model.norm(x)[:, 0])
    assert_same_maths(model(tokens), model.norm(x)[:, 1:])


@pytest.mark.parametrize(("name", "pooling", "towers"), [
    ("full", "mean", 2), ("luna", "mean", 1),
    *(pytest.param(p.id, "class", 1, marks=p.marks) for p in small.mechanisms("bidirectional", quick=["full"])),
])  # fmt: skip
def test_the_cost_is_what_torch_counts(name, pooling, towers):
    flops.register()
    model, tokens = small.classifier(name, pooling=pooling, towers=towers).float().train(), small.tokens(1)
    cost = model.cost(small.TOKENS)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens, None, tokens if towers == 2 else None)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert forward.get_total_flops() == cost.mixing_flops + cost.projection_flops
    assert cost.parameters == sum(p.numel() for p in model.parameters()) == model.num_parameters()
    assert (cost.tokens, cost.state_bytes) == (small.TOKENS, 0)
    assert cost.score_entries == towers * model.encoder.cost(small.TOKENS).score_entries
    assert cost.activation_bytes > 0
    if name == "full":
        assert backward.get_total_flops() == cost.backward_flops
    if towers == 2:
        assert cost.activation_bytes > 1.5 * small.classifier().float().cost(small.TOKENS).activation_bytes


@pytest.mark.parametrize("name", ["full", "latte", "perceiver", "perceiver_io"])
def test_two_towers_are_one_encoder_and_a_head_on_both_vectors(name):
    model, one, mask = small.classifier(name, position="learned", towers=2, dropout=0.3), small.tokens(), small.mask()
    other = one.flip(0).flip(1)
    a, b = model.encoder(one, mask, pooled=True)[1], model.encoder(other, pooled=True)[1]
    hidden = F.gelu(model.head.hidden(torch.cat([a, b, a - b, a * b], 1)))
    assert model.head.hidden.weight.shape == (16, 64)
    assert_same_maths(model(one, mask, other), model.head.out(hidden))
    assert not torch.isclose(model(one, mask, other), model(other, None, one, mask)).all()
    single = small.classifier(name, position="learned", dropout=0.5)
    torch.nn.init.ones_(single.head.weight)
    torch.nn.init.zeros_(single.head.bias)
    single.dropout.train()
    assert len({single(one).sum().item() for _ in range(5)}) > 1, "dropout acts before the head"


def test_first_weights():
    model = Encoder(EncoderConfig(dim=64, num_layers=8, vocab_size=500, attention="full", pooling="class"))
    attention = model.layers[0].attention
    for weight, std in ((model.class_token, 0.02), (attention.query.weight, 0.02), (attention.out.weight, 0.02 / 4)):
        assert 0.7 * std < weight.std().item() < 1.3 * std


ONLY_CAUSAL = ["perceiver_ar", *(name for name in names() if "bidirectional" not in mechanism(name).forms)]


@pytest.mark.parametrize("name", ONLY_CAUSAL)
def test_a_mechanism_or_stack_without_the_form_says_so(name):
    with pytest.raises(ValueError, match=f"attention {name!r} has no bidirectional form; it has: causal"):
        Classifier(EncoderConfig(attention=name, position="none"))


def test_wrong_inputs_are_refused():
    model, tokens = small.classifier(position="learned", max_positions=17), small.tokens()
    pairs = small.classifier(towers=2)
    small.assert_refused(
        (lambda: model(tokens[0]), ValueError, r"tokens must have shape \[B, T\], got \[17\]"),
        (lambda: model(tokens, torch.ones(3, small.TOKENS)), TypeError, "mask must be a bool tensor"),
        (lambda: model(small.tokens(1, 18)), ValueError, "position 17 is outside of the learned table of 17 positions"),
        (lambda: pairs(tokens), ValueError, r"labels pairs of sequences \(towers=2\), but the second sequence is miss"),
        (lambda: model(tokens, None, tokens), ValueError, "labels single sequences, but a pair was given; towers=2"),
    )


@pytest.mark.parametrize(("fields", "message"), [
    ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
    ({"pooling": "max"}, "unknown pooling 'max'; valid: class, last, mean"),
    ({"loops": 3}, "loops=3 has no meaning for an encoder; leave it out"),
    ({"lookup": 64}, "lookup=64 has no meaning for an encoder"),
    ({"logit_divisor": 2.0}, "logit_divisor=2.0 has no meaning for an encoder"),
    ({"head_bias": True}, "head_bias=True has no meaning for an encoder"),
    ({"towers": 3}, "towers must be 1 or 2, got 3"),
    ({"causal": True, "pooling": "class"}, "pooling='class' does not work with causal=true: the class token comes"),
    ({"options": {"full": {"causal": True}}}, "this model is bidirectional, but the options of attention 'full' say"),
])  # fmt: skip
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Encoder(EncoderConfig(attention="full", **fields))
