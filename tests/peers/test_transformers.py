"""transformers' own Longformer, BigBird and Perceiver."""

import numpy as np
import pytest
import torch

from subquad.attention import build
from subquad.models.encoder import EncoderConfig
from subquad.models.perceiver import Perceiver
from subquad.ops import block_attention
from subquad.ops.patterns import Pattern
from subquad.testing import assert_in_budget, assert_same_maths

DIM, HEADS, K, TOKENS = 32, 2, 16, 64


@torch.no_grad()
def copy(pairs):
    """Copy weights and biases of linear layers and norms from theirs to ours."""
    for ours, theirs in pairs:
        ours.weight.copy_(theirs.weight)
        ours.bias.copy_(theirs.bias)


@pytest.mark.parametrize("num_global", [1, 3])
def test_longformer_with_global_tokens_first(peer, double, note, random, num_global):
    width = 8
    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "attention_window": [width]}
    config = peer("transformers").LongformerConfig(**sizes, attention_probs_dropout_prob=0.0)
    library = peer("transformers.models.longformer.modeling_longformer")
    theirs = double(lambda: library.LongformerSelfAttention(config, layer_id=0))
    options = {"causal": False, "bias": True, "width": width + 1, "num_global": num_global}
    ours = double(lambda: build("longformer", dim=DIM, num_heads=HEADS, **options))
    names = ("query", "key", "value")
    copy([(getattr(ours, name), getattr(theirs, name)) for name in names])
    copy([(getattr(ours, f"global_{name}"), getattr(theirs, f"{name}_global")) for name in names])
    with torch.no_grad():  # it has its output projection elsewhere
        ours.out.weight.copy_(torch.eye(DIM))
        ours.out.bias.zero_()
    x = random(2, TOKENS, DIM)
    is_global = (torch.arange(TOKENS) < num_global).expand(2, TOKENS)
    masks = {"is_index_masked": torch.zeros_like(is_global), "is_index_global_attn": is_global, "is_global_attn": True}
    y = theirs(x, attention_mask=is_global.double() * 10_000, **masks)[0]
    exact = ours(x)[0]
    note("transformers", f"Longformer, {num_global} global (its softmax is float32)", (y - exact).abs().max())
    # Its softmax is taken in float32 whatever the input, so it is held to the budget of float32.
    plain = ours.float()(x.float())[0]
    assert_in_budget(y, plain, exact, torch.float32, "Longformer")


BLOCK, RANDOM = 8, 2
TABLES: dict[int, torch.Tensor] = {}


class BlockTable(Pattern):
    """Blocks of keys that each block of queries sees, looked up in `TABLES[number]`: a pattern from outside."""

    causal = False

    def __init__(self, number):
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "_key", f"BlockTable(number={number})")

    def allowed(self, q_pos, k_pos):
        last = len(TABLES[self.number]) - 1
        return TABLES[self.number][(q_pos // BLOCK).clamp(0, last), (k_pos // BLOCK).clamp(0, last)]


@pytest.fixture
def bigbird(peer, double):
    library = peer("transformers.models.big_bird.modeling_big_bird")
    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "block_size": BLOCK, "num_random_blocks": RANDOM}
    config = peer("transformers").BigBirdConfig(**sizes)
    layer = double(lambda: library.BigBirdBlockSparseAttention(config, seed=3))
    n = TOKENS * 2 // BLOCK
    real = torch.ones(1, 2 * TOKENS, dtype=torch.float64)
    blocked = real.view(1, n, BLOCK)
    masks = {
        "band_mask": torch.ones(1, 1, n - 4, BLOCK, 3 * BLOCK, dtype=torch.float64),
        "from_mask": real[:, None, :, None],
        "to_mask": real[:, None, None],
        "from_blocked_mask": blocked,
        "to_blocked_mask": blocked,
    }
    return layer, lambda x: layer(x, **masks)[0]


def near_and_global(n):
    """A window of three blocks; the first and the last block see all and are seen by all."""
    i = torch.arange(n)
    near = (i[:, None] - i).abs() <= 1
    ends = (i == 0) | (i == n - 1)
    return near | ends | ends[:, None]


def heads_of(layer, x):
    return [project(x).unflatten(-1, (HEADS, K)).transpose(1, 2) for project in (layer.query, layer.key, layer.value)]


@pytest.mark.parametrize("backend", ["reference", "torch", "sequential"])
def test_bigbird_in_training_is_softmax_over_its_blocks(bigbird, agree, random, backend):
    layer, theirs = bigbird
    layer.train()  # it draws random blocks in training alone
    x, n = random(1, 2 * TOKENS, DIM), 2 * TOKENS // BLOCK
    y = theirs(x)
    np.random.seed(3)
    plan = layer._get_rand_attn_plan(2 * TOKENS, BLOCK, RANDOM)
    drawn = layer._bigbird_block_rand_mask_with_head(2 * TOKENS, 2 * TOKENS, BLOCK, BLOCK, HEADS, *plan)
    for h in range(HEADS):
        table = near_and_global(n)
        table[torch.arange(1, n - 1)[:, None], torch.as_tensor(drawn[h]).long()] = True
        TABLES[h] = table
        assert (table.sum(1)[2 : n - 2] == 5 + RANDOM).all(), "no block is drawn twice"
        q, k, v = (part[:, h : h + 1] for part in heads_of(layer, x))
        ours = block_attention(q, k, v, BlockTable(h), backend=backend)
        agree("transformers", f"BigBird in training, our {backend}", ours[0, 0], y[0, :, K * h : K * (h + 1)])


def test_bigbird_in_evaluation_counts_its_first_block_once_more_for_each_random_block(bigbird, note, random):
    layer, theirs = bigbird
    x, n = random(1, 2 * TOKENS, DIM), 2 * TOKENS // BLOCK
    y = theirs(x).unflatten(-1, (HEADS, K)).transpose(1, 2)
    TABLES[0] = near_and_global(n)
    q, k, v = heads_of(layer, x)
    window_and_global = block_attention(q, k, v, BlockTable(0))
    note("transformers", "error: BigBird in evaluation", (y - window_and_global).abs().max())
    counts = TABLES[0].double()
    counts[1:-1, 0] += RANDOM
    weights = counts.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) * (q @ k.mT / K**0.5).exp()
    assert_same_maths(y, weights / weights.sum(-1, keepdim=True) @ v, "the first block counts 1 + RANDOM times")
    assert (y - window_and_global).abs().max() > 1e-2


