"""Perceiver AR and V1 to V3 against their equations, written out with dense weights."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from subquad.layers.positions import rotate
from subquad.models import Decoder, DecoderConfig, PerceiverAR
from subquad.models.perceiver_window import History, compress, thin
from subquad.models.stacks import PerceiverAROptions
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths

VOCABULARY, LATENTS, COLUMNS, ROWS, SEGMENT = 23, 5, 7, 3, 3
FORMS = {
    "cross": {"history": "cross"},
    "cross-short": {"history": "cross", "history_tokens": 6},
    "self": {"history": "self"},
    "segments": {"history": "segments", "segment": SEGMENT},
    "segments-short": {"history": "segments", "segment": SEGMENT, "history_tokens": 7},
    "compressed": {"history": "compressed", "history_tokens": COLUMNS, "projected": ROWS},
    "compressed-late": {
        "history": "compressed",
        "history_tokens": COLUMNS,
        "projected": ROWS,
        "first_layer": "full",
    },
}
every_form = pytest.mark.parametrize("form", FORMS)


def shape(options, **fields):
    return DecoderConfig(
        **{
            "vocab_size": VOCABULARY,
            "dim": 16,
            "num_layers": 3,
            "num_heads": 2,
            "attention": "perceiver_ar",
            "options": {"perceiver_ar": {"latents": LATENTS, **options}},
            "init_std": 0.3,
            **fields,
        }
    )


def tiny(form, options=None, **fields):
    torch.manual_seed(0)
    return PerceiverAR(shape(FORMS[form] | (options or {}), **fields)).double().eval()


def some_tokens(batch=3, tokens=17):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def some_mask():
    """Padding on the left, in the middle with few tokens left, on the right."""
    mask = torch.ones(4, 17, dtype=torch.bool)
    mask[0, :5] = False
    mask[1, 2:15] = False
    mask[2, 9:] = False
    mask[3, :] = False
    return mask


def at(x_THK, places):
    """Each row turned to its own position."""
    rows = [rotate(x_HK[None, :, None], place)[0, :, 0] for x_HK, place in zip(x_THK, places, strict=True)]
    return torch.stack(rows)


def dense(mixer, z_TD, q_places, past_SD, k_places, allowed_TS):
    """`out(softmax(q k^T / sqrt(K)) v)` with one sequence's dense weights."""
    q, k, v = (
        f(x).unflatten(-1, (2, -1)) for f, x in ((mixer.query, z_TD), (mixer.key, past_SD), (mixer.value, past_SD))
    )
    q, k = at(q, q_places), at(k, k_places)
    scores_HTS = torch.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1])
    weights_HTS = scores_HTS.masked_fill(~allowed_TS, -math.inf).softmax(-1)
    return mixer.out(torch.einsum("hts,shk->thk", weights_HTS, v).flatten(1))


