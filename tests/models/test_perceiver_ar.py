"""Perceiver AR and V1 to V3 against their equations, written out with dense weights."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad.layers.positions import rotate
from subquad.models import DecoderConfig, PerceiverAR
from subquad.models.perceiver_window import History, thin
from subquad.models.stacks import PerceiverAROptions
from subquad.ops import flops
from subquad.testing import assert_exact, assert_same_maths
from tests.models import small


def at(x_THK, places):
    """Each row rotated to its own position."""
    return torch.stack([rotate(x[None, :, None], p)[0, :, 0] for x, p in zip(x_THK, places, strict=True)])


def dense(mixer, z_TD, q_places, past_SD, k_places, allowed_TS, drawn=None):
    """`out(softmax(q k^T / sqrt(K)) v)` with one sequence's dense weights, which are added to `drawn`."""
    q, k, v = (x.unflatten(-1, (2, -1)) for x in (mixer.query(z_TD), mixer.key(past_SD), mixer.value(past_SD)))
    q, k = at(q, q_places), at(k, k_places)
    scores_HTS = torch.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1])
    weights_HTS = scores_HTS.masked_fill(~allowed_TS, -math.inf).softmax(-1)
    if drawn is not None:
        drawn.append(weights_HTS)
    return mixer.out(torch.einsum("hts,shk->thk", weights_HTS, v).flatten(1))


def finished(block, x_TD, y_TD, post):
    """A block after its attention's output `y`; post-norm blocks have two norms behind the branches."""
    if post:
        x_TD = block.attention_norm(x_TD + y_TD)
        return block.feedforward_norm(x_TD + block.feedforward(x_TD))
    x_TD = x_TD + y_TD
    return x_TD + block.feedforward(block.feedforward_norm(x_TD))


