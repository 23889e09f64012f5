"""Perceiver and Perceiver IO, on arrays and on tokens."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.models import Classifier, EncoderConfig, Perceiver, PerceiverIO
from subquad.models.perceiver import LATENT_STD, fourier_features
from subquad.models.stacks import PerceiverOptions
from subquad.ops import flops
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from tests.models import small

INPUTS, CHANNELS, QUERY = small.TOKENS, 6, 10
both = pytest.mark.parametrize("name", ["perceiver", "perceiver_io"])


def config_of(name="perceiver", options=None, **fields):
    fields = {"position": "learned", "max_positions": 32} | fields
    return EncoderConfig(**small.SHAPE | fields, attention=name, options={name: {"latents": 5} | (options or {})})


def perceiver(options=None, **fields):
    torch.manual_seed(0)
    return Perceiver(config_of("perceiver", options, **fields), input_dim=CHANNELS).double().eval()


def perceiver_io(options=None, **fields):
    torch.manual_seed(0)
    config = config_of("perceiver_io", options, **fields)
    return PerceiverIO(config, input_dim=CHANNELS, query_dim=QUERY).double().eval()


def classifier(name, options=None, **fields):
    torch.manual_seed(0)
    return Classifier(config_of(name, options, **fields)).double().eval()


def random(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def read(block, x, inputs):
    """A cross-attention block by its equation, one query and one head at a time: `x` [O, C], `inputs` [S, C']."""
    z, width = block.input_norm(inputs), block.query.out_features // block.num_heads
    queries, keys, values = block.query(block.query_norm(x)), block.key(z), block.value(z)
    rows = []
    for query in queries:
        parts = [slice(start, start + width) for start in range(0, len(query), width)]
        rows.append(torch.cat([(keys[:, p] @ query[p] / math.sqrt(width)).softmax(0) @ values[:, p] for p in parts]))
    y = block.out(torch.stack(rows))
    x = x + y if block.residual else y
    return x + block.feedforward(block.feedforward_norm(x))


def expected_latents(model, inputs):
    """The latents of one array [S, C], by the paper's algorithm."""
    z = model.latents
    for repeat in range(model.options.repeats):
        if repeat == 0 or model.options.reads == "each":
            z = read(model.readings[min(repeat, 1)], z, inputs)
        for block in model.layers:
            z = z + block.attention.definition(block.attention_norm(z)[None])[0]
            z = z + block.feedforward(block.feedforward_norm(z))
    return z


@pytest.mark.parametrize("options", [
    {},
    {"repeats": 3, "output_residual": False},
    {"repeats": 3, "reads": "each", "cross_heads": 4},
    {"query_residual": False, "latents": 1},
])  # fmt: skip
@torch.no_grad()
def test_both_are_their_equations_with_any_number_of_inputs_and_queries(options):
    model, inputs, queries = perceiver_io(options), random(2, INPUTS, CHANNELS), random(2, 4, QUERY, seed=2)
    latents = [expected_latents(model.perceiver, row) for row in inputs]
    assert_same_maths(model.perceiver(inputs), torch.stack(latents))
    rows = zip(queries, latents, strict=True)
    assert_same_maths(model(inputs, queries), torch.stack([read(model.reader, q, z) for q, z in rows]))
    assert_exact(model(inputs, queries[0]), model(inputs, queries[:1].expand(2, -1, -1)))
    for few in (inputs[:, :0], inputs[:, :1]):
        assert model(few, queries).isfinite().all()
        assert model(few, queries[:, :0]).shape == (2, 0, QUERY)


def test_padding_of_arrays_is_as_if_removed():
    model, inputs, mask = perceiver(), random(4, INPUTS, CHANNELS), small.sparse_mask()
    latents = model(inputs, mask)
    for row, real in enumerate(mask):  # the last row has no input at all
        assert_same_maths(latents[row], model(inputs[row : row + 1, real])[0])


def test_values_at_padding_change_no_bit_and_get_no_gradient():
    model, inputs, mask = perceiver_io().float(), random(4, INPUTS, CHANNELS).float(), small.sparse_mask()
    queries = random(3, QUERY).float()
    other = torch.where(mask[..., None], inputs, torch.nan).requires_grad_()
    outputs = model(other, queries, mask)
    assert_exact(outputs, model(inputs, queries, mask))
    outputs.square().sum().backward()
    assert not other.grad[~mask].any()
    assert other.grad[mask].any()


@both
def test_padding_of_tokens_is_as_if_removed(name):
    model, tokens, mask = classifier(name, {"fourier_bands": 3}), small.tokens(4), small.sparse_mask()
    logits = model(tokens, mask)
    for row, real in enumerate(mask):
        assert_same_maths(logits[row], model(tokens[row : row + 1, real])[0])


@both
@pytest.mark.parametrize("repeats", [1, 3])
def test_every_parameter_gets_a_gradient(name, repeats):
    model = classifier(name, {"repeats": repeats, "reads": "each", "fourier_bands": 2}, dropout=0.1).train()
    model(small.tokens(), None).square().sum().backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), parameter_name  # noqa: PT018


def test_first_weights():
    model = perceiver({"latents": 400, "repeats": 3, "reads": "each"}, dim=64, init_std=0.02)
    assert model.latents.abs().max().item() <= 2 * LATENT_STD
    assert 0.7 * LATENT_STD < model.latents.std().item() < LATENT_STD
    small = 0.02 / math.sqrt(2 * (3 + 3 * 2))
    first, later, block = *model.readings, model.layers[0]
    for weight, std in ((first.query, 0.02), (later.out, small), (block.feedforward.down, small)):
        assert 0.8 * std < weight.weight.std().item() < 1.2 * std


