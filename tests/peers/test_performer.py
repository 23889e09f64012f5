"""performer-pytorch: random features of the softmax kernel."""

import pytest

from subquad.attention import build
from subquad.attention.base import split
from subquad.testing import assert_exact

DIM, HEADS, K, FEATURES, TOKENS = 32, 2, 16, 24, 50


@pytest.fixture
def module(peer):
    return peer("performer_pytorch.performer_pytorch")


@pytest.fixture
def layers(module, double):
    """Our layer, and the peer's attention with the same directions."""

    def make(causal, kernel):
        options = {"causal": causal, "kernel": kernel, "features": FEATURES}
        ours = double(lambda: build("performer", dim=DIM, num_heads=HEADS, **options))
        options = {"nb_features": FEATURES, "causal": causal, "generalized_attention": kernel == "relu"}
        theirs = double(lambda: module.FastAttention(K, **options))
        theirs.projection_matrix.copy_(ours.directions)
        return ours, theirs

    return make


def parts(layer, x):
    return split(layer.config.channels, layer.query(x), layer.key(x), layer.value(x))


@pytest.mark.parametrize("causal", [False, True])
def test_without_its_eps_the_forms_are_close(module, layers, agree, random, causal):
    """Causal: while its leak is small."""
    ours, theirs = layers(causal=causal, kernel="softmax")
    x = random(2, TOKENS, DIM)
    q, k, v = parts(ours, x)
    features = {"projection_matrix": theirs.projection_matrix, "eps": 0.0}
    q, k = (module.softmax_kernel(y, is_query=n == 0, **features) for n, y in enumerate((q, k)))
    if causal:
        out = module.causal_linear_attention_noncuda(q, k, v, eps=0.0)
    else:
        out = module.linear_attention(q, k, v)
    agree("performer-pytorch", f"{'causal' if causal else 'bidirectional'}, eps 0", ours(x)[0], ours.merge(out))


def test_its_default_eps_is_not_the_estimate_of_the_paper(layers, note, random):
    ours, theirs = layers(causal=False, kernel="softmax")
    x = 3 * random(2, TOKENS, DIM)
    difference = (ours(x)[0] - ours.merge(theirs(*parts(ours, x)))).abs().max()
    note("performer-pytorch", "error: bidirectional, default eps 1e-4, inputs of size 3", difference)
    assert difference > 1e-4


@pytest.mark.parametrize("causal", [False, True])
def test_relu_features(module, layers, agree, random, causal):
    ours, theirs = layers(causal=causal, kernel="relu")
    if causal:
        theirs.causal_linear_fn = lambda *x: module.causal_linear_attention_noncuda(*x, eps=0.0)
    x = random(2, TOKENS, DIM)
    what = f"relu features, {'causal, eps 0' if causal else 'bidirectional'}"
    agree("performer-pytorch", what, ours(x)[0], ours.merge(theirs(*parts(ours, x))))


def test_its_causal_softmax_features_leak_the_future_and_ours_do_not(layers, note, random):
    ours, theirs = layers(causal=True, kernel="softmax")
    x = random(2, TOKENS, DIM)
    other = x.clone()
    other[:, 30:] *= 5

    def past(f):
        return f(x)[:, :30], f(other)[:, :30]

    before, after = past(lambda x: ours.merge(theirs(*parts(ours, x))))
    note("performer-pytorch", "leak: past outputs, causal, later inputs x5", (after - before).abs().max())
    assert (after - before).abs().max() > 1e-2
    assert_exact(*past(lambda x: ours(x)[0]), "our past outputs")