def test_bigbird_of_ours_is_softmax_over_the_blocks_that_it_says(agree, double, random):
    options = {"causal": False, "block": BLOCK, "num_global": 1, "num_random": RANDOM}
    layer = double(lambda: build("bigbird", dim=DIM, num_heads=HEADS, **options))
    x, n = random(1, 2 * TOKENS, DIM), 2 * TOKENS // BLOCK
    seen = layer.weights(x)[0].unflatten(-1, (n, BLOCK)).unflatten(-3, (n, BLOCK)).amax((0, 2, 4)) > 0
    i = torch.arange(n)
    needed = ((i[:, None] - i).abs() <= 1) | (i == 0) | (i == 0)[:, None]
    assert (seen[needed]).all()
    assert ((seen & ~needed).sum(1)[3:-2] == RANDOM).all(), "in evaluation too"
    TABLES[0] = seen
    q, k, v = layer.queries(x), layer.keys(x), layer.values(x)
    by_table = layer.merge(block_attention(q, k, v, BlockTable(0)))
    agree("transformers", "(our BigBird, as a table)", layer(x)[0], by_table)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("residual", [True, False])
def test_perceivers_encoder(peer, double, agree, random, repeats, residual):
    channels, latents, layers = 24, 10, 2
    widths = {"d_latents": DIM, "d_model": channels, "qk_channels": DIM, "v_channels": DIM}
    counts = {"num_latents": latents, "num_blocks": repeats, "num_self_attends_per_block": layers}
    for kind in ("self", "cross"):
        counts |= {f"num_{kind}_attention_heads": HEADS, f"{kind}_attention_widening_factor": 2}
    settings = {"use_query_residual": residual, "attention_probs_dropout_prob": 0.0}
    config = peer("transformers").PerceiverConfig(**widths, **counts, **settings)
    library = peer("transformers.models.perceiver.modeling_perceiver")
    theirs = double(lambda: library.PerceiverEncoder(config, kv_dim=channels))
    options = {"latents": latents, "repeats": repeats, "cross_heads": HEADS, "query_residual": residual}
    sizes = {"dim": DIM, "num_layers": layers, "num_heads": HEADS, "ff_mult": 2, "bias": True}
    kinds = {"attention": "perceiver", "position": "none", "norm": "layer", "feedforward": "gelu"}
    shape = EncoderConfig(**sizes, **kinds, options={"perceiver": options})
    ours = double(lambda: Perceiver(shape, input_dim=channels))
    reading, cross = ours.readings[0], theirs.cross_attention
    copy([(reading.query_norm, cross.attention.self.layernorm1), (reading.input_norm, cross.attention.self.layernorm2)])
    pairs = [(reading, reading, cross)]
    for block, layer in zip(ours.layers, theirs.self_attends, strict=True):
        copy([(block.attention_norm, layer.attention.self.layernorm1)])
        pairs.append((block, block.attention, layer))
    for block, mixer, layer in pairs:
        copy([(getattr(mixer, name), getattr(layer.attention.self, name)) for name in ("query", "key", "value")])
        copy([(mixer.out, layer.attention.output.dense), (block.feedforward_norm, layer.layernorm)])
        copy([(block.feedforward.up, layer.mlp.dense1), (block.feedforward.down, layer.mlp.dense2)])
    inputs = random(2, 40, channels)
    what = f"Perceiver's encoder, {repeats} blocks{'' if residual else ', without query residual'}"
    agree("transformers", what, ours(inputs), theirs(ours.latents.expand(2, -1, -1), inputs=inputs)[0])