def by_definition(model, tokens_T, latents=LATENTS):
    """The logits of one sequence's latents."""
    options, T = model.options, len(tokens_T)
    m = min(latents, T)
    h = min(T - m, options.history_tokens or T)
    start = T - m
    x_lat = model.embedding.tokens.weight[tokens_T[start:]]
    x_old = model.embedding.tokens.weight[tokens_T[start - h : start]]
    places, lat_places = list(range(start - h, start)), list(range(start, T))
    compressed = None
    if options.history == "compressed" and h:
        compressed = model.compress.weight[:, COLUMNS - h :] @ x_old
        compressed_places = [start - COLUMNS + (p + 1) * COLUMNS // ROWS - 1 for p in range(ROWS)]
        if options.first_layer == "compressed":
            x_old, places = compressed, compressed_places
    for i, block in enumerate(model.layers):
        old, lat = block.attention_norm(x_old), block.attention_norm(x_lat)
        S = len(places)
        triangle = torch.ones(m, m, dtype=torch.bool).tril()
        allowed = torch.cat([torch.ones(m, S, dtype=torch.bool), triangle], 1)
        y = dense(block.attention, lat, lat_places, torch.cat([old, lat]), places + lat_places, allowed)
        x_lat = x_lat + y
        x_lat = x_lat + block.feedforward(block.feedforward_norm(x_lat))
        if options.history == "cross":
            x_old, places = x_old[:0], []
        elif options.first_layer == "full" and i == 0 and h:
            x_old, places = compressed, compressed_places
        elif S and i < len(model.layers) - 1:
            segment = torch.arange(S) // (SEGMENT if options.history == "segments" else S)
            x_old = x_old + dense(model.history[str(i)], old, places, old, places, segment[:, None] == segment)
            x_old = x_old + block.feedforward(block.feedforward_norm(x_old))
    return model.norm(x_lat) @ model.embedding.tokens.weight.mT


@every_form
@pytest.mark.parametrize("tokens", [1, LATENTS, 6, 9, 17])
def test_the_model_is_its_equations(form, tokens):
    model, ids = tiny(form), some_tokens(2, tokens)
    logits, state = model(ids)
    assert logits.shape == (2, min(LATENTS, tokens), VOCABULARY)
    assert_same_maths(logits, torch.stack([by_definition(model, row) for row in ids]))
    assert_same_maths(model.logits(model.vectors(ids)), logits)
    assert state.seen == tokens


@every_form
@pytest.mark.parametrize("latents", [1, 3, LATENTS])
def test_the_first_latent_can_be_named(form, latents):
    model, ids = tiny(form), some_tokens(1, 13)
    logits, state = model(ids, latents=latents)
    assert state["start"] == 13 - latents
    assert_same_maths(logits[0], by_definition(model, ids[0], latents))


@every_form
@pytest.mark.parametrize("tokens", [1, 3, LATENTS])
def test_without_a_history_it_is_the_decoder(form, tokens):
    model = tiny(form)
    decoder = Decoder(model.config.replace(attention="full")).double().eval()
    extra = decoder.load_state_dict(model.state_dict(), strict=False)
    assert not extra.missing_keys
    assert all(name.startswith(("history.", "compress.")) for name in extra.unexpected_keys)
    assert (form.startswith("cross")) == (not extra.unexpected_keys)
    ids = some_tokens(3, tokens)
    assert_same_maths(model(ids)[0], decoder(ids)[0])
    assert_same_maths(model.loss(ids, ids), decoder.loss(ids, ids))


@every_form
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_padding_is_as_if_removed(form, position):
    model, ids, mask = tiny(form, position=position, max_positions=17), some_tokens(4), some_mask()
    logits, state = model(ids, mask=mask)
    assert_exact(state.seen, mask.sum(1))
    for row in range(4):
        alone, _ = model(ids[row : row + 1, mask[row]])
        empty = LATENTS - alone.shape[1]
        assert_same_maths(logits[row, empty:], alone[0], f"row {row}")
        assert not logits[row, :empty].any()
    labels = ids.roll(1, 0)
    losses = model.loss(ids, labels, mask, reduction="none")
    for row in range(4):
        alone = model.loss(ids[row : row + 1, mask[row]], labels[row : row + 1, mask[row]], reduction="none")
        assert_same_maths(losses[row, LATENTS - alone.shape[1] :], alone[0])
        assert not losses[row, : LATENTS - alone.shape[1]].any()


@every_form
def test_what_stands_in_padding_changes_nothing_and_gets_no_gradient(form):
    model, mask = tiny(form, tie_embeddings=False).float(), some_mask()
    ids = torch.where(mask, some_tokens(4).clamp(min=2), 1)
    logits, _ = model(ids, mask=mask)
    assert_exact(model(torch.where(mask, ids, -7), mask=mask)[0], logits)
    logits.square().sum().backward()
    assert logits.isfinite().all()
    assert not model.embedding.tokens.weight.grad[:2].any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_form
@settings(max_examples=8)
@given(
    tokens=st.integers(1, 60),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    latents=st.integers(1, 40),
)
def test_no_bit_depends_on_the_future(form, tokens, fraction, dtype, latents):
    model = tiny(form, {"latents": latents}).to(dtype)
    used = min(latents, tokens)
    now = tokens - used + int(fraction * (used - 1))
    ids = some_tokens(1, tokens)
    other = torch.cat([ids[:, : now + 1], (ids[:, now + 1 :] + 7) % VOCABULARY], 1)
    with torch.no_grad():
        logits, changed = model(ids)[0], model(other)[0]
    seen = used - (tokens - 1 - now)
    assert_exact(changed[:, :seen], logits[:, :seen], f"T={tokens}, m={latents}, tokens after {now} changed")


@every_form
def test_every_latent_reads_the_whole_history_and_nothing_before_it(form):
    model, ids = tiny(form), some_tokens(1)
    reach = model.options.history_tokens or 17 - LATENTS
    logits, _ = model(ids)
    for place in range(17 - LATENTS):
        other = ids.clone()
        other[0, place] = (other[0, place] + 1) % VOCABULARY
        changed = (model(other)[0] != logits).any(-1)
        assert changed.all() if place >= 17 - LATENTS - reach else not changed.any()


@every_form
def test_training_gives_every_parameter_a_gradient(form):
    """Else training on several devices would wait for it."""
    model, ids = tiny(form, dropout=0.1, attention_dropout=0.1).train(), some_tokens()
    model.loss(ids, ids).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@every_form
def test_checkpointing_changes_no_bit(form):
    gradients = []
    for checkpointing in (False, True):
        model, ids = tiny(form, {"prefix_dropout": 0.5}, dropout=0.2).train(), some_tokens()
        model.gradient_checkpointing = checkpointing
        torch.manual_seed(4)
        model.loss(ids, ids).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert_exact(checkpointed, plain)


def test_compiled_it_is_the_same():
    torch.compiler.reset()
    model, ids = tiny("compressed", num_layers=2), some_tokens()
    exact = model.vectors(ids)
    model = model.float()
    plain = model.vectors(ids)
    compiled = torch.compile(model.vectors, fullgraph=True, backend="aot_eager")(ids)
    assert_in_budget(compiled, plain, exact, torch.float32)


def test_labels_are_those_of_the_latents():
    model, ids, labels = tiny("self"), some_tokens(), some_tokens().roll(1, 0)
    labels[0, -2] = -100
    logits, _ = model(ids)
    losses = F.cross_entropy(logits.transpose(1, 2), labels[:, -LATENTS:], reduction="none")
    assert_same_maths(model.loss(ids, labels, reduction="none"), losses)
    assert_same_maths(model.loss(ids, labels, reduction="sum"), losses.sum())
    assert_same_maths(model.loss(ids, labels), losses.sum() / (3 * LATENTS - 1))
    assert_same_maths(model.loss_of_hidden(model.vectors(ids), labels), losses.sum() / (3 * LATENTS - 1))


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    fraction=st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.99]),
    seed=st.integers(0, 5),
)
def test_prefix_dropout_leaves_out_an_exact_number_of_tokens_in_order(lengths, fraction, seed):
    torch.manual_seed(seed)
    slots, start = max(lengths), torch.tensor(lengths)
    empty = slots - start
    x = torch.arange(slots).double().expand(len(lengths), slots)[..., None]
    thinned = thin(History(x, start - slots, empty), fraction)
    for row, length in enumerate(lengths):
        kept = length - int(fraction * length)
        real = thinned.x_BSD[row, :, 0].long()[int(thinned.empty[row]) :]
        assert len(real) == kept
        assert (real.diff() > 0).all()
        assert ((real >= slots - length) & (real < slots)).all()
        assert_exact(thinned.places[row, int(thinned.empty[row]) :], real + length - slots)


