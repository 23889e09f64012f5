import math

import pytest
import torch

from subquad.attention import mechanism, names
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_exact, assert_same_maths

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
every_mechanism = pytest.mark.parametrize("name", [name for name in names() if "causal" in mechanism(name).forms])


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


def test_a_hybrid_repeats_its_list():
    decoder = tiny(["llp", "full"], num_layers=4).double()
    assert [block.attention.name for block in decoder.blocks()] == ["llp", "full", "llp", "full"]
    tokens = some_tokens()
    first, state = decoder(tokens[:, :7])
    second, _ = decoder(tokens[:, 7:], state)
    assert_same_maths(torch.cat([first, second], 1), decoder(tokens)[0])


def test_settings_reach_the_mechanisms_that_have_them():
    decoder = tiny(
        ["window", "linear"],
        num_kv_heads=1,
        rope_base=500.0,
        attention_dropout=0.25,
        bias=True,
        options={"window": {"width": 3, "dropout": 0.5}, "latte": {"num_heads": 1}},
    )
    window, linear = (block.attention.config for block in decoder.blocks())
    assert (window.num_kv_heads, window.rope, window.rope_base, window.bias) == (1, True, 500.0, True)
    assert (window.width, window.dropout, linear.dropout, linear.bias) == (3, 0.5, 0.25, True)
    assert tiny("window", position="none").blocks()[0].attention.config.rope is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "lpl"}, "unknown attention 'lpl'; did you mean 'llp'"),
        ({"options": {"lpl": {}}}, "unknown attention 'lpl'; did you mean 'llp'"),
        ({"options": {"llp": {"segments": 4}}}, "attention 'llp' has no option 'segments'; did you mean 'segment'"),
        ({"options": {"window": {"widht": 4}}}, "attention 'window' has no option 'widht'; did you mean 'width'"),
        ({"options": {"llp": {"dim": 4}}}, "attention 'llp' has no option 'dim'"),
        (
            {"options": {"window": {"width": -3}}},
            "options of attention 'window', which no layer uses: width must be at least 1, got -3",
        ),
        ({"options": {"latte": {"num_heads": 5}}}, "options of attention 'latte', which no layer uses: dim must be"),
        ({"attention": "linformer", "position": "none"}, "attention 'linformer' has no causal form"),
        (
            {"attention": ["llp", "full"], "options": {"full": {"causal": False}}},
            "this model is causal, but the options of attention 'full' say causal=False",
        ),
        ({"attention": "latte"}, "position='rope' needs a layer that rotates .* latte does not; choose sinusoidal"),
        (
            {"attention": ["latte", "linear"], "position": "none", "num_kv_heads": 1},
            "num_kv_heads=1 has no effect: lat",
        ),
        ({"position": "sinusoidal", "dim": 9, "num_heads": 3}, "sinusoidal positions need an even dim, got 9"),
    ],
)
def test_settings_that_no_layer_can_follow_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Decoder(DecoderConfig(**({"dim": 16, "num_heads": 2, "num_layers": 2} | fields)))


def test_a_value_of_the_wrong_type_is_one_whether_the_mechanism_is_used_or_not():
    with pytest.raises(TypeError, match=r"options of attention 'window', which no layer uses: .*width"):
        tiny("llp", options={"window": {"width": "wide"}})
    with pytest.raises(TypeError, match="width"):
        tiny("window", options={"window": {"width": "wide"}})


