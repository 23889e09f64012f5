"""The image model: its probabilities, its sampler, its cuts, what a pixel sees."""

import math
from dataclasses import fields

import pytest
import torch

from subquad.models import ImageModel, ImageModelConfig
from subquad.models.config import DecoderConfig
from subquad.models.pixels import LEAST_LOG_SCALE, draw
from subquad.testing import assert_exact, assert_same_maths
from tests.models import small

every_mechanism = pytest.mark.parametrize("name", small.mechanisms())
every_output = pytest.mark.parametrize("output", ["categorical", "logistic"])


def image_config(name="linear", **changes):
    shape = small.SHAPE | {"vocab_size": 257, "position": "none", "height": 4, "width": 3, "options": small.OPTIONS}
    return ImageModelConfig(**shape | {"attention": name} | changes)


def image_model(name="linear", **changes):
    torch.manual_seed(0)
    model = ImageModel(image_config(name, **changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def some_pixels(model, batch=2, seed=1):
    return torch.randint(0, 256, (batch, model.config.tokens), generator=torch.Generator().manual_seed(seed))


def mixture(count=40, scale=3.0, dtype=torch.float64):
    """A mixture's output, and parameters of which some are extreme."""
    model = image_model(output="logistic", mixtures=5)
    parameters_NP = scale * torch.randn(count, 15, generator=torch.Generator().manual_seed(2), dtype=dtype)
    parameters_NP[0, 10:] = -50.0  # far narrower than a level
    parameters_NP[1, 10:] = 9.0  # far wider than all of them
    parameters_NP[3, 10:12] = torch.tensor([14.0, 40.0])  # wider than float32 tells from flat
    parameters_NP[2, 5:10] = 30.0  # far outside
    return model.output, parameters_NP


def test_a_mixture_is_the_difference_of_its_distribution_function_with_scales_held_at_the_least():
    output, parameters_NP = mixture()
    assert_same_maths(output.log_probs(parameters_NP).exp().sum(-1), torch.ones(40, dtype=torch.float64))
    held_NP = torch.cat((parameters_NP[:, :10], parameters_NP[:, 10:].clamp(min=-7.0)), 1)
    assert held_NP[0, 10] == -7 != parameters_NP[0, 10]
    assert_exact(output.log_probs(parameters_NP), output.log_probs(held_NP))

    parameters_NP = mixture(scale=1.0)[1][4:]
    logits, means, log_scales = parameters_NP.split(5, -1)
    scales = log_scales.clamp(min=LEAST_LOG_SCALE).exp()
    levels = ((2 * level + 1) / 255 - 1 for level in range(255))
    edges = torch.tensor([-math.inf, *levels, math.inf], dtype=torch.float64)
    below = torch.sigmoid((edges[None, :, None] - means[:, None]) / scales[:, None])
    p_NV = (logits.softmax(-1)[:, None] * below.diff(dim=1)).sum(-1)
    assert_same_maths(output.log_probs(parameters_NP).exp(), p_NV)


@every_output
def test_the_loss_is_minus_the_logarithm_of_those_probabilities(output):
    model = image_model(output=output)
    pixels = some_pixels(model)
    pixels[0, :2] = torch.tensor([0, 255])
    parameters = model(model.inputs(pixels))[0].flatten(0, 1)
    table = model.output.log_probs(parameters)
    assert_same_maths(table.exp().sum(-1), torch.ones(len(table), dtype=torch.float64))
    picked = table.gather(1, pixels.view(-1, 1))[:, 0].view(pixels.shape)
    assert_same_maths(model.log_prob(pixels), picked)
    assert_same_maths(model.loss(pixels), -picked.mean())
    assert_same_maths(model.loss(pixels, reduction="sum"), -picked.sum())
    labels = pixels.clone()
    labels[:, ::2] = -100
    assert_same_maths(model.loss(pixels, labels), -picked[:, 1::2].mean())
    assert_same_maths(model.loss(pixels, labels, reduction="sum"), -picked[:, 1::2].sum())


@every_output
def test_the_samplers_frequencies_are_those_probabilities(output):
    model = image_model(output=output, mixtures=4)
    parameters_P = model(model.inputs(some_pixels(model)))[0][0, 5]
    log_p, even = model.output.log_probs(parameters_P[None])[0], (torch.arange(2000).double() + 0.5) / 2000
    for temperature in (1.0, 0.5):
        drawn = model.sample(parameters_P.expand(2000, -1), even, temperature=temperature)
        expected = 2000 * (log_p / temperature).softmax(-1)
        assert ((drawn.bincount(minlength=256) - expected).abs() <= 1).all()
    assert model.sample(parameters_P[None], even[:1], temperature=0).item() == log_p.argmax().item()


def test_drawing_takes_likely_levels_at_the_ends_and_at_the_lowest_temperature():
    log_p = torch.full((2, 256), -math.inf, dtype=torch.float64)
    log_p[:, 7] = 0.0
    assert draw(log_p, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), 1.0).tolist() == [7, 7]
    log_p = torch.linspace(-1, 0, 256, dtype=torch.float64).flip(0).roll(9)[None].log_softmax(-1)
    for temperature in (1e-3, 1e-300, 5e-324):  # the least that float64 has takes all logarithms to minus infinity
        assert draw(log_p, torch.tensor([0.5]).double(), temperature).item() == 9


def test_a_narrow_mixture_keeps_its_gradients_finite():
    output, parameters_NP = mixture(dtype=torch.float32)
    leaf = parameters_NP.requires_grad_()
    loss = -output.log_prob(leaf, torch.arange(40) * 6).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@every_mechanism
@pytest.mark.parametrize("near", [0, 2])
def test_a_pixel_changes_nothing_before_it(name, near):
    model = image_model(name, near=near, axes=True, channels=2)
    pixels = some_pixels(model)
    before = model.log_prob(pixels)
    for place in (0, 7, 22):
        changed = pixels.clone()
        changed[:, place] = (changed[:, place] + 90) % 256
        after = model.log_prob(changed)
        assert_exact(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any()


@every_mechanism
@pytest.mark.parametrize("cuts", [[0, 1, 5, 6, 6, 20], [*range(1, 24)]], ids=["cuts", "each"])
def test_any_cut_gives_the_same_parameters(name, cuts):
    model = image_model(name, near=1, axes=True, channels=2)
    tokens = model.inputs(some_pixels(model))
    parameters, state = small.in_pieces(model, tokens, cuts)
    assert_same_maths(parameters, model(tokens)[0])
    assert state.seen == 24


@pytest.mark.parametrize("channels", [1, 3])
def test_the_pixels_near_by_are_those_of_the_image(channels):
    model = image_model(near=2, channels=channels)
    inputs, (H, W, C) = model.embedding, model.config.shape
    pixels = some_pixels(model, 1)
    image = pixels.view(H, W, C)
    recent = inputs.recent(pixels[:, :0], None)
    values = inputs._values(torch.cat((recent, model.inputs(pixels)), 1), 0)[0]
    for p in range(model.config.tokens):
        r, c = p // C // W, p // C % W
        for k, (dr, dc, j) in enumerate(inputs.places):
            inside = r + dr >= 0 and 0 <= c + dc < W and ((r + dr) * W + c + dc) * C + j < p
            expected = (int(image[r + dr, c + dc, j]) + 1) / 256 if inside else 0.0
            assert values[p, k].item() == expected
    assert len(inputs.places) == 12 * C + C - 1


@pytest.mark.parametrize(("fields", "places"), [
    ({"axes": True, "channels": 3}, 36), ({"axes": True}, 12), ({}, 1),
    ({"position": "sinusoidal"}, 12), ({"position": "learned"}, 12),
])  # fmt: skip
def test_axes_and_positions_tell_places_apart(fields, places):
    model = image_model(max_positions=2, **fields)  # the table has a row for each place, whatever that says
    x = model.embedding(torch.zeros(1, model.config.tokens, dtype=torch.long), 0, None)[0]
    assert len(x.detach().unique(dim=0)) == places
    assert "axes" not in fields or [t.num_embeddings for t in model.embedding.axes] == [4, 3, 3][: 2 + (places > 12)]


@torch.no_grad()
@pytest.mark.parametrize("fields", [
    {"position": "sinusoidal"}, {"position": "sinusoidal", "position_scale": 1.0}, {"position": "learned"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("channels", [0, 6])
def test_positions_are_added_to_values_or_concatenated_with_them(fields, channels):
    model = image_model(position_channels=channels, axes=True, near=1, **fields)
    tokens, width = model.inputs(some_pixels(model)), channels or 16
    values = model.embedding.tokens.weight[tokens]
    assert values.shape == (2, 12, 16 - channels)
    if fields["position"] == "learned":
        positions = model.embedding.position.table.weight
    else:
        positions = small.sines(width, 12) * fields.get("position_scale", 0.3 * math.sqrt(2))
    positions = positions.expand(2, 12, width)
    expected = torch.cat([values, positions], -1) if channels else values + positions
    recent = model.embedding.recent(tokens[:, :0], None)
    row, column = (torch.arange(12) // 3, torch.arange(12) % 3)
    for axis, place in zip(model.embedding.axes, (row, column), strict=True):
        expected = expected + axis.weight[place]
    nearby = model.embedding._values(torch.cat((recent, tokens), 1), 0).double()
    assert_same_maths(model.embedding(tokens, 0, recent), expected + nearby @ model.embedding.near.weight.mT)
    assert (model.head.weight is model.embedding.tokens.weight) == (channels == 0), "the table is too narrow"


POST = {"position": "sinusoidal", "position_channels": 8, "norm_position": "post", "feedforward": "relu"}


@pytest.mark.parametrize("name", ["linear", "full"])
def test_the_papers_form_is_the_same_in_pieces_and_trains_every_parameter(name):
    model = image_model(name, output="logistic", **POST)
    tokens = model.inputs(some_pixels(model))
    assert_same_maths(small.in_pieces(model, tokens, [1, 2, 7])[0], model(tokens)[0])
    x = model.embedding(tokens, 0, None)
    for block in model.blocks():
        x = block.attention_norm(x + block.attention.definition(x))
        x = block.feedforward_norm(x + block.feedforward(x))
    assert_same_maths(model.hidden(tokens)[0], x)
    model.loss(some_pixels(model)).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("output", "tied", "head", "bits"), [
    ("categorical", True, (257, 16), 8.1), ("categorical", False, (256, 16), 8.1), ("logistic", True, (12, 16), 9.0),
])  # fmt: skip
def test_before_training_all_levels_are_about_alike_and_the_head_keeps_float32(output, tied, head, bits):
    torch.manual_seed(0)
    model = ImageModel(image_config(output=output, mixtures=4, tie_embeddings=tied, init_std=0.02))
    assert model.head.weight.shape == head
    assert (model.head.weight is model.embedding.tokens.weight) == (head[0] == 257)
    assert model.loss(some_pixels(model)).item() / math.log(2) < bits
    with torch.autocast("cpu", torch.bfloat16):
        assert model(model.inputs(some_pixels(model)))[0].dtype == torch.float32


def test_checkpointing_changes_no_bit():
    model = image_model(near=1).train()
    small.assert_checkpointing_changes_no_bit(model, lambda: model.loss(some_pixels(model)))


@pytest.mark.parametrize(("changes", "message"), [
    ({"height": 0}, "height must be at least 1, got 0"),
    ({"vocab_size": 300}, "vocab_size of an image model must be 257"),
    ({"output": "gaussian"}, "unknown output 'gaussian'; valid: categorical, logistic"),
    ({"near": 4}, "near must be at least 0 and below the image's sides, 4 x 3, got 4"),
    ({"loops": 2}, "loops=2 has no meaning for an image model"),
    ({"head_bias": True}, "head_bias=True has no meaning for an image model"),
    ({"position_channels": 16, "position": "learned"}, "position_channels must be at least 0 and below dim=16, got 16"),
    ({"position_channels": 8}, "position_channels=8 has no meaning for position='none'"),
    ({"embedding_scale": 2.0}, "embedding_scale=2.0 has no meaning for an image model"),
    ({"attention": "perceiver_ar"}, "attention 'perceiver_ar' is a whole stack"),
])  # fmt: skip
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        image_config(**changes)


def test_wrong_inputs():
    model = image_model()
    pixels = some_pixels(model)
    tokens = model.inputs(pixels)
    another = image_model(near=1)(tokens[:, :1])[1]
    small.assert_refused(
        (lambda: model(tokens[..., None]), ValueError, r"tokens must have shape \[B, T\], got \[2, 12, 1\]"),
        (lambda: model(tokens[:, :1], model(tokens)[1]), ValueError, "an image of 4 x 3 x 1 has 12 tokens, got 13"),
        (lambda: model(tokens[:, :1], another), ValueError, "the state was made by configuration"),
        (lambda: model.log_prob(tokens), ValueError, r"pixels must lie in 0\.\.255, got 256"),
        (lambda: model.inputs(-tokens), ValueError, r"pixels must lie in 0\.\.255, got -256"),
        (lambda: model.log_prob(pixels.byte()), TypeError, r"pixels must be int64 or int32, got torch\.uint8"),
        (lambda: model.loss(pixels, pixels[:, 1:]), ValueError, r"pixels' shape \[2, 12\], got \[2, 11\]"),
        (lambda: model.sample(torch.zeros(1, 256), torch.zeros(1), temperature=-1), ValueError, "at least 0, got -1"),
        (lambda: model.sample(torch.full((1, 256), math.nan), torch.zeros(1)), ValueError, "must be finite, got NaN"),
    )


def test_the_configuration_has_the_decoders_fields():
    decoder = DecoderConfig(dim=32, num_heads=4, attention="linear", position="none")
    config = ImageModelConfig.from_decoder(decoder, height=5, width=6, near=1)
    assert (config.dim, config.tokens, config.shape, config.vocab_size) == (32, 30, (5, 6, 1), 257)
    assert {field.name for field in fields(DecoderConfig)} < {field.name for field in fields(config)}
