"""The decoder: its equation, the laws of a causal model, positions, loss and cost, with and without loops."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad import State
from subquad.models import Decoder, DecoderConfig, ImageModel, ImageModelConfig
from subquad.ops import flops, loss
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from subquad.testing.tools import largest_allocation
from tests.models import small

every_form = pytest.mark.parametrize(("name", "fields"), [
    *(pytest.param(p.id, {}, id=p.id, marks=p.marks) for p in small.mechanisms()),
    *(pytest.param(p.id, small.LOOPED, id=f"{p.id}-looped", marks=p.marks) for p in small.mechanisms(quick=["latte"])),
    pytest.param(["llp", "full"], {"num_layers": 4}, id="hybrid"),
    pytest.param("mamba2", {"feedforward": "none"}, id="mixers"),
    pytest.param("full", {"embedding_scale": 3.0, "residual_scale": 0.7, "logit_divisor": 5.0}, id="scaled"),
    pytest.param("llp", small.POST, id="post"),
    pytest.param("latte", small.LOOPED | small.POST | {"feedforward": "relu_squared"}, id="post-looped"),
])  # fmt: skip


def branch(model, norm, function, x):
    """One branch of a block, by the configuration's equation."""
    if model.config.norm_position == "post":
        return norm(x + model.config.residual_scale * function(x))
    return x + model.config.residual_scale * function(norm(x))


def passes_of(model, tokens):
    """Logits after each pass, by the mechanisms' definitions."""
    x, logits = model.embedding(tokens, 0, None), []
    for p in range(model.config.loops):
        x = x + model.pass_biases[p].bias if model.config.loops > 1 else x
        for block in model.blocks():
            x = branch(model, block.attention_norm, block.attention.definition, x)
            if model.config.feedforward != "none":
                x = branch(model, block.feedforward_norm, block.feedforward, x)
        h = x if model.config.norm_position == "post" else model.norm(x)
        z = h / model.config.logit_divisor @ model.head.weight.mT
        z = z if model.head.bias is None else z + model.head.bias
        if model.lookup is not None:
            z = z + F.silu(z @ model.lookup.up.weight.mT) @ model.lookup.down.weight.mT
        logits.append(z)
    return logits


@every_form
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_decoder_is_its_equation(name, fields, tie_embeddings):
    if name == "luna":  # a layer that is handed a memory has no definition of its own
        fields = fields | {"num_layers": 1}
    fields = fields | {"tie_embeddings": tie_embeddings, "position": "none"}
    model, tokens = small.decoder(name, **fields), small.tokens()
    for part, weight in model.named_parameters():
        if "norm" in part:
            torch.nn.init.normal_(weight)  # unlike another norm's
    expected = passes_of(model, tokens)
    assert_exact(model.embedding(tokens, 0, None), model.config.embedding_scale * model.embedding.tokens.weight[tokens])
    assert (model.head.weight is model.embedding.tokens.weight) == tie_embeddings
    assert (model.head.bias is None) == (not model.config.head_bias)
    assert_same_maths(model(tokens)[0], expected[-1])
    assert_same_maths(model.logits(model.hidden(tokens)[0]), expected[-1])
    assert_same_maths(model.logits(model.vectors(tokens)[:, -1]), expected[-1][:, -1])
    assert len(expected) == 1 or not torch.isclose(expected[0], expected[-1]).any(-1).all()


@every_form
@pytest.mark.parametrize("cuts", [[0, 1, 5, 6, 6, 14], list(range(1, small.TOKENS))], ids=["cuts", "each"])
def test_any_split_equals_the_whole(name, fields, cuts):
    model, tokens = small.decoder(name, **fields), small.tokens()
    logits, state = small.in_pieces(model, tokens, cuts)
    assert_same_maths(logits, model(tokens)[0])
    assert state.seen == small.TOKENS
    layers = [f"layers.{i}" for i in range(model.config.num_layers)]
    if model.config.loops > 1:
        layers = [f"passes.{p}.{layer}" for p in range(model.config.loops) for layer in layers]
    assert set(state) == {"seen", *layers}


