"""LongLoRA's shifted attention, which no longer installs, as an equation: what is published leaks the future."""

import pytest
import torch

from subquad.attention import build
from subquad.testing import assert_exact, assert_same_maths

DIM, HEADS, GROUP, TOKENS = 32, 4, 8, 32


def published(q_BHTK, k_BHTK, v_BHTK):
    """Roll the last half of the heads back by half a group, attend causally within groups, and roll forward again."""
    half, shift = HEADS // 2, GROUP // 2
    rolled = [torch.cat([x[:, :half], x[:, half:].roll(-shift, 2)], 1) for x in (q_BHTK, k_BHTK, v_BHTK)]
    q, k, v = (x.unflatten(2, (-1, GROUP)) for x in rolled)
    future = torch.ones(GROUP, GROUP, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf).softmax(-1)
    y_BHTK = (weights @ v).flatten(2, 3)
    return torch.cat([y_BHTK[:, :half], y_BHTK[:, half:].roll(shift, 2)], 1)


@pytest.fixture
def parts(double, random):
    layer = double(lambda: build("shifted", dim=DIM, num_heads=HEADS, group=GROUP))
    x = random(2, TOKENS, DIM)
    other = x.clone()
    other[:, -1] += 1  # only the last token

    def project(x):
        return layer.queries(x), layer.keys(x), layer.values(x)

    return layer, x, other, project


def test_wrapped_is_the_published_form(double, parts):
    layer, x, _, project = parts
    wrapped = double(lambda: build("shifted", dim=DIM, num_heads=HEADS, group=GROUP, wrap=True))
    assert_same_maths(wrapped(x)[0], layer.merge(published(*project(x))))


def test_the_published_form_leaks_the_last_token_to_the_first_ones_and_the_default_does_not(parts):
    layer, x, other, project = parts
    changed = (published(*project(other)) - published(*project(x))).abs().amax((0, 1, 3))
    seen = changed.nonzero().flatten().tolist()
    # In the rolled group [28..31, 0..3] the tokens 0 to 3 come after the last one.
    assert seen == [*range(GROUP // 2), TOKENS - 1]
    assert_exact(layer(other)[0][:, :-1], layer(x)[0][:, :-1], "our past outputs")


def test_but_for_the_first_half_group_of_the_shifted_heads_they_agree(parts):
    layer, x, _, project = parts
    ours, theirs = layer.weights(x) @ layer.values(x), published(*project(x))
    assert_same_maths(ours[:, : HEADS // 2], theirs[:, : HEADS // 2], "heads with groups in place")
    assert_same_maths(ours[:, HEADS // 2 :, GROUP // 2 :], theirs[:, HEADS // 2 :, GROUP // 2 :], "shifted heads")
    assert (ours[:, HEADS // 2 :, : GROUP // 2] - theirs[:, HEADS // 2 :, : GROUP // 2]).abs().max() > 1e-2
