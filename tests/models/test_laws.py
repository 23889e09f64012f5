"""Laws of every model: what stands at padding, recomputed activations and compilation change nothing."""

import math

import pytest
import torch

from subquad.testing import assert_exact, assert_same_maths
from tests.models import small

DECODERS = [("decoder", p) for p in (*small.mechanisms(), pytest.param(["llp", "full"], id="hybrid"))]
DECODERS += [("looped", p) for p in small.mechanisms(quick=["latte"])]
DECODERS += [("perceiver_ar", p) for p in small.every_history.args[1]]
ENCODERS = [("classifier", p) for p in small.mechanisms("bidirectional")]
PERCEIVERS = [("classifier", pytest.param(name, id=name)) for name in ("perceiver", "perceiver_io")]


def each(*models):
    cases = [pytest.param(kind, *p.values, id=f"{kind}-{p.id or p.values[0]}", marks=p.marks) for kind, p in models]
    return pytest.mark.parametrize(("kind", "name"), cases)


def model_of(kind, name, **fields):
    if name in ("perceiver", "perceiver_io"):
        fields |= {"position": "learned", "options": {name: {"latents": 5}}}
    return getattr(small, kind)(name, **fields)


def outputs(model, tokens, mask=None):
    found = model(tokens, mask=mask)
    return found[0] if isinstance(found, tuple) else found


@each(*DECODERS, *ENCODERS, *PERCEIVERS)
def test_tokens_at_padding_change_no_bit_and_get_no_gradient(kind, name):
    model, mask = model_of(kind, name, tie_embeddings=False).float(), torch.zeros(4, small.TOKENS, dtype=torch.bool)
    mask[:3] = small.mask()
    tokens = torch.where(mask, small.tokens(4).clamp(min=2), 1)
    other, found = torch.where(mask, tokens, -7), outputs(model, tokens, mask)
    assert_exact(outputs(model, other, mask), found)
    if kind != "classifier":
        assert_exact(model.loss(other, torch.where(mask, tokens, 3), mask), model.loss(tokens, tokens, mask))
    found.square().sum().backward()
    gradient = getattr(model, "encoder", model).embedding.tokens.weight.grad
    assert not gradient[:2].any()
    if kind != "perceiver_ar":  # which may leave out the earliest tokens
        assert gradient[tokens[mask].unique()].abs().amax(1).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@each(*DECODERS, *ENCODERS)
def test_checkpointing_changes_no_bit(kind, name):
    more = {"options": {"prefix_dropout": 0.5}} if kind == "perceiver_ar" else {}
    model, tokens, mask = model_of(kind, name, dropout=0.1, **more).float().train(), small.tokens(), small.mask()
    small.assert_checkpointing_changes_no_bit(
        getattr(model, "encoder", model),
        lambda: model(tokens, mask).sum() if kind == "classifier" else model.loss(tokens, tokens),
    )


@torch.no_grad()
@each(("perceiver_ar", pytest.param("compressed")), ("classifier", pytest.param("full")), PERCEIVERS[1])
def test_compiled_equals_eager(kind, name):
    """The decoder's own test compiles its state and gradients too."""
    torch.compiler.reset()
    model, tokens = model_of(kind, name, num_layers=2 if kind == "perceiver_ar" else 1), small.tokens()
    mask = None if kind == "perceiver_ar" else small.mask()
    call = model.vectors if kind == "perceiver_ar" else model
    assert_same_maths(torch.compile(call, fullgraph=True, backend="aot_eager")(tokens, mask), call(tokens, mask))


@torch.no_grad()
@pytest.mark.parametrize("position_scale", [None, 1.0])
@pytest.mark.parametrize(("kind", "name"), [
    ("decoder", "latte"), ("perceiver_ar", "cross"), ("classifier", "full"), ("classifier", "perceiver"),
    ("classifier", "perceiver_io"),
])  # fmt: skip
def test_added_sines_have_the_size_of_untrained_embeddings_or_the_one_asked_for(kind, name, position_scale):
    options = {"options": {name: {"latents": 5}}} if name.startswith("perceiver") else {}
    fields = {"position": "sinusoidal", "position_scale": position_scale, "embedding_scale": 4.0, **options}
    model = getattr(small, kind)(name, **fields)
    embedding, tokens = getattr(model, "encoder", model).embedding, small.tokens()
    amplitude = position_scale or small.SHAPE["init_std"] * math.sqrt(2)
    assert_same_maths(embedding(tokens), 4 * embedding.tokens.weight[tokens] + amplitude * small.sines(16))
