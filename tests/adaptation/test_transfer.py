"""The trainings of a conversion, and the switches of branches."""

from contextlib import ExitStack, nullcontext

import pytest
import torch

from subquad.adaptation import ConvertConfig
from subquad.adaptation.config import MatchConfig
from subquad.adaptation.replace import replace_attention
from subquad.adaptation.transfer import attention_errors, match, optimise, silenced, windows_dropped
from subquad.testing import assert_exact, assert_same_maths
from subquad.training import BatchConfig
from subquad.training.errors import NonFiniteError
from tests.adaptation.test_replace import TOKENS, decoder

LAYERS = (0, 1, 2, 3)


@pytest.mark.parametrize(("probability", "closed"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_windows_are_closed_as_often_as_asked(probability, closed):
    new = replace_attention(decoder(), "latte_macchiato", keep_every=0, options={"width": 8}).decoder.double()
    draws = (torch.rand(4, generator=torch.Generator().manual_seed(1)) < probability).tolist()
    assert sum(draws) == closed
    with windows_dropped(new, probability, torch.Generator().manual_seed(1)):
        found = new(TOKENS)[0]
    with ExitStack() as stack:
        for block, drawn in zip(new.blocks(), draws, strict=True):
            stack.enter_context(block.attention.without("window") if drawn else nullcontext())
        assert_same_maths(found, new(TOKENS)[0], "the windows that were drawn")
    assert torch.equal(found, new(TOKENS)[0]) == (closed == 0)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_errors_are_those_of_each_layer_alone(norm_position):
    old = decoder(norm_position=norm_position)
    new = replace_attention(old, "window", keep_every=0, options={"width": 3}).decoder.double()
    x = old.embedding(TOKENS, 0)
    for i, error in zip(LAYERS, attention_errors(old, new, LAYERS, TOKENS), strict=True):
        block = old.blocks()[i]
        z = x if norm_position == "post" else block.attention_norm(x)
        y, own = (mixer(z)[0] for mixer in (block.attention, new.blocks()[i].attention))
        assert_same_maths(error, (own - y).square().sum() / y.square().sum(), f"error of layer {i}")
        x = block(x)[0]
    same = replace_attention(old, "window", keep_every=0, options={"width": 24}).decoder.double()
    for error in attention_errors(old, same, LAYERS, TOKENS):
        assert_same_maths(error, torch.zeros_like(error), "within reach")


def test_silenced_layers_leave_the_residual_stream():
    new = decoder()
    x = new.embedding(TOKENS, 0)
    for i, block in enumerate(new.blocks()):
        x = x + (torch.zeros_like(x) if i < 2 else block.attention(block.attention_norm(x))[0])
        x = x + block.feedforward(block.feedforward_norm(x))
    with silenced([block.attention for block in new.blocks()[:2]]):
        assert_same_maths(new.vectors(TOKENS), new.norm(x), "two layers without attention")
    assert not torch.equal(new.vectors(TOKENS), new.norm(x))


def test_matching_lowers_the_error_of_each_replaced_layer_and_trains_nothing_else():
    old = decoder()
    new = replace_attention(old, "window", keep_every=0, options={"width": 2}).decoder.double()
    frozen = {name: weight.clone() for name, weight in new.state_dict().items() if ".attention." not in name}
    before = attention_errors(old, new, LAYERS, TOKENS)
    config = ConvertConfig(match=MatchConfig(steps=30, lr=0.01), batch=BatchConfig(accumulation=1))
    curve = match(old, new, LAYERS, (), iter([TOKENS] * 30), config)
    assert curve.losses[-1] < curve.losses[0]
    assert (len(curve.steps), curve.steps[-1]) == (20, 30)
    after = attention_errors(old, new, LAYERS, TOKENS)
    assert all(b < a for a, b in zip(before, after, strict=True)), (before, after)
    for name, weight in frozen.items():
        assert_exact(new.state_dict()[name], weight, name)


def test_a_loss_that_is_not_finite_ends_the_stage_before_its_step():
    weight = torch.nn.Parameter(torch.ones(2))
    config = ConvertConfig(match=MatchConfig(steps=3, lr=0.5), batch=BatchConfig(accumulation=1))
    factors, generator = iter(torch.tensor([1.0, torch.inf, 1.0])), torch.Generator()
    message = "the loss is inf at step 2 of 3 of stage match, which is discarded; choose match.lr below 0.5"
    with pytest.raises(NonFiniteError, match=message):
        optimise(torch.nn.Module(), [weight], lambda x: weight.sum() * x, factors, config, "match", generator)
    assert weight.isfinite().all()