@every_form
def test_dropped_tokens_are_no_keys_and_give_the_pass_without_them(form):
    model = tiny(form, {"prefix_dropout": 0.5}, tie_embeddings=False)
    ids = torch.arange(17)[None]
    plain, _ = model(ids)
    assert_same_maths(model.logits(model.vectors(ids)), plain)
    model.train()
    kept = set()
    read = min(17 - LATENTS, model.options.history_tokens or 17)
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        model.vectors(ids).sum().backward()
        used = model.embedding.tokens.weight.grad[:17].any(1)
        assert used[-LATENTS:].all()
        assert int(used[:-LATENTS].sum()) == read - int(0.5 * read)
        kept.add(tuple(used.tolist()))
    assert len(kept) > 1
    assert_same_maths(model(ids)[0], plain)  # only what keeps no state drops


def test_dropped_tokens_leave_the_others_at_their_places():
    """With cross-attention alone, the history without some tokens: the same as those tokens never being keys."""
    model, ids = tiny("cross", {"prefix_dropout": 0.5}, tie_embeddings=False).train(), torch.arange(17)[None]
    torch.manual_seed(2)
    h = model.vectors(ids)
    h.sum().backward()
    used = model.embedding.tokens.weight.grad[:17].any(1)
    block = model.layers[0]
    x = model.embedding.tokens.weight[:17]
    lat, places = x[-LATENTS:], list(range(17))
    allowed = torch.ones(17, 17, dtype=torch.bool).tril()[-LATENTS:] & used
    z = block.attention_norm(x)
    lat = lat + dense(block.attention, z[-LATENTS:], places[-LATENTS:], z, places, allowed)
    lat = lat + block.feedforward(block.feedforward_norm(lat))
    triangle = torch.ones(LATENTS, LATENTS, dtype=torch.bool).tril()
    for block in model.layers[1:]:
        z = block.attention_norm(lat)
        lat = lat + dense(block.attention, z, places[-LATENTS:], z, places[-LATENTS:], triangle)
        lat = lat + block.feedforward(block.feedforward_norm(lat))
    assert_same_maths(h[0], model.norm(lat))


