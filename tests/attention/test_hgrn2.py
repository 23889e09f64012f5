import math

import torch

from subquad.attention import build, hgrn2
from subquad.attention.laws import Law
from subquad.models import Decoder, DecoderConfig
from subquad.testing import AttentionContract, assert_exact
from tests.attention.kept import kept
from tests.attention.oracles import heads, recurrence, rms, silu


class TestHgrn2(AttentionContract):
    name = "hgrn2"

    def oracle(self, layer, x_TD):
        least = 0.0 if layer.bound is None else 1 / (1 + (-layer.bound).exp())
        f = heads(least + (1 - least) / (1 + (-layer.key(x_TD)).exp()), self.num_heads)
        g = heads(1 / (1 + (-layer.query(x_TD)).exp()), self.num_heads)
        i = heads(silu(layer.value(x_TD)), self.num_heads)
        o = [recurrence(g[h], 1 - f[h], i[h], f[h]) for h in range(self.num_heads)]
        return layer.out(torch.cat([rms(o_TV, layer.config.norm_eps) * layer.norm_weight for o_TV in o], -1))


class TestHgrn2InAHigherLayer(TestHgrn2):
    """With bounds, and values of another width."""

    name = "hgrn2"
    options = {"value_channels": 5}
    laws = (
        Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.NO_FUTURE, Law.PRECISION, Law.LONG,
        Law.DOCUMENTS, Law.RANKS,
    )  # fmt: skip

    def new(self, num_heads):
        layer = super().new(num_heads)
        layer.set_layer_index(1, 2)
        return layer


def test_bounds_begin_at_their_layers_share_of_a_decoder():
    shape = {"vocab_size": 11, "dim": 16, "num_heads": 2, "num_layers": 4}
    layers = [block.attention for block in Decoder(DecoderConfig(**shape, attention="hgrn2", position="none")).blocks()]
    bounds = [layer.bound for layer in layers]
    assert bounds[0] is None
    for bound, share in zip(bounds[1:], (1 / 4, 2 / 4, 3 / 4), strict=True):
        assert_exact(bound, torch.full((16,), math.log(share / (1 - share))), f"logits of the bound {share}")
    # A channel that forgets all it may: a half of the half that the bound leaves is renewed.
    torch.nn.init.zeros_(layers[2].key.weight)
    sums = kept(layers[2], torch.randn(1, 3, 16))[0]
    assert_exact(sums.k, torch.full_like(sums.k, 0.25), "keys")
    assert_exact(sums.log_f, torch.tensor(-0.25).log1p().expand(1, 2, 3, 8), "log decays")


def test_bounds_count_the_layers_of_other_mechanisms():
    shape = {"vocab_size": 11, "dim": 16, "num_heads": 2, "num_layers": 4}
    decoder = Decoder(DecoderConfig(**shape, attention=["window", "hgrn2"]))
    assert_exact(decoder.blocks()[1].attention.bound, torch.full((16,), math.log(1 / 3)), "layer 1 of 4")
    assert_exact(decoder.blocks()[3].attention.bound, torch.full((16,), math.log(3.0)), "layer 3 of 4")


def test_a_layer_whose_place_is_not_known_says_so_once_in_training(caplog):
    hgrn2._warn_not_placed.cache_clear()
    layers, x = [build("hgrn2", dim=16, num_heads=2) for _ in range(3)], torch.randn(1, 3, 16)
    layers[0].set_layer_index(0, 3)
    layers[0](x)
    layers[1].eval()(x)
    layers[1].train().cost(3)  # runs without data
    assert not caplog.records
    layers[1](x)
    layers[2](x)
    assert len(caplog.records) == 1
    assert "call layer.set_layer_index(number, layers) of each" in caplog.text


def test_a_layer_in_no_model_may_forget_everything():
    layer = build("hgrn2", dim=16, num_heads=2)
    assert layer.bound is None
    torch.nn.init.constant_(layer.key.weight, -1e4)
    sums = kept(layer, torch.ones(1, 3, 16))[0]
    assert_exact(sums.k, torch.ones(1, 2, 3, 8), "keys")
    layer.set_layer_index(1, 2)
    bounded = kept(layer, torch.ones(1, 3, 16))[0]
    assert_exact(bounded.k, torch.full((1, 2, 3, 8), 0.5), "keys below a bound")
    torch.nn.init.constant_(layer.bound, -200.0)
    found = torch.autograd.grad(layer(torch.ones(1, 3, 16))[0].sum(), [layer.bound, layer.key.weight])
    assert all(gradient.isfinite().all() for gradient in found)