def by_definition(model, tokens_T, latents=small.LATENTS, kept=None, drawn=None):
    """The vectors of one sequence's latents; `kept` are the history's positions that are not dropped (None: all)."""
    options, T = model.options, len(tokens_T)
    m = min(latents, T)
    h = min(T - m, options.history_tokens or T)
    start = T - m
    x = model.config.embedding_scale * model.embedding.tokens.weight[tokens_T]
    post = model.config.norm_position == "post"
    places, lat_places = [p for p in range(start - h, start) if kept is None or p in kept], list(range(start, T))
    x_old, x_lat, compressed = x[places], x[start:], None
    if options.history == "compressed" and h:
        compressed = model.compress.weight[:, [small.COLUMNS - start + p for p in places]] @ x_old
        ends = [(p + 1) * small.COLUMNS // small.ROWS - 1 for p in range(small.ROWS)]
        compressed_places = [start - small.COLUMNS + end for end in ends]
        if options.first_layer == "compressed":
            x_old, places = compressed, compressed_places
    for i, block in enumerate(model.layers):
        old, lat = (x_old, x_lat) if post else (block.attention_norm(x_old), block.attention_norm(x_lat))
        S = len(places)
        allowed = torch.cat([torch.ones(m, S), torch.ones(m, m).tril()], 1).bool()
        both, read = torch.cat([old, lat]), places + lat_places
        x_lat = finished(block, x_lat, dense(block.attention, lat, lat_places, both, read, allowed, drawn), post)
        if options.history == "cross":
            x_old, places = x_old[:0], []
        elif options.first_layer == "full" and i == 0 and h:
            x_old, places = compressed, compressed_places
        elif S and i < len(model.layers) - 1:
            segment = torch.arange(S) // (small.SEGMENT if options.history == "segments" else S)
            same = segment[:, None] == segment
            y = dense(model.history[str(i)], old, places, old, places, same, drawn)
            x_old = finished(block, x_old, y, post)
    return x_lat if post else model.norm(x_lat)


@small.every_history
@pytest.mark.parametrize("fields", [{}, small.POST | {"embedding_scale": 2.0}], ids=["pre", "post"])
def test_the_model_is_its_equations(form, fields):
    model = small.perceiver_ar(form, **fields)
    for tokens in (1, small.LATENTS, 6, 9, small.TOKENS):
        ids = small.tokens(2, tokens)
        h, state = model.hidden(ids)
        assert h.shape == (2, min(small.LATENTS, tokens), 16)
        assert_same_maths(h, torch.stack([by_definition(model, row) for row in ids]), f"{tokens} tokens")
        assert_same_maths(model.vectors(ids), h)
        bias = 0 if model.head.bias is None else model.head.bias
        assert_same_maths(model(ids)[0], h @ model.embedding.tokens.weight.mT + bias)
        assert state.seen == tokens
    for latents in (1, 3, small.LATENTS):
        h, state = model.hidden(ids, latents=latents)
        assert state["start"] == small.TOKENS - latents
        assert_same_maths(h[0], by_definition(model, ids[0], latents), f"{latents} latents")


@small.every_history
@torch.no_grad()
def test_weights_are_those_that_its_layers_mix_by(form):
    model, drawn = small.perceiver_ar(form), []
    tokens_T = small.tokens(1)[0]
    by_definition(model, tokens_T, drawn=drawn)
    found = model.weights(tokens_T.tolist())
    for matrix in sorted(found, key=lambda m: (m.layer, m.name == "history")):
        assert_same_maths(matrix.weights_HTS, drawn.pop(0), f"layer {matrix.layer}, {matrix.name}")
        T, S = matrix.weights_HTS.shape[1:]
        later_TS = torch.ones(T, S).triu(1 + S - T).bool()
        assert matrix.causal == (not matrix.weights_HTS[:, later_TS].any())
    assert not drawn
    latents = [str(t) for t in range(small.TOKENS - small.LATENTS, small.TOKENS)]
    history = model.options.history_tokens or small.TOKENS - small.LATENTS
    tokens = [str(t) for t in range(small.TOKENS - small.LATENTS - history, small.TOKENS - small.LATENTS)]
    rows = [f"row {r}" for r in range(small.ROWS)]
    for matrix in found:
        compressed = model.compress is not None and (matrix.layer or model.options.first_layer == "compressed")
        read = [] if form.startswith("cross") and matrix.layer else rows if compressed else tokens
        assert matrix.keys == (read if matrix.name == "history" else read + latents)


@small.every_history
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_padding_anywhere_is_as_if_removed(form, position):
    model, ids, mask = small.perceiver_ar(form, position=position), small.tokens(4), small.sparse_mask()
    logits, state = model(ids, mask=mask)
    losses = model.loss(ids, ids.roll(1, 0), mask, reduction="none")
    assert_exact(state.seen, mask.sum(1))
    for row, real in enumerate(mask):
        own, labels = ids[row : row + 1, real], ids.roll(1, 0)[row : row + 1, real]
        alone, empty = model(own)[0], small.LATENTS - min(small.LATENTS, own.shape[1])
        assert_same_maths(logits[row, empty:], alone[0], f"row {row}")
        assert_same_maths(losses[row, empty:], model.loss(own, labels, reduction="none")[0])
        assert not logits[row, :empty].any()
        assert not losses[row, :empty].any()


@small.every_history
@settings(max_examples=4)
@given(
    tokens=st.integers(1, 60),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    latents=st.integers(1, 40),
)
def test_no_bit_depends_on_the_future(form, tokens, fraction, dtype, latents):
    model = small.perceiver_ar(form, {"latents": latents}).to(dtype)
    used = min(latents, tokens)
    now = tokens - used + int(fraction * (used - 1))
    ids = small.tokens(1, tokens)
    other = torch.cat([ids[:, : now + 1], (ids[:, now + 1 :] + 7) % small.VOCABULARY], 1)
    with torch.no_grad():
        logits, changed = model(ids)[0], model(other)[0]
    seen = used - (tokens - 1 - now)
    assert_exact(changed[:, :seen], logits[:, :seen], f"T={tokens}, m={latents}, tokens after {now} changed")


@small.every_history
def test_training_gives_every_parameter_a_gradient(form):
    model, ids = small.perceiver_ar(form, dropout=0.1, attention_dropout=0.1).train(), small.tokens()
    model.loss(ids, ids).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_prefix_dropout_stays_on_the_device_of_the_vectors():
    history = thin(History(torch.empty(1, 5, 3, device="meta"), 0, 0), 0.4)
    assert history.x_BSD.is_meta
    assert history.places.is_meta


@small.every_history
def test_prefix_dropout_drops_an_exact_number_of_each_row_as_if_they_were_never_there(form):
    model, mask = small.perceiver_ar(form, {"prefix_dropout": 0.3}, tie_embeddings=False), small.sparse_mask()
    mask[3] = True
    ids, draws = torch.where(mask, torch.arange(small.TOKENS), 20), set()
    plain = model(ids, mask=mask)[0]
    assert_same_maths(model.logits(model.vectors(ids, mask)), plain)
    model.train()
    assert_same_maths(model(ids, mask=mask)[0], plain)  # calls with a state drop nothing
    h = model.vectors(ids, mask)
    for row, real in enumerate(mask):
        own = ids[row, real]
        (gradient,) = torch.autograd.grad(h[row].sum(), model.embedding.tokens.weight, retain_graph=True)
        kept = {place for place, token in enumerate(own.tolist()) if gradient[token].any()}
        latents = min(small.LATENTS, len(own))
        read = min(len(own) - latents, model.options.history_tokens or small.TOKENS)
        assert len(kept) == latents + read - int(0.3 * read)
        assert_same_maths(h[row, small.LATENTS - latents :], by_definition(model, own, kept=kept), f"row {row}")
    for seed in range(3):
        torch.manual_seed(seed)
        draws.add(str(model.vectors(ids)[3].tolist()))
    assert len(draws) == 3


def test_the_number_of_latents_varies_in_training_and_labels_are_those_of_the_latents():
    model, ids, labels = small.perceiver_ar("self", {"vary_latents": True}), small.tokens(), small.tokens().roll(1, 0)
    labels[0, -2] = -100
    assert model.vectors(ids).shape[1] == small.LATENTS
    model.train()
    drawn = set()
    for seed, reduction in itertools.product(range(12), ("mean", "sum", "none")):
        torch.manual_seed(seed)
        loss = model.loss(ids, labels, reduction=reduction)
        torch.manual_seed(seed)
        h = model.vectors(ids)
        drawn.add(used := h.shape[1])
        logits, _ = model(ids, latents=used)
        assert_same_maths(loss, F.cross_entropy(logits.transpose(1, 2), labels[:, -used:], reduction=reduction))
        assert_same_maths(model.loss_of_hidden(h, labels, reduction=reduction), loss)
    assert drawn == {3, 4, 5}


def test_first_weights():
    options = {"history_tokens": 400, "projected": 300}
    model = small.perceiver_ar("compressed", options, dim=256, init_std=0.5)
    outs = [model.history[str(i)].out.weight for i in range(2)] + [block.attention.out.weight for block in model.layers]
    for weight in outs:
        assert math.isclose(weight.std().item(), 0.5 / math.sqrt(6), rel_tol=0.02)
    assert math.isclose(model.history["0"].query.weight.std().item(), 0.5, rel_tol=0.02)
    assert math.isclose(model.compress.weight.std().item(), 1 / 20, rel_tol=0.02)


FORMS = {
    "cross": (0, 2_517_762_048),
    "self": (0, 12_080_775_168),
    "segments": (256, 7_852_916_736),
    "compressed": (256, 3_096_576_000),
    "compressed-late": (256, 3_183_083_520),
}
"""Tokens of a segment or rows of the compressed history, and the count of scores in the paper's table 8."""
LATER = {"num_kv_heads": 1, "lookup": 8, "feedforward": "gelu", "tie_embeddings": False}


def counted(form, size=11, options=None, **fields):
    options = small.HISTORIES[form] | {"latents": 90, "history_tokens": 40} | (options or {})
    if FORMS[form][0]:
        options |= {"segment" if form == "segments" else "projected": size}
    shape = {"vocab_size": 40, "dim": 16, "num_heads": 2, "num_layers": 3} | fields
    return PerceiverAR(DecoderConfig(attention="perceiver_ar", options={"perceiver_ar": options}, **shape))


def scores(form, layers, heads, h, m, size):
    """Scores by table 8 of arXiv:2412.06106: `h` history tokens, `m` latents, segments or rows of `size`.

    The table counts the last layer's history rows too, which nothing reads; the second number is theirs.
    """
    read, row = {"compressed": (size, size), "compressed-late": (size, size), "segments": (h, size)}.get(form, (h, h))
    first, histories = h if form == "compressed-late" else read, layers - (form == "compressed-late")
    if form == "cross":
        read = histories = 0
    unread = heads * (histories > 0) * (size if "compressed" in form else h) * row
    latents = layers * m * (m + 1) // 2 + m * (first + (layers - 1) * read)
    return heads * latents + histories * unread, unread


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("layers", "heads", "h"), [(3, 2, 16), pytest.param(48, 24, 2048, marks=pytest.mark.slow)])
def test_the_scores_are_those_of_the_papers_table(form, layers, heads, h):
    size, paper = FORMS[form]
    assert scores(form, 48, 24, 2048, 2048, size)[0] == paper
    size = size * h // 2048
    with torch.device("meta"):
        options = {"latents": h, "history_tokens": h}
        model = counted(form, size, options, dim=48, num_heads=heads, num_layers=layers)
    cost, (every, unread) = model.cost(2 * h), scores(form, layers, heads, h, h, size)
    assert (cost.unmasked_entries, cost.tokens) == (every - unread, 2 * h)
    assert cost.unmasked_entries < cost.score_entries


