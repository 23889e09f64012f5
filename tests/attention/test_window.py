import pytest
import torch

from subquad.attention import build
from subquad.attention.laws import Law
from subquad.attention.parts import softmax_heads
from subquad.testing import assert_exact, assert_same_maths
from tests.attention.oracles import SoftmaxContract


class TestWindow(SoftmaxContract):
    name = "window"
    options = {"width": 11}

    def sees(self, t, s, head):
        width = self.options["width"]
        if self.options.get("causal", True):
            return t - width < s <= t or (s <= t and s < self.options.get("sinks", 0))
        return t - width // 2 <= s < t - width // 2 + width


class TestWindowOfSharedHeads(TestWindow):
    """One head of keys and values, rotary positions: they change the cache and depend on positions."""

    name = "window"
    options = {"width": 11, "num_kv_heads": 1, "rope": True}
    laws = (Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.PADDING, Law.DOCUMENTS, Law.IN_PLACE, Law.RANKS)


class TestWindowBidirectional(TestWindow):
    """An even width: one more token before the query than after it."""

    name = "window"
    options = {"width": 12, "causal": False}


class TestWindowWithSinks(TestWindow):
    """The first tokens are kept beside the window, with positions of their own."""

    name = "window"
    options = {"width": 11, "sinks": 5, "num_kv_heads": 1, "rope": True}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.PRECISION, Law.SAVED, Law.DOCUMENTS, Law.IN_PLACE, Law.RANKS,
    )  # fmt: skip


class TestWindowWithALearnedSink(TestWindow):
    name = "window"
    options = {"width": 11, "sinks": 5, "learned_sink": True}
    laws = (
        Law.WEIGHTS, Law.DEFINITION, Law.SPLIT, Law.TOKEN_BY_TOKEN, Law.STATE_SIZE, Law.PADDING, Law.NO_FUTURE,
        Law.PRECISION, Law.SAVED, Law.DOCUMENTS, Law.IN_PLACE, Law.RANKS,
    )  # fmt: skip

    def new(self, num_heads):
        layer = super().new(num_heads)
        torch.nn.init.normal_(layer.sink_logits)  # at zero its sign would not count
        return layer


class TestWindowBidirectionalWithALearnedSink(TestWindowWithALearnedSink):
    name = "window"
    options = {"width": 12, "causal": False, "learned_sink": True}
    laws = (Law.WEIGHTS, Law.DEFINITION, Law.PADDING, Law.DOCUMENTS)


X = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def window(**options):
    torch.manual_seed(0)
    return build("window", dim=16, num_heads=2, **options).double().eval()


def test_a_row_has_weights_on_its_window_and_on_the_first_tokens():
    layer = window(width=3, sinks=2)
    seen = layer.weights(X)[0, 1] > 0
    for row, columns in {0: [0], 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4], 8: [0, 1, 6, 7, 8]}.items():
        assert seen[row].nonzero().flatten().tolist() == columns
    packed = layer.weights(X, doc_ids=torch.tensor([[0] * 3 + [1] * 6] * 2))[0, 1] > 0
    assert packed[8].nonzero().flatten().tolist() == [3, 4, 6, 7, 8]


@torch.no_grad()
def test_a_learned_sink_joins_the_denominator():
    layer = window(width=3, sinks=2, learned_sink=True)
    assert_exact(layer.sink_logits, torch.zeros(2, dtype=torch.float64))
    layer.sink_logits.copy_(torch.tensor([0.5, -2.0]))
    q_BHTK, k_BHTK, _ = softmax_heads(layer, X, 0)
    scores_BHT = (q_BHTK[:, :, 8:] * k_BHTK).sum(-1) / 8**0.5
    terms_BHN = scores_BHT[..., [0, 1, 6, 7, 8]].exp()
    expected = terms_BHN / (terms_BHN.sum(-1, keepdim=True) + layer.sink_logits.exp()[:, None])
    assert_same_maths(layer.weights(X)[:, :, 8, [0, 1, 6, 7, 8]], expected)
    assert not layer.is_distribution


@torch.no_grad()
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_learned_sink_of_minus_infinity_changes_nothing_and_a_large_one_silences(sinks):
    plain, layer = window(width=3, sinks=sinks), window(width=3, sinks=sinks, learned_sink=True)
    layer.load_state_dict(plain.state_dict() | {"sink_logits": torch.tensor([-1e4, 1e4])})
    w_BHTS, expected_BHTS = layer.weights(X), plain.weights(X)
    assert_exact(w_BHTS[:, 0], expected_BHTS[:, 0])
    assert w_BHTS[:, 1].count_nonzero() == 0
    layer.sink_logits.fill_(-1e4)
    assert_exact(layer(X)[0], plain(X)[0])
    layer.sink_logits.fill_(1e4)
    assert layer(X)[0].count_nonzero() == 0


@torch.no_grad()
def test_sinks_keep_their_own_rotary_positions():
    layer = window(width=3, sinks=2, rope=True)
    assert_exact(layer(X)[1].tensor("near_first_keys"), softmax_heads(layer, X, 0)[1][:, :, :2])


@torch.no_grad()
def test_a_state_taken_back_to_an_earlier_token_goes_on_as_if_the_rest_had_not_been_read():
    layer = window(width=3, sinks=4, learned_sink=True)
    state = layer(X[:, :2])[1]
    layer(-X[:, 2:], state)
    assert_same_maths(layer(X[:, 2:], state)[0], layer(X)[0][:, 2:])


def test_the_state_is_constant_and_scores_are_those_of_window_and_sinks():
    plain, layer = window(width=8), window(width=8, sinks=4)
    assert layer.state_bytes(500) - plain.state_bytes(500) == 2 * 4 * 16 * 4
    more = layer.cost(500).unmasked_entries - plain.cost(500).unmasked_entries
    assert more == 2 * (4 * 500 - sum(range(8, 12)))


def test_ranks_need_nothing_of_each_other_for_a_window_of_one():
    class Own(TestWindow):
        options = {"width": 1}

    Own().test_ranks_compute_what_one_process_does()
    assert not any(sent.forward for sent in Own().make().communication(21, 3))