@both
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
def test_a_mean_is_pooled_and_order_matters_where_positions_are_known(name, position):
    tokens = small.tokens()
    for bands in (0, 3):
        model = classifier(name, {"fourier_bands": bands}, position=position)
        vectors = model.encoder(tokens)
        assert vectors.shape == (3, 1 if name == "perceiver_io" else 5, 16)
        assert_same_maths(model(tokens), model.head(vectors.mean(1)))
        same = torch.isclose(model(tokens), model(tokens.flip(1))).all()
        assert bool(same) == (position == "none" and bands == 0)


def test_fourier_features_are_their_definition():
    places = torch.tensor([[-1.0, 0.25], [0.5, 1.0]], dtype=torch.float64)
    expected = []
    for p in places.flatten().tolist():
        angles = [math.pi * f * p for f in (1.0, 3.0, 5.0)]
        expected += [p, *map(math.sin, angles), *map(math.cos, angles)]
    assert_same_maths(fourier_features(places, 3, 10).flatten(), torch.tensor(expected, dtype=torch.float64))


@both
def test_autocast_stays_in_budget(name):
    def logits(dtype, autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            return classifier(name).to(dtype)(small.tokens())

    exact, plain = logits(torch.float64, False), logits(torch.bfloat16, False)
    assert_in_budget(logits(torch.float32, True), plain, exact, torch.bfloat16)


@both
@pytest.mark.parametrize(("options", "inputs"), [
    ({}, INPUTS), ({"repeats": 2, "reads": "each", "fourier_bands": 2}, 30),
])  # fmt: skip
def test_the_cost_is_what_torch_counts_and_linear_in_the_inputs(name, options, inputs):
    flops.register()
    model, repeats = classifier(name, options).float().train(), options.get("repeats", 1)
    cost = model.cost(inputs)
    with FlopCounterMode(display=False) as counter:
        logits = model(small.tokens(1, inputs))
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert counter.get_total_flops() == cost.mixing_flops + cost.projection_flops
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    entries = repeats * 2 * 2 * 5 * 5 + (repeats if options else 1) * 5 * inputs + (5 if name == "perceiver_io" else 0)
    assert cost.score_entries == cost.unmasked_entries == model.encoder.cost(inputs).score_entries == entries
    assert cost.activation_bytes > cost.state_bytes == 0
    # The features of positions need no gradient, which saves a part of the first products.
    assert backward.get_total_flops() <= cost.backward_flops


def test_wrong_inputs_are_refused():
    model, inputs, queries = perceiver_io(), random(2, INPUTS, CHANNELS), random(4, QUERY)
    short = torch.ones(2, 3, dtype=torch.bool)
    small.assert_refused(
        (lambda: model(inputs[..., :5], queries), ValueError, r"must have shape \[B, S, 6\], got \[2, 17, 5\]"),
        (lambda: model(inputs, random(3, 4, QUERY)), ValueError, r"\[O, 10\] or \[2, O, 10\], got \[3, 4, 10\]"),
        (lambda: model(inputs, random(4, 9)), ValueError, r"must have shape \[O, 10\] or .*, got \[4, 9\]"),
        (lambda: model(inputs, queries, torch.ones(2, INPUTS)), TypeError, "mask must be a bool tensor"),
        (lambda: model(inputs, queries, short), ValueError, r"mask must have shape \(2, 17\)"),
    )


def with_others(others):
    return Perceiver(config_of().replace(options={"perceiver": {"latents": 5}, **others}), input_dim=CHANNELS)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: perceiver({"latents": 0}), "latents must be at least 1, got 0"),
    (lambda: perceiver({"fourier_bands": -1}), "fourier_bands must be at least 0, got -1"),
    (lambda: perceiver({"cross_heads": 3}), "cross_heads must divide dim, got cross_heads=3, dim=16"),
    (lambda: perceiver({"latent": 4}), "has no key 'options.perceiver.latent'; did you mean 'latents'"),
    (lambda: perceiver({"reads": "twice"}), "options.perceiver.reads must be one of its choices, got 'twice'; valid: "),
    (lambda: PerceiverOptions(reads="twice"), "unknown reads 'twice'; valid: each, once"),
    (lambda: with_others({"llp": {"segments": 8}}), "attention 'llp' has no option 'segments'"),
    (lambda: with_others({"perciever": {"latents": 8}}), "unknown attention 'perciever'"),
    (lambda: Perceiver(config_of(), input_dim=0), "input_dim must be at least 1, got 0"),
    (lambda: PerceiverIO(config_of("perceiver_io"), input_dim=4, query_dim=0), "query_dim must be at least 1, got 0"),
    (lambda: Perceiver(EncoderConfig(attention="full"), input_dim=4), "needs attention='perceiver' or 'perceiver_io'"),
    (lambda: PerceiverIO(config_of(), input_dim=4, query_dim=4), "needs attention='perceiver_io', got 'perceiver'"),
])  # fmt: skip
def test_wrong_options_widths_and_names_are_refused(make, message):
    assert with_others({"llp": {"segment": 8}}).options.latents == 5
    with pytest.raises(ValueError, match=message):
        make()


@both
def test_what_a_stack_that_reads_tokens_does_not_support_is_refused(name):
    for fields, message in (
        ({"position": "rope"}, f"position='rope' needs a layer that rotates .* {name} does not"),
        ({"pooling": "class"}, f"{name} pools its latents: pooling must be 'mean', got 'class'"),
        ({"causal": True}, f"{name} reads whole sequences and has no causal form"),
        ({"norm_position": "post"}, "norm_position=post has no meaning for a Perceiver, whose readings normalise"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier(name, **fields)
    with pytest.raises(ValueError, match="fourier_bands supports max_positions=32 tokens, got 33"):
        classifier(name, {"fourier_bands": 2}, position="none")(small.tokens(1, 33))