@pytest.mark.parametrize(("form", "tokens", "fields"), [
    ("cross", 1, LATER), ("compressed", 110, {}), ("segments", 200, LATER), ("self", 200, LATER),
    *(pytest.param(form, 200, LATER, marks=pytest.mark.slow) for form in ("cross", "compressed", "compressed-late")),
    *(pytest.param(form, n, {}, marks=pytest.mark.slow) for form in FORMS for n in (0, 1, 90, 110, 700)),
])  # fmt: skip
def test_the_cost_is_what_torch_counts(form, tokens, fields):
    flops.register()
    model = counted(form, **fields)
    with FlopCounterMode(display=False) as forward:
        logits, _ = model(torch.zeros(1, tokens, dtype=torch.int64))
    cost = model.cost(tokens)
    assert cost.mixing_flops + cost.projection_flops == forward.get_total_flops()
    products = 2 * 2 * 8 * cost.score_entries  # of scores and of values, in heads of 8 channels
    assert cost.mixing_flops == products
    assert cost.backward_flops == 5 * products // 2 + 2 * cost.projection_flops
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.state_bytes == model.state_bytes(tokens)
    if form == "self" and fields:
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
        assert backward.get_total_flops() == cost.backward_flops


def test_activations_grow_with_the_work_and_counting_leaves_modes_and_random_numbers_alone():
    kept = []
    for form in ("cross", "compressed", "self"):
        model = counted(form, options={"vary_latents": True, "prefix_dropout": 0.5})
        model.layers[1].eval()
        state = torch.get_rng_state()
        kept.append(model.cost(140).activation_bytes)
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
        assert not model.layers[1].training
    assert 0 < kept[0] < kept[1] < kept[2]
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        model.cost(-1)