@every_form
def test_padding_anywhere_is_as_if_removed(name, fields):
    model, tokens, mask = small.decoder(name, bias=True, **fields), small.tokens(), small.mask()
    logits, state = model(tokens, mask=mask)
    assert_exact(state.seen, mask.sum(1))
    after, _ = model(tokens[:, :4], state)
    for row, real in enumerate(mask):
        alone, own = model(tokens[row : row + 1, real])
        assert_same_maths(logits[row, real], alone[0])
        if model.head.bias is None:
            assert not logits[row, ~real].any()
        else:
            empty = model.logits(torch.zeros(16, dtype=torch.float64))
            assert_same_maths(logits[row, ~real], empty.expand_as(logits[row, ~real]))
        assert_same_maths(after[row], model(tokens[row : row + 1, :4], own)[0][0])


@every_form
def test_a_later_token_changes_no_bit_of_an_earlier_output(name, fields):
    model, tokens = small.decoder(name, **fields).float(), small.tokens()
    other = torch.cat([tokens[:, :9], (tokens[:, 9:] + 1) % small.VOCABULARY], 1)
    before, after = model(tokens)[0], model(other)[0]
    assert_exact(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@every_form
def test_a_saved_state_comes_back_bit_for_bit_and_continues(name, fields, tmp_path):
    model, tokens = small.decoder(name, **fields), small.tokens()
    _, state = model(tokens, mask=small.mask())
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors", config_hash=model.config_hash)
    assert loaded.nbytes == state.nbytes > 0
    for layer in set(state) - {"seen"}:
        assert set(loaded.child(layer)) == set(state.child(layer))
        for entry in state.child(layer):
            assert_exact(loaded.child(layer).tensor(entry), state.child(layer).tensor(entry), entry)
    assert_same_maths(model(tokens, loaded)[0], model(tokens, state)[0])


@pytest.mark.parametrize(("name", "fields"), [  # the contract compiles every mechanism
    ("llp", {"loops": 2, "loop_loss": "all"}),
    *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("full", "latte", "linear", "llp")),
])  # fmt: skip
def test_compiled_equals_eager(name, fields):
    torch._dynamo.reset()
    model, tokens = small.decoder(name, num_layers=1, **fields).train(), small.tokens()
    gradients = []
    for function in (model.loss, torch.compile(model.loss, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        function(tokens, tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        assert_same_maths(actual, expected)
    with torch.no_grad():
        compiled, mask = torch.compile(model, fullgraph=True, backend="aot_eager"), small.mask()
        (logits, state), (compiled_logits, compiled_state) = model(tokens, None, mask), compiled(tokens, None, mask)
        assert_same_maths(compiled_logits, logits)
        assert_same_maths(compiled(tokens[:, :1], compiled_state)[0], model(tokens[:, :1], state)[0])


@every_form
def test_autocast_computes_in_bfloat16_and_keeps_the_loss_in_float32(name, fields):
    model, tokens = small.decoder(name, **fields).float().train(), small.tokens()
    with torch.autocast("cpu", torch.bfloat16):
        logits, nats = model(tokens)[0], model.loss(tokens, tokens)
    assert (logits.dtype, nats.dtype) == (torch.bfloat16, torch.float32)
    nats.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
    exact, plain = (model.to(dtype).loss(tokens, tokens) for dtype in (torch.float64, torch.bfloat16))
    assert_in_budget(nats, plain, exact, torch.bfloat16)


@pytest.mark.parametrize("position", ["rope", "sinusoidal", "learned", "none"])
def test_positions_count_real_tokens_continue_from_a_state_and_tell_the_order(position):
    model, tokens, mask = small.decoder(position=position, max_positions=24), small.tokens(), small.mask()
    logits, state = model(tokens, mask=mask)
    more, state = model(tokens, state, mask.flip(1))
    for row, (real, then) in enumerate(zip(mask, mask.flip(1), strict=True)):
        alone, _ = model(torch.cat([tokens[row, real], tokens[row, then]])[None])
        assert_same_maths(torch.cat([logits[row, real], more[row, then]]), alone[0])
    # One layer's attention tells the order of the tokens before the last only by their positions.
    logits, _ = small.decoder(position=position, num_layers=1)(torch.tensor([[3, 9, 5], [9, 3, 5]]))
    assert bool(torch.isclose(logits[0, 2], logits[1, 2]).all()) == (position == "none")


@pytest.mark.parametrize("fields", [
    {}, {"loop_loss": "all"}, small.LOOPED, small.LOOPED | {"lookup": None}, small.LOOPED | {"loop_loss": "last"},
    {"head_bias": True}, {"head_bias": True, "tie_embeddings": False, "lookup": 31},
], ids=str)  # fmt: skip
def test_the_loss_is_the_cross_entropy_of_each_pass_in_training_and_of_the_last_in_evaluation(fields):
    model, tokens, mask = small.decoder(**fields), small.tokens(), small.mask()
    labels = small.tokens().flip(0).masked_fill(tokens == 3, -100)
    labels[1, 4:9] = -100
    for reduction in ("mean", "sum", "none"):
        losses = [F.cross_entropy(z.mT, labels, reduction=reduction) for z in passes_of(model, tokens)]
        trained = torch.stack(losses).mean(0) if model.config.loop_loss == "all" else losses[-1]
        assert_same_maths(model.train().loss(tokens, labels, reduction=reduction), trained)
        assert_same_maths(model.eval().loss(tokens, labels, reduction=reduction), losses[-1])
    model.train()
    padded = model.loss(tokens, labels, mask, reduction="none")
    assert not padded[~mask].any()
    for row, real in enumerate(mask):
        alone = model.loss(tokens[row : row + 1, real], labels[row : row + 1, real], reduction="none")
        assert_same_maths(padded[row, real], alone[0])
    assert_same_maths(model.loss(tokens, labels, mask), padded.sum() / (mask & (labels != -100)).sum())
    assert model.loss(tokens[:, :0], labels[:, :0]).isfinite()


def test_the_loss_in_chunks_has_the_same_gradients_and_never_holds_the_look_ups_rows_for_all_tokens(monkeypatch):
    model, tokens = small.decoder("window", **small.LOOPED | {"lookup": 512, "dim": 8}).train(), small.tokens(2, 64)

    def gradients():
        model.zero_grad()
        model.loss(tokens, tokens).backward()
        return [p.grad for p in model.parameters()]

    whole = gradients()
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", 32 * 512)
    for expected, chunked in zip(whole, gradients(), strict=True):
        assert expected.any()
        assert_same_maths(chunked, expected)
    model.float()
    assert largest_allocation(gradients) < 4 * tokens.numel() * 512 == largest_allocation(lambda: model(tokens))


def test_passes_share_their_layers_and_have_a_bias_each():
    once, looped, whole = small.decoder(), small.decoder(loops=3), small.decoder(loops=3, lookup=31)
    assert {name.partition(".")[0] for name, _ in once.named_parameters()} == {"embedding", "layers", "norm"}
    assert [p.shape for p in looped.pass_biases.parameters()] == [(16,)] * 3  # vectors, which do not decay
    assert looped.num_parameters() == once.num_parameters() + 3 * 16
    assert whole.num_parameters() == looped.num_parameters() + 2 * small.VOCABULARY * 31


@pytest.mark.parametrize("silent", ["attention", "feedforward"])
def test_dropout_acts_on_each_branch(silent):
    block = small.decoder(dropout=0.5).blocks()[0].train()
    silenced = block.attention.out if silent == "attention" else block.feedforward.down
    torch.nn.init.zeros_(silenced.weight)
    x = torch.randn(4, 64, 16, dtype=torch.float64)
    assert math.isclose((block(x)[0] == x).double().mean().item(), 0.5, abs_tol=0.05)
    assert not (block.eval()(x)[0] == x).all()


def test_settings_reach_the_mechanisms_that_have_them():
    options = {"window": {"width": 3, "dropout": 0.5}, "latte": {"num_heads": 1}}
    shared = {"num_kv_heads": 1, "rope_base": 500.0, "attention_dropout": 0.25, "bias": True}
    model = small.decoder(["window", "linear"], num_layers=4, options=options, **shared)
    assert [block.attention.name for block in model.blocks()] == ["window", "linear"] * 2
    window, linear = (block.attention.config for block in model.blocks()[2:])
    assert (window.num_kv_heads, window.rope, window.rope_base, window.bias) == (1, True, 500.0, True)
    assert (window.width, window.dropout, linear.dropout, linear.bias) == (3, 0.5, 0.25, True)
    assert small.decoder("window", position="none").blocks()[0].attention.config.rope is False
    sines = small.decoder("linear", dim=64, num_heads=4, init_std=0.05).embedding.position
    assert math.isclose(sines(torch.zeros(1, 500, 64), 0).std().item(), 0.05, rel_tol=0.15), "the embeddings' size"


def test_first_weights_are_smaller_where_they_write_into_the_residual_stream():
    config = DecoderConfig(
        vocab_size=500, dim=128, num_layers=4, attention=["llp_printed", "latte"], norm="layer", bias=True, loops=2,
        init_std=0.05, lookup=300, head_bias=True, options={"llp_printed": {"shared_kv": False, "key_norm": False}},
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(config)
    stds = {name: p.std().item() for name, p in model.named_parameters() if p.ndim == 2}
    small = {name for name, std in stds.items() if std < 0.025}
    assert {"layers.0.attention.out.weight", "layers.0.attention.first_out.weight"} < small
    assert {"layers.1.attention.out.weight", "layers.3.feedforward.down.weight"} < small
    assert all(name.endswith(("out.weight", "feedforward.down.weight")) for name in small)
    for name, std in stds.items():
        assert math.isclose(std, 0.05 / 4 if name in small else 0.05, rel_tol=0.1), name
    assert_exact(model.layers[0].attention_norm.weight, torch.ones(128))
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert biases
    assert not any(bias.any() for bias in biases)
    assert Decoder(config.replace(feedforward="bilinear")).layers[0].output_projections()[-1].in_features == 8 * 128
    mixers = Decoder(config.replace(feedforward="none"))
    assert math.isclose(mixers.layers[1].attention.out.weight.std().item(), 0.05 / math.sqrt(8), rel_tol=0.1)


@pytest.mark.parametrize(("name", "fields"), [
    *(pytest.param(p.id, {}, marks=p.marks) for p in small.mechanisms(quick=["full"])),
    ("latte", small.LOOPED), ("latte", small.LOOPED | {"loop_loss": "last"}),
])  # fmt: skip
def test_cost_counts_layers_for_every_pass_and_the_head_for_every_loss(name, fields):
    flops.register()
    model = small.decoder(name, tie_embeddings=False, **fields).float().train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    weights = [p.clone() for p in model.parameters()]
    cost, layer, config = model.cost(50), model.blocks()[0].attention.cost(50), model.config
    layers, heads = 2 * config.loops, config.loops if config.loop_loss == "all" else 1
    for field in ("mixing_flops", "score_entries", "unmasked_entries"):
        assert getattr(cost, field) == layers * getattr(layer, field)
    assert cost.state_bytes == model.read(torch.zeros(1, 50, dtype=torch.long)).nbytes
    feedforward = sum(p.numel() for p in model.blocks()[0].feedforward.parameters())
    head = small.VOCABULARY * 16 + 2 * small.VOCABULARY * (config.lookup or 0)
    rest = 100 * (layers * feedforward + heads * head)
    assert cost.projection_flops == layers * layer.projection_flops + rest
    assert cost.backward_flops == layers * layer.backward_flops + 2 * rest
    assert cost.activation_bytes > layers * layer.activation_bytes
    assert cost.parameters == model.num_parameters() == sum(p.numel() for p in weights)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _, state = model(small.tokens(1, 50))
    assert heads > 1 or counter.get_total_flops() == cost.mixing_flops + cost.projection_flops
    assert name != "latte" or state.nbytes == cost.state_bytes  # a state of constant size


@pytest.mark.parametrize(("fields", "message"), [
    ({"attention": "lpl"}, "unknown attention 'lpl'; did you mean 'llp'"),
    ({"options": {"lpl": {}}}, "unknown attention 'lpl'; did you mean 'llp'"),
    ({"options": {"llp": {"segments": 4}}}, "attention 'llp' has no option 'segments'; did you mean 'segment'"),
    ({"options": {"window": {"widht": 4}}}, "attention 'window' has no option 'widht'; did you mean 'width'"),
    ({"options": {"llp": {"dim": 4}}}, "attention 'llp' has no option 'dim'"),
    ({"options": {"window": {"width": -3}}}, "of attention 'window', which no layer uses: width must be at least 1"),
    ({"options": {"latte": {"num_heads": 5}}}, "options of attention 'latte', which no layer uses: dim must be"),
    ({"attention": "linformer", "position": "none"}, "attention 'linformer' has no causal form"),
    ({"options": {"llp": {"causal": False}}}, "this model is causal, but the options of attention 'llp' say causal=F"),
    ({"attention": "latte", "position": "rope"}, "position='rope' needs a layer that rotates .* latte does not"),
    ({"attention": "latte", "position": "none", "num_kv_heads": 1}, "num_kv_heads=1 has no effect: latte"),
    ({"position": "sinusoidal", "dim": 9, "num_heads": 3}, "sinusoidal positions need an even dim, got 9"),
])  # fmt: skip
def test_settings_that_no_layer_supports_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Decoder(DecoderConfig(**({"dim": 16, "num_heads": 2, "num_layers": 2} | fields)))


def test_a_mask_in_the_states_place_is_told_its_name():
    model, block = small.decoder(), small.decoder().blocks()[0]
    image = ImageModel(ImageModelConfig(attention="full", dim=16, num_layers=1, num_heads=2))
    match = r"state must be a State .*, got Tensor; give a mask by its name: layer\(x, mask=mask\)"
    small.assert_refused(
        (lambda: model(small.tokens(), small.mask()), TypeError, match),
        (lambda: small.perceiver_ar("cross")(small.tokens(), small.mask()), TypeError, match),
        (lambda: block(torch.zeros(3, 17, 16).double(), small.mask()), TypeError, match),
        (lambda: image(small.tokens(), small.mask()), TypeError, match),
        (lambda: model(small.tokens(), mask=model(small.tokens())[1]), TypeError, "mask must be .* got State"),
    )


def test_bad_input_is_named():
    model, short, tokens = small.decoder(), small.decoder(position="learned", max_positions=12), small.tokens()
    _, state = model(tokens)
    small.assert_refused(
        (lambda: model(tokens[0]), ValueError, r"tokens must have shape \[B, T\], got \[17\]"),
        (lambda: short(tokens), ValueError, "position 16 is outside of the learned table of 12 positions"),
        (lambda: model(tokens.float()), TypeError, "tokens must be int64 or int32, got torch.float32"),
        (lambda: model(tokens, mask=torch.ones_like(tokens)), TypeError, "mask must be a bool tensor"),
        (lambda: model(tokens, mask=small.mask()[:, :4]), ValueError, r"mask must have shape \(3, 17\)"),
        (lambda: model(tokens[:2], state), ValueError, "holds 3 sequences but this decoder was given 2"),
        (lambda: small.decoder(loops=2)(tokens, state), ValueError, "made by configuration .* but this decoder has"),
        (lambda: model.loss(tokens, tokens[:, 1:]), ValueError, r"tokens' shape \[3, 17\], got \[3, 16\]"),
        (lambda: model.loss(tokens, tokens, reduction="avg"), ValueError, "unknown reduction 'avg'"),
        (lambda: small.decoder("window", options={"window": {"width": "wide"}}), TypeError, "width"),
        (lambda: small.decoder("llp", options={"window": {"width": "w"}}), TypeError, "'window', which no layer uses"),
    )
