"""Perceiver and Perceiver IO, on arrays and on tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from subquad.models import Classifier, EncoderConfig, Perceiver, PerceiverIO
from subquad.models.build import build_model
from subquad.models.perceiver import LATENT_STD, CrossBlock, PerceiverEncoder, fourier_features
from subquad.models.stacks import STACKS, PerceiverIOOptions, PerceiverOptions
from subquad.ops import flops
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths

VOCABULARY, INPUTS, CHANNELS, QUERY = 23, 9, 6, 10
both = pytest.mark.parametrize("name", ["perceiver", "perceiver_io"])


def config_of(name="perceiver", options=None, **fields):
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention": name,
        "options": {name: {"latents": 5} | (options or {})},
        "position": "learned",
        "max_positions": 32,
        "init_std": 0.3,
    }
    return EncoderConfig(**(shape | fields))


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


def some_tokens(batch=3, tokens=INPUTS):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def some_mask():
    """Padding on the left, on the right and in the middle; one row has a single real input."""
    mask = torch.ones(4, INPUTS, dtype=torch.bool)
    mask[0, :5] = False
    mask[1, 6:] = False
    mask[2, 2:7] = False
    mask[3, :4] = mask[3, 5:] = False
    return mask


def read(block: CrossBlock, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """A cross-attention block by its equation, one query and one head at a time: `x` [O, C], `inputs` [S, C']."""
    queries, keys, values = (
        block.query(block.query_norm(x)),
        block.key(block.input_norm(inputs)),
        block.value(block.input_norm(inputs)),
    )
    width = queries.shape[1] // block.num_heads
    rows = []
    for query in queries:
        heads = []
        for h in range(block.num_heads):
            part = slice(h * width, (h + 1) * width)
            scores = [math.exp(float(query[part] @ key[part]) / math.sqrt(width)) for key in keys]
            heads.append(sum(s / sum(scores) * value[part] for s, value in zip(scores, values, strict=True)))
        rows.append(torch.cat(heads))
    y = block.out(torch.stack(rows))
    x = x + y if block.residual else y
    return x + block.feedforward(block.feedforward_norm(x))


def expected_latents(model: Perceiver, inputs: torch.Tensor) -> torch.Tensor:
    """The latents of one array [S, C], by the paper's algorithm."""
    z = model.latents
    for repeat in range(model.options.repeats):
        if repeat == 0:
            z = read(model.readings[0], z, inputs)
        elif model.options.reads == "each":
            z = read(model.readings[1], z, inputs)
        for block in model.layers:
            z = z + block.attention.definition(block.attention_norm(z)[None])[0]
            z = z + block.feedforward(block.feedforward_norm(z))
    return z


# --- the equations


@pytest.mark.parametrize("options", [
    {},
    {"repeats": 3},
    {"repeats": 3, "reads": "each", "cross_heads": 4},
    {"query_residual": False, "latents": 1},
])  # fmt: skip
@torch.no_grad()
def test_perceiver_is_its_equation(options):
    model, inputs = perceiver(options), random(2, INPUTS, CHANNELS)
    assert_same_maths(model(inputs), torch.stack([expected_latents(model, row) for row in inputs]))


@pytest.mark.parametrize("options", [{}, {"output_residual": False, "cross_heads": 2, "repeats": 2}])
@torch.no_grad()
def test_perceiver_io_is_its_equation(options):
    model, inputs, queries = perceiver_io(options), random(2, INPUTS, CHANNELS), random(2, 4, QUERY, seed=2)
    rows = zip(inputs, queries, strict=True)
    assert_same_maths(
        model(inputs, queries),
        torch.stack([read(model.reader, q, expected_latents(model.perceiver, row)) for row, q in rows]),
    )


@settings(max_examples=20)
@given(inputs=st.integers(0, 40), queries=st.integers(0, 40), latents=st.integers(1, 12))
def test_any_number_of_inputs_and_queries(inputs, queries, latents):
    model = perceiver_io({"latents": latents}, num_layers=1)
    outputs = model(random(2, inputs, CHANNELS), random(2, queries, QUERY))
    assert outputs.shape == (2, queries, QUERY)
    assert outputs.isfinite().all()


def test_no_output_depends_on_another_query():
    model, inputs, queries = perceiver_io(), random(2, INPUTS, CHANNELS), random(6, QUERY, seed=2)
    together = model(inputs, queries)
    for i in range(6):
        assert_same_maths(together[:, i : i + 1], model(inputs, queries[i : i + 1]))


def test_queries_for_all_rows_and_for_each():
    model, inputs, queries = perceiver_io(), random(2, INPUTS, CHANNELS), random(4, QUERY, seed=2)
    assert_exact(model(inputs, queries), model(inputs, torch.stack([queries, queries])))


# --- padding and batches


def test_arrays_padding_does_not_exist_wherever_it_stands():
    model, inputs, mask = perceiver(), random(4, INPUTS, CHANNELS), some_mask()
    latents = model(inputs, mask)
    for row in range(4):
        assert_same_maths(latents[row], model(inputs[row : row + 1, mask[row]])[0])


def test_what_stands_in_padding_changes_no_bit_and_gets_no_gradient():
    model, inputs, mask = perceiver_io().float(), random(4, INPUTS, CHANNELS).float(), some_mask()
    queries = random(3, QUERY).float()
    other = torch.where(mask[..., None], inputs, torch.nan).requires_grad_()
    outputs = model(other, queries, mask)
    assert_exact(outputs, model(inputs, queries, mask))
    outputs.square().sum().backward()
    assert not other.grad[~mask].any()
    assert other.grad[mask].any()


def test_a_row_without_inputs_is_finite_and_a_row_of_its_own():
    model, inputs = perceiver(), random(2, INPUTS, CHANNELS)
    mask = torch.ones(2, INPUTS, dtype=torch.bool)
    mask[0] = False
    latents = model(inputs, mask)
    assert_same_maths(latents[0], model(inputs[:1, :0])[0])
    assert_same_maths(latents[1], model(inputs[1:])[0])


@both
def test_tokens_padding_does_not_exist_wherever_it_stands(name):
    model, tokens, mask = classifier(name, {"fourier_bands": 3}), some_tokens(4), some_mask()
    logits = model(tokens, mask)
    for row in range(4):
        assert_same_maths(logits[row], model(tokens[row : row + 1, mask[row]])[0])
    assert_exact(model(torch.where(mask, tokens, -7), mask), logits)


@both
def test_a_batch_is_its_rows(name):
    model, tokens, mask = classifier(name), some_tokens(4), some_mask()
    assert_same_maths(model(tokens, mask), torch.cat([model(tokens[i : i + 1], mask[i : i + 1]) for i in range(4)]))


# --- weights


def test_repeats_share_their_weights():
    once, thrice = perceiver(), perceiver({"repeats": 3})
    assert [p.shape for p in once.parameters()] == [p.shape for p in thrice.parameters()]
    runs = []
    for block in thrice.layers:
        block.register_forward_hook(lambda *_: runs.append(1))
    inputs = random(2, INPUTS, CHANNELS)
    thrice(inputs)
    assert len(runs) == 3 * 2
    thrice.load_state_dict(once.state_dict())
    assert not torch.isclose(thrice(inputs), once(inputs)).all()


def test_later_readings_share_theirs_but_not_the_first_ones():
    for repeats, readings in ((1, 1), (2, 2), (5, 2)):
        model = perceiver({"repeats": repeats, "reads": "each"})
        assert len(model.readings) == readings
        assert len(model.schedule()) == repeats
    assert model.schedule() == [0, 1, 1, 1, 1]
    assert perceiver({"repeats": 5}).schedule() == [0]


@both
def test_every_parameter_gets_a_gradient(name):
    model = classifier(name, {"repeats": 3, "reads": "each", "fourier_bands": 2}, dropout=0.1).train()
    model(some_tokens(), None).square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


def test_first_weights():
    model = perceiver({"latents": 400, "repeats": 3, "reads": "each"}, dim=64, init_std=0.02)
    assert model.latents.abs().max().item() <= 2 * LATENT_STD
    assert 0.7 * LATENT_STD < model.latents.std().item() < LATENT_STD
    branches = 2 * (3 + 3 * 2)
    for weight, std in (
        (model.readings[0].query.weight, 0.02),
        (model.readings[1].out.weight, 0.02 / math.sqrt(branches)),
        (model.layers[0].feedforward.down.weight, 0.02 / math.sqrt(branches)),
    ):
        assert 0.8 * std < weight.std().item() < 1.2 * std


# --- tokens


@both
def test_the_pooled_vector_is_the_mean_of_what_forward_gives(name):
    model, tokens = classifier(name), some_tokens()
    vectors = model.encoder(tokens)
    assert vectors.shape == (3, 1 if name == "perceiver_io" else 5, 16)
    assert_same_maths(model(tokens), model.head(vectors.mean(1)))


@both
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
def test_order_matters_where_positions_are_known(name, position):
    tokens = some_tokens()
    for bands in (0, 3):
        model = classifier(name, {"fourier_bands": bands}, position=position)
        same = torch.isclose(model(tokens), model(tokens.flip(1))).all()
        assert bool(same) == (position == "none" and bands == 0)


def test_fourier_features_are_their_definition():
    places = torch.tensor([[-1.0, 0.25], [0.5, 1.0]], dtype=torch.float64)
    features = fourier_features(places, 3, 10)
    expected = []
    for row in places.tolist():
        values = []
        for p in row:
            angles = [math.pi * f * p for f in (1.0, 3.0, 5.0)]
            values += [p, *map(math.sin, angles), *map(math.cos, angles)]
        expected.append(values)
    assert_same_maths(features, torch.tensor(expected, dtype=torch.float64))


# --- precision, compiled, counted


@both
def test_autocast_stays_in_budget(name):
    def logits(dtype, autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            return classifier(name).to(dtype)(some_tokens())

    exact, plain = logits(torch.float64, False), logits(torch.bfloat16, False)
    assert_in_budget(logits(torch.float32, True), plain, exact, torch.bfloat16)


@torch.no_grad()
def test_compiled_equals_eager():
    torch._dynamo.reset()
    model, tokens, mask = classifier("perceiver_io", num_layers=1), some_tokens(4), some_mask()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_maths(compiled(tokens, mask), model(tokens, mask))


@both
@pytest.mark.parametrize("options", [{}, {"repeats": 3, "reads": "each", "fourier_bands": 2}])
def test_the_cost_is_what_torch_counts(name, options):
    flops.register()
    model, tokens = classifier(name, options).float().train(), some_tokens(1)
    cost = model.cost(INPUTS)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert counter.get_total_flops() == cost.mixing_flops + cost.projection_flops
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    repeats = options.get("repeats", 1)
    entries = repeats * 2 * 2 * 5 * 5 + (repeats if options else 1) * 5 * INPUTS + (5 if name == "perceiver_io" else 0)
    assert cost.score_entries == cost.unmasked_entries == entries
    assert cost.activation_bytes > 0
    assert cost.state_bytes == 0
    # The features of positions need no gradient, which saves a part of the first products.
    assert backward.get_total_flops() <= cost.backward_flops


@both
def test_the_cost_is_linear_in_the_inputs(name):
    model = classifier(name, max_positions=4096)
    costs = [model.cost(tokens) for tokens in (1024, 2048, 3072)]
    for field in ("score_entries", "mixing_flops", "projection_flops", "backward_flops"):
        first, second, third = (getattr(cost, field) for cost in costs)
        assert third - second == second - first > 0


# --- mistakes


def test_wrong_inputs_are_refused():
    model, inputs = perceiver_io(), random(2, INPUTS, CHANNELS)
    with pytest.raises(ValueError, match=r"inputs must have shape \[B, S, 6\], got \[2, 9, 5\]"):
        model(inputs[..., :5], random(2, 3, QUERY))
    with pytest.raises(ValueError, match=r"queries must have shape \[O, 10\] or \[2, O, 10\], got \[3, 4, 10\]"):
        model(inputs, random(3, 4, QUERY))
    with pytest.raises(ValueError, match=r"queries must have shape \[O, 10\] or \[2, O, 10\], got \[4, 9\]"):
        model(inputs, random(4, 9))
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        model(inputs, random(4, QUERY), torch.ones(2, INPUTS))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 9\)"):
        model(inputs, random(4, QUERY), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(("options", "message"), [
    ({"latents": 0}, "latents must be at least 1, got 0"),
    ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ({"cross_heads": 0}, "cross_heads must be at least 1, got 0"),
    ({"fourier_bands": -1}, "fourier_bands must be at least 0, got -1"),
    ({"cross_heads": 3}, "cross_heads must divide dim, got cross_heads=3, dim=16"),
    ({"latent": 4}, "has no key 'options.perceiver.latent'; did you mean 'latents'"),
    ({"reads": "twice"}, "options.perceiver.reads must be one of its choices, got 'twice'; valid: each, once"),
])  # fmt: skip
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        perceiver(options)


def test_options_of_others_are_checked():
    def made(others):
        return Perceiver(config_of().replace(options={"perceiver": {"latents": 5}, **others}), input_dim=CHANNELS)

    assert made({"llp": {"segment": 8}}).options.latents == 5
    with pytest.raises(ValueError, match="attention 'llp' has no option 'segments'"):
        made({"llp": {"segments": 8}})
    with pytest.raises(ValueError, match="unknown attention 'perciever'"):
        made({"perciever": {"latents": 8}})


def test_wrong_choices_are_refused_in_python_too():
    with pytest.raises(ValueError, match="unknown reads 'twice'; valid: each, once"):
        PerceiverOptions(reads="twice")
    with pytest.raises(ValueError, match="latents must be at least 1, got 0"):
        PerceiverIOOptions(latents=0)


def test_wrong_widths_and_names_are_refused():
    with pytest.raises(ValueError, match="input_dim must be at least 1, got 0"):
        Perceiver(config_of(), input_dim=0)
    with pytest.raises(ValueError, match="query_dim must be at least 1, got 0"):
        PerceiverIO(config_of("perceiver_io"), input_dim=4, query_dim=0)
    with pytest.raises(ValueError, match="needs attention='perceiver' or 'perceiver_io', got 'full'"):
        Perceiver(EncoderConfig(attention="full"), input_dim=4)
    with pytest.raises(ValueError, match="a PerceiverIO needs attention='perceiver_io', got 'perceiver'"):
        PerceiverIO(config_of("perceiver"), input_dim=4, query_dim=4)


@both
def test_what_tokens_need_is_checked(name):
    with pytest.raises(ValueError, match=f"position='rope' needs a layer that rotates .* {name} does not"):
        classifier(name, position="rope")
    with pytest.raises(ValueError, match=f"{name} pools its latents: pooling must be 'mean', got 'class'"):
        classifier(name, pooling="class")
    with pytest.raises(ValueError, match="fourier_bands supports max_positions=32 tokens, got 33"):
        PerceiverEncoder(config_of(name, {"fourier_bands": 2}, position="none"))(some_tokens(1, 33))


@both
def test_the_stacks_are_registered(name):
    stack = STACKS[name]
    assert stack.forms == ("bidirectional",)
    core = PerceiverEncoder(config_of(name, position="none")).core
    assert type(core) is (Perceiver if name == "perceiver" else PerceiverIO)
    assert stack.options is (PerceiverOptions if name == "perceiver" else PerceiverIOOptions)
    with pytest.raises(ValueError, match=f"attention {name!r} has no causal form"):
        build_model(config_of(name))