@pytest.mark.parametrize(("options", "match"), [
    ({"history": "none"}, r"history must be .* got 'none'; valid: compressed, cross, segments, self"),
    ({"history_tokens": 0}, "history_tokens must be at least 1, got 0"),
    ({"prefix_dropout": 1.0}, "prefix_dropout must be at least 0 and below 1, got 1.0"),
    ({"history": "compressed"}, "history='compressed' needs history_tokens: its projection has a fixed width"),
    ({"history": "compressed", "history_tokens": 8, "projected": 9}, "at most history_tokens, got projected=9"),
    ({"first_layer": "full"}, "first_layer='full' has no effect with history='cross'; leave it out"),
    ({"history": "self", "projected": 5}, "projected=5 has no effect with history='self'; leave it out"),
    (small.HISTORIES["compressed"] | {"segment": 5}, "segment=5 has no effect with history='compressed'; leave it out"),
    ({"refill": 2}, "refill=2 has no effect with decode='exact'; leave it out"),
    ({"latents": 4, "refill": 5, "decode": "refill"}, "refill must be at most latents, got refill=5, latents=4"),
    ({"latents": 4, "refill": 4, "decode": "frozen"}, "decode='frozen' needs refill below latents, got 4 of 4"),
    ({"latent": 4}, "no key 'options.perceiver_ar.latent'; did you mean 'latents'"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, match):
    plain = PerceiverAROptions()
    given = {name: getattr(plain, name) for name in ("segment", "projected", "first_layer", "refill")}
    assert PerceiverAROptions(history="cross", decode="exact", **given) == plain, "a default may be written out"
    with pytest.raises(ValueError, match=match):
        PerceiverAR(DecoderConfig(attention="perceiver_ar", options={"perceiver_ar": options}))


def test_calls_that_do_not_fit_are_refused():
    model, ids = small.perceiver_ar("cross"), small.tokens()
    cases = (
        (lambda: model(ids, latents=6), "latents must be between 1 and the model's 5, got 6"),
        (lambda: model(ids, latents=0), "latents must be between 1 and the model's 5, got 0"),
        (lambda: model(ids, model(ids)[1], latents=2), "cannot be given with a state, got latents=2"),
        (lambda: model.loss(ids, ids[:, -5:]), r"labels must have the tokens' shape \[3, 17\], got \[3, 5\]"),
        (lambda: model(ids[0]), r"tokens must have shape \[B, T\], got \[17\]"),
        (lambda: model(ids, small.perceiver_ar("self")(ids)[1]), "the state was made by configuration"),
        (lambda: small.perceiver_ar("cross", loops=2), "loops must be 1, got 2"),
        (lambda: small.perceiver_ar("compressed-late", num_layers=1), r"needs a second layer .* got num_layers=1"),
        (lambda: PerceiverAROptions(history="x"), "unknown history 'x'; valid: "),
    )
    small.assert_refused(*((call, ValueError, message) for call, message in cases))