@every_form
def test_prefix_dropout_with_padding_drops_of_each_row(form):
    model, mask = tiny(form, {"prefix_dropout": 0.4}, tie_embeddings=False).train(), some_mask()
    ids = torch.where(mask, torch.arange(17), 20)
    torch.manual_seed(3)
    for row in range(3):
        model.zero_grad()
        model.vectors(ids, mask)[row].sum().backward()
        n = int(mask[row].sum())
        read = min(max(n - LATENTS, 0), model.options.history_tokens or 17)
        assert int(model.embedding.tokens.weight.grad.any(1).sum()) == min(n, LATENTS) + read - int(0.4 * read)


def test_the_number_of_latents_varies_in_training_and_labels_follow():
    model, ids, labels = tiny("self", {"vary_latents": True}), some_tokens(), some_tokens().roll(1, 0)
    assert model.vectors(ids).shape[1] == LATENTS
    model.train()
    drawn = set()
    for seed in range(12):
        torch.manual_seed(seed)
        loss = model.loss(ids, labels)
        torch.manual_seed(seed)
        used = model.vectors(ids).shape[1]
        drawn.add(used)
        logits, _ = model(ids, latents=used)
        assert_same_maths(loss, F.cross_entropy(logits.transpose(1, 2), labels[:, -used:]))
    assert drawn == {3, 4, 5}


def test_a_short_history_meets_the_last_columns():
    model, ids = tiny("compressed"), some_tokens(1, LATENTS + 2)
    model.vectors(ids).sum().backward()
    assert_exact(model.compress.weight.grad.any(0), torch.tensor([False] * (COLUMNS - 2) + [True] * 2))


