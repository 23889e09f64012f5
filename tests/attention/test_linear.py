import torch

from subquad import attention
from subquad.attention.base import split
from subquad.attention.laws import Law
from subquad.layers.positions import rotate
from subquad.models import Decoder, DecoderConfig
from subquad.testing import AttentionContract, assert_same_maths
from tests.attention.kept import Watched, kept
from tests.attention.oracles import heads, turned


class TestLinear(AttentionContract):
    name = "linear"

    def oracle(self, layer, x_TD):
        """Equations 5 and 8 to 12, normalised sums of features."""
        config, T = layer.config, len(x_TD)
        q, k, v = (heads(project(x_TD), config.num_heads) for project in (layer.query, layer.key, layer.value))
        if config.rotary:
            q, k = ([turned(each, config.rope_base) for each in some] for some in (q, k))

        def phi(x_TK, map_KF):
            if config.feature_map == "elu":
                return torch.where(x_TK > 0, x_TK + 1, x_TK.exp())
            both = [x_TK] if map_KF is None else [x_TK @ map_KF, -x_TK @ map_KF]
            return torch.cat([each.exp() / each.exp().sum(-1, keepdim=True) for each in both], -1)

        rows = []
        for t in range(T):
            end, row = t + 1 if config.causal else T, []
            for h in range(config.num_heads):
                maps = [None if m is None else m[h] for m in (layer.query_map, layer.key_map)]
                w_S = phi(k[h][:end], maps[1]) @ phi(q[h][t], maps[0])
                row.append(w_S @ v[h][:end] / (w_S.sum() + config.eps))
            rows.append(torch.cat(row))
        return layer.out(torch.stack(rows))


class TestLinearAsADistribution(TestLinear):
    """Another feature map without eps: other sums and roundings."""

    name = "linear"
    options = {"feature_map": "softmax", "eps": 0.0}
    laws = (Law.WEIGHTS, Law.DEFINITION, Law.NO_FUTURE, Law.PRECISION, Law.LONG)


class TestLinearWithLearnedFeatures(TestLinear):
    """Weights in the feature map, moved off the identity, and rotary positions: other roundings, and positions."""

    name = "linear"
    options = {"feature_map": "learned", "rotary": True}
    laws = (
        Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.NO_FUTURE, Law.PRECISION, Law.DOCUMENTS,
        Law.RANKS,
    )  # fmt: skip

    def new(self, num_heads):
        layer = super().new(num_heads)
        with torch.no_grad():
            for weight in (layer.query_map, layer.key_map):
                weight += 0.3 * torch.randn_like(weight)
        return layer


class TestLinearWithLearnedFeaturesBidirectional(TestLinear):
    """The sums over all tokens of learned features: other sums and roundings."""

    name = "linear"
    options = {"feature_map": "learned", "feature_dim": 5, "causal": False, "eps": 0.0}
    laws = (Law.WEIGHTS, Law.DEFINITION, Law.PADDING, Law.PRECISION)


class TestLinearBidirectional(TestLinear):
    name = "linear"
    options = {"causal": False}


def test_learned_maps_begin_as_softmax_features_of_both_signs():
    torch.manual_seed(0)
    layer = attention.build("linear", dim=16, num_heads=2, feature_map="learned").double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    (k_BHTK,) = split(layer.config.channels, layer.key(x))
    expected = torch.cat([k_BHTK.softmax(-1), (-k_BHTK).softmax(-1)], -1)
    assert_same_maths(kept(layer, x)[0].k, expected, "features of the keys")


def test_rotary_features_are_those_of_turned_queries_and_keys():
    torch.manual_seed(0)
    options = {"feature_map": "softplus", "rotary": True, "rope_base": 100.0, "rope_fraction": 0.5}
    options["rope_scaling"] = {"kind": "linear", "factor": 4.0}
    layer = attention.build("linear", dim=16, num_heads=2, **options).double()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    past = Watched(x, causal=True)
    past.start = 7
    layer.mix(x, past)
    for project, features in ((layer.query, past.last[1]), (layer.key, past.last[0].k)):
        turned = rotate(
            split(layer.config.channels, project(x))[0], 7, 100.0, channels=4, scaling=layer.config.rope_scaling
        )
        assert_same_maths(features, torch.nn.functional.softplus(turned), "features from position 7 on")


def test_a_decoder_of_linear_layers_may_have_rotary_positions():
    shape = {"vocab_size": 11, "dim": 16, "num_layers": 1, "num_heads": 2, "attention": "linear", "rope_base": 500.0}
    decoder = Decoder(DecoderConfig(**shape, position="rope", options={"linear": {"rotary": True}}))
    assert decoder.blocks()[0].attention.config.rope_base == 500.0