def test_bad_input_is_named():
    decoder, tokens = tiny("full"), some_tokens()
    _, state = decoder(tokens)
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\], got \[17\]"):
        decoder(tokens[0])
    with pytest.raises(TypeError, match=r"tokens must be int64 or int32, got torch.float32"):
        decoder(tokens.float())
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        decoder(tokens, mask=torch.ones_like(tokens))
    with pytest.raises(ValueError, match=r"mask must have shape \(3, 17\)"):
        decoder(tokens, mask=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="the state holds 3 sequences but this decoder was given 2"):
        decoder(tokens[:2], state)
    with pytest.raises(ValueError, match=r"made by configuration .* but this decoder has"):
        tiny("full", dropout=0.5)(tokens, state)
    with pytest.raises(ValueError, match=r"labels must have the tokens' shape \[3, 17\], got \[3, 16\]"):
        decoder.loss(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match="unknown reduction 'avg'"):
        decoder.loss(tokens, tokens, reduction="avg")
    with pytest.raises(AttributeError, match=r"'subquad.models' has no attribute 'Decodr'"):
        __import__("subquad").models.Decodr  # noqa: B018


def test_first_weights_are_what_the_documentation_says():
    config = DecoderConfig(
        vocab_size=500, dim=128, num_layers=8, attention=["llp_printed", "latte"], norm="layer", bias=True,
        init_std=0.05, options={"llp_printed": {"shared_kv": False, "key_norm": False}},
    )  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(config)
    small = {name for name, p in decoder.named_parameters() if p.ndim == 2 and p.std() < 0.025}
    block = decoder.blocks()[0]
    assert {"layers.0.attention.out.weight", "layers.0.attention.first_out.weight"} < small
    assert {"layers.1.attention.out.weight", "layers.7.feedforward.down.weight"} < small
    assert all(name.endswith(("out.weight", "down.weight")) for name in small)
    assert math.isclose(block.attention.out.weight.std().item(), 0.05 / 4, rel_tol=0.1)
    assert math.isclose(block.feedforward.up.weight.std().item(), 0.05, rel_tol=0.1)
    assert math.isclose(decoder.embedding.tokens.weight.std().item(), 0.05, rel_tol=0.1)
    assert_exact(block.attention_norm.weight, torch.ones(128))
    biases = [p for name, p in decoder.named_parameters() if name.endswith("bias")]
    assert biases
    assert not any(bias.any() for bias in biases)


def test_sines_begin_with_the_size_of_the_embeddings():
    decoder = tiny("linear", dim=64, num_heads=4, init_std=0.05)
    zeros = torch.zeros(1, 500, 64)
    assert math.isclose(decoder.embedding.position(zeros, 0).std().item(), 0.05, rel_tol=0.15)


def test_a_tied_head_is_the_embedding_itself():
    tied, untied = tiny("full"), tiny("full", tie_embeddings=False)
    assert tied.head_weight is tied.embedding.tokens.weight
    assert untied.head_weight is untied.head.weight
    assert untied.num_parameters() - tied.num_parameters() == VOCABULARY * 16
    assert not torch.equal(untied.head_weight, untied.embedding.tokens.weight)


@every_mechanism
def test_cost_adds_the_parts(name):
    decoder = tiny(name, tie_embeddings=False)
    cost, layer = decoder.cost(100), decoder.blocks()[0].attention.cost(100)
    feedforward = sum(p.numel() for p in decoder.blocks()[0].feedforward.parameters())
    assert cost.mixing_flops == 2 * layer.mixing_flops
    assert cost.score_entries == 2 * layer.score_entries
    assert cost.unmasked_entries == 2 * layer.unmasked_entries
    assert cost.state_bytes == 2 * layer.state_bytes
    rest = 200 * (2 * feedforward + VOCABULARY * 16)
    assert cost.projection_flops == 2 * layer.projection_flops + rest
    assert cost.backward_flops == 2 * layer.backward_flops + 2 * rest
    assert cost.activation_bytes > 2 * layer.activation_bytes
    assert cost.parameters == decoder.num_parameters() == sum(p.numel() for p in decoder.parameters())


def test_one_batch_overfits():
    torch.manual_seed(0)
    decoder, tokens = tiny(["llp", "full"], init_std=0.02).train(), some_tokens()
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.01)
    for _ in range(120):
        optimizer.zero_grad()
        loss = decoder.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