@pytest.mark.parametrize("start", [4, 20])
def test_tokens_that_are_left_out_leave_the_others_in_their_columns(start):
    """The rows are those of a history with zeros at the places of the tokens that are left out."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=generator)
    x = torch.randn(2, min(start, COLUMNS), 3, dtype=torch.float64, generator=generator)
    first = start - x.shape[1]
    thinned = thin(History(x, first, 0), 0.5)
    left = torch.zeros_like(x)
    for row in range(2):
        left[row, thinned.places[row] - first] = thinned.x_BSD[row]
    rows, expected = compress(thinned, weight, start), compress(History(left, first, 0), weight, start)
    assert_same_maths(rows.x_BSD, expected.x_BSD)
    assert_exact(rows.places, expected.places)


def test_first_weights():
    model = PerceiverAR(shape(FORMS["compressed"] | {"history_tokens": 400, "projected": 300}, dim=256, init_std=0.5))
    outs = [model.history[str(i)].out.weight for i in range(2)] + [block.attention.out.weight for block in model.layers]
    for weight in outs:
        assert math.isclose(weight.std().item(), 0.5 / math.sqrt(6), rel_tol=0.02)
    assert math.isclose(model.history["0"].query.weight.std().item(), 0.5, rel_tol=0.02)
    assert math.isclose(model.compress.weight.std().item(), 1 / 20, rel_tol=0.02)


def test_keys_can_be_shared_by_heads():
    model, ids = tiny("self", num_kv_heads=1), some_tokens()
    assert model.history["0"].key.weight.shape == (8, 16)
    logits, state = model(ids[:, :3])
    more, _ = model(ids[:, 3:4], state)
    assert_same_maths(torch.cat([logits, more], 1), model(ids[:, :4])[0])


@pytest.mark.parametrize(("options", "match"), [
    ({"history": "none"}, r"history must be .* got 'none'; valid: compressed, cross, segments, self"),
    ({"latents": 0}, "latents must be at least 1, got 0"),
    ({"segment": 0}, "segment must be at least 1, got 0"),
    ({"projected": -1}, "projected must be at least 1, got -1"),
    ({"history_tokens": 0}, "history_tokens must be at least 1, got 0"),
    ({"refill": 0}, "refill must be at least 1, got 0"),
    ({"prefix_dropout": 1.0}, "prefix_dropout must be at least 0 and below 1, got 1.0"),
    ({"history": "compressed"}, "history='compressed' needs history_tokens: its projection has a fixed width"),
    ({"history": "compressed", "history_tokens": 8, "projected": 9}, "at most history_tokens, got projected=9"),
    ({"first_layer": "full"}, "first_layer='full' has no effect with history='cross'; leave it out"),
    ({"history": "self", "projected": 5}, "projected=5 has no effect with history='self'; leave it out"),
    ({"history": "self", "segment": 5}, "segment=5 has no effect with history='self'; leave it out"),
    (FORMS["compressed"] | {"segment": 5}, "segment=5 has no effect with history='compressed'; leave it out"),
    ({"refill": 2}, "refill=2 has no effect with decode='exact'; leave it out"),
    ({"latents": 4, "refill": 5, "decode": "refill"}, "refill must be at most latents, got refill=5, latents=4"),
    ({"latents": 4, "refill": 4, "decode": "frozen"}, "decode='frozen' needs refill below latents, got 4 of 4"),
    ({"latent": 4}, "no key 'options.perceiver_ar.latent'; did you mean 'latents'"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        PerceiverAR(shape(options))


@pytest.mark.parametrize("field", ["history", "first_layer", "decode"])
def test_choices_are_checked_in_python_too(field):
    with pytest.raises(ValueError, match=f"unknown {field} 'x'; valid: "):
        PerceiverAROptions(**{field: "x"})


def test_a_default_that_has_no_effect_may_be_written_out():
    plain = PerceiverAROptions()
    given = {name: getattr(plain, name) for name in ("segment", "projected", "first_layer", "refill")}
    assert PerceiverAROptions(history="cross", decode="exact", **given) == plain


def test_defaults_make_a_model():
    model = PerceiverAR(DecoderConfig(attention="perceiver_ar", dim=16, num_layers=1))
    assert model.options == PerceiverAROptions()


def test_calls_that_do_not_fit_are_refused():
    model, ids = tiny("cross"), some_tokens()
    state = model(ids)[1]
    with pytest.raises(ValueError, match="latents must be between 1 and the model's 5, got 6"):
        model(ids, latents=6)
    with pytest.raises(ValueError, match="latents must be between 1 and the model's 5, got 0"):
        model(ids, latents=0)
    with pytest.raises(ValueError, match="cannot be given with a state, got latents=2"):
        model(ids, state, latents=2)
    with pytest.raises(ValueError, match=r"labels must have the tokens' shape \[3, 17\], got \[3, 5\]"):
        model.loss(ids, ids[:, -5:])
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\], got \[17\]"):
        model(ids[0])
    with pytest.raises(ValueError, match="the state was made by configuration"):
        model(ids, tiny("self")(ids)[1])
    with pytest.raises(ValueError, match="loops must be 1, got 2"):
        PerceiverAR(shape({}, loops=2))
    with pytest.raises(ValueError, match=r"first_layer='full' needs a second layer .* got num_layers=1"):
        PerceiverAR(shape(FORMS["compressed-late"], num_layers=1))
