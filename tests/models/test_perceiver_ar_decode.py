"""Decoding with Perceiver AR: what each mode is exact for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import State
from subquad.models import DecoderConfig, PerceiverAR
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths

VOCABULARY, LATENTS, TOKENS = 23, 5, 15
FORMS = {
    "cross": {"history": "cross"},
    "cross-short": {"history": "cross", "history_tokens": 4},
    "self": {"history": "self"},
    "self-short": {"history": "self", "history_tokens": 4},
    "segments": {"history": "segments", "segment": 3},
    "compressed": {"history": "compressed", "history_tokens": 6, "projected": 2},
    "compressed-late": {"history": "compressed", "history_tokens": 6, "projected": 2, "first_layer": "full"},
}
every_form = pytest.mark.parametrize("form", FORMS)
each_history = pytest.mark.parametrize("form", ["cross-short", "self", "segments", "compressed-late"])
every_mode = pytest.mark.parametrize("decode", ["exact", "refill"])


def tiny(form, decode="exact", position="rope", **options):
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        dim=16,
        num_layers=3,
        num_heads=2,
        attention="perceiver_ar",
        options={"perceiver_ar": {"latents": LATENTS, "decode": decode, **FORMS[form], **options}},
        position=position,
        max_positions=TOKENS,
        init_std=0.3,
    )
    return PerceiverAR(config).double().eval()


def some_tokens(batch=3, tokens=TOKENS):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def some_mask():
    mask = torch.ones(4, TOKENS, dtype=torch.bool)
    mask[0, :6] = False
    mask[1, 2:12] = False
    mask[2, 9:] = False
    mask[3, 3:] = False
    return mask


def one_by_one(model, ids, state):
    outputs = []
    for token in ids.split(1, 1):
        logits, state = model(token, state)
        outputs.append(logits)
    return torch.cat([ids.new_empty(len(ids), 0, VOCABULARY).double(), *outputs], 1), state


@every_form
@pytest.mark.parametrize("prompt", [0, 9])
def test_exact_equals_the_pass_over_all_tokens_at_each_step(form, prompt):
    model, ids = tiny(form), some_tokens()
    _, state = model(ids[:, :prompt])
    start = state["start"]
    for t in range(prompt, TOKENS):
        logits, state = model(ids[:, t : t + 1], state)
        start = max(start, t + 1 - LATENTS)
        assert state["start"] == start
        assert_same_maths(logits, model(ids[:, : t + 1], latents=t + 1 - start)[0][:, -1:], f"token {t}")
    assert state.seen == TOKENS


@every_form
@pytest.mark.parametrize("position", ["rope", "sinusoidal", "learned", "none"])
def test_once_the_latents_are_full_exact_is_the_whole_model(form, position):
    model, ids = tiny(form, position=position), some_tokens()
    whole, state = model(ids)
    before, state = model(ids[:, :-1])
    after, state = model(ids[:, -1:], state)
    assert_same_maths(after, whole[:, -1:])
    assert not torch.isclose(before[:, 1:], whole[:, :-1]).all()  # the latents before it now see less


@every_form
@pytest.mark.parametrize("refill", [2, LATENTS])
def test_refill_equals_the_pass_with_the_same_first_latent(form, refill):
    model, ids = tiny(form, "refill", refill=refill), some_tokens()
    _, state = model(ids[:, :3])
    used, latents = [], 3
    for t in range(3, TOKENS):
        logits, state = model(ids[:, t : t + 1], state)
        latents = refill if latents == LATENTS else latents + 1
        used.append(t + 1 - state["start"])
        assert used[-1] == latents
        assert_same_maths(logits, model(ids[:, : t + 1], latents=latents)[0][:, -1:], f"token {t}")


@every_form
def test_frozen_equals_one_pass_and_ends_where_the_latents_do(form):
    model, ids = tiny(form, "frozen", refill=2), some_tokens()
    state = model.read(ids[:, :9])
    assert state["start"] == 7
    logits, state = model(ids[:, 9:12], state)
    assert_same_maths(logits, model(ids[:, :12], latents=LATENTS)[0][:, -3:])
    with pytest.raises(ValueError, match=r"decode='frozen' has used all 5 latents .* choose decode exact or refill"):
        model(ids[:, 12:13], state)
    assert model.most_new_tokens(10) == 3
    assert model.most_new_tokens(1) == LATENTS
    assert tiny(form).most_new_tokens(10) is None


@each_history
@every_mode
@settings(max_examples=2)
@given(prompt=st.integers(0, 10), cuts=st.lists(st.integers(0, 8), max_size=3))
def test_many_tokens_at_once_are_the_same_as_one_by_one(form, decode, prompt, cuts):
    model, ids = tiny(form, decode), some_tokens(2)
    _, state = model(ids[:, :prompt])
    expected, last = one_by_one(model, ids[:, prompt:], state)
    outputs = []
    for part in ids[:, prompt:].tensor_split(sorted(cuts), 1):
        logits, state = model(part, state)
        assert logits.shape[1] == part.shape[1]
        outputs.append(logits)
    assert_same_maths(torch.cat(outputs, 1), expected)
    assert (state.seen, state["start"]) == (last.seen, last["start"])
    assert_exact(state.tensor("tokens"), last.tensor("tokens"))


@each_history
@pytest.mark.parametrize(("decode", "prompt"), [("exact", 8), ("refill", 2)])
def test_padding_is_as_if_removed_before_and_after_a_state(form, decode, prompt):
    model, ids, mask = tiny(form, decode), some_tokens(4), some_mask()
    _, state = model(ids[:, :prompt], mask=mask[:, :prompt])
    logits, state = model(ids[:, prompt:], state, mask[:, prompt:])
    after, state = model(ids[:, :6], state)
    for row in range(4):
        first, then = mask[row, :prompt], mask[row, prompt:]
        _, alone = model(ids[row : row + 1, :prompt][:, first])
        expected, alone = model(ids[row : row + 1, prompt:][:, then], alone)
        assert_same_maths(logits[row, then], expected[0], f"row {row}")
        assert not logits[row, ~then].any()
        expected, alone = model(ids[row : row + 1, :6], alone)
        assert_same_maths(after[row], expected[0], f"row {row}, afterwards")
        assert (int(state["start"][row]), int(state.seen[row])) == (alone["start"], alone.seen)


def test_what_stands_in_padding_after_a_state_changes_no_bit():
    model, ids, mask = tiny("self", "refill").float(), some_tokens(4), some_mask()
    results = []
    for other in (ids, torch.where(mask, ids, -7)):
        _, state = model(other[:, :8], mask=mask[:, :8])
        results.append(model(other[:, 8:], state, mask[:, 8:])[0])
    assert_exact(*results)


def test_a_row_without_room_waits_for_the_others():
    """Frozen, with padding: a full row raises only when it gets a token."""
    model, ids = tiny("self", "frozen", refill=1), some_tokens(2)
    mask = torch.tensor([[True] * 4, [False, False, True, True]])
    _, state = model(ids[:, :4], mask=mask)
    logits, state = model(ids[:, 4:6], state, torch.tensor([[True, False], [True, True]]))
    logits, state = model(ids[:, 6:7], state, torch.tensor([[False], [True]]))
    assert_same_maths(logits[1, -1], model(torch.cat([ids[1:, 2:7]], 1))[0][0, -1])
    with pytest.raises(ValueError, match="has used all 5 latents"):
        model(ids[:, 7:8], state, torch.tensor([[True], [False]]))


@each_history
@pytest.mark.parametrize("decode", ["exact", "refill", "frozen"])
@pytest.mark.parametrize("prompt", [4, 9])
def test_reading_without_outputs_leaves_the_state_of_reading(form, decode, prompt):
    model, ids = tiny(form, decode), some_tokens()
    expected = model.hidden(ids[:, :prompt], latents=model.options.prompt_latents)[1]
    state = model.read(ids[:, :prompt])
    if decode != "frozen":
        state, expected = model.read(ids[:, prompt:13], state), model.hidden(ids[:, prompt:13], expected)[1]
    assert (state.seen, state["start"], list(state)) == (expected.seen, expected["start"], list(expected))
    logits, _ = model(ids[:, 13:14], state)
    assert_same_maths(logits, model(ids[:, 13:14], expected)[0])


@each_history
@every_mode
def test_the_state_goes_to_a_file_and_its_rows_can_be_reordered(form, decode, tmp_path):
    model, ids, mask = tiny(form, decode), some_tokens(4), some_mask()
    _, state = model(ids[:, :7], mask=mask[:, :7])
    expected, _ = model(ids[:, 7:], state)
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors", config_hash=model.config_hash)
    assert_exact(model(ids[:, 7:], loaded)[0], expected)
    order = torch.tensor([2, 0, 0, 3])
    turned = loaded.map(lambda tensor: tensor[order])
    assert_same_maths(model(ids[order][:, 7:], turned)[0], expected[order])


@every_form
@pytest.mark.parametrize("decode", ["exact", "refill"])
@pytest.mark.parametrize("tokens", [1, 3, 9, 17])
def test_the_state_is_as_large_as_it_says(form, decode, tokens):
    model = tiny(form, decode).float()
    _, state = model(some_tokens(1, tokens))
    assert state.nbytes == model.state_bytes(tokens)
    for entry in state.entries.values():
        if isinstance(entry, torch.Tensor):
            assert entry.untyped_storage().nbytes() == entry.nbytes


@every_mode
@pytest.mark.parametrize("form", ["cross-short", "compressed"])
def test_a_bounded_history_bounds_the_state(form, decode):
    model = tiny(form, decode)
    _, state = model(some_tokens(1, 3))
    _, state = model(some_tokens(1, 30), state)
    assert state.tensor("tokens").shape[1] == model.options.history_tokens + LATENTS
    sizes = set()
    for token in some_tokens(1, 12).split(1, 1):
        _, state = model(token, state)
        sizes.add(state.nbytes)
    assert len(sizes) == (1 if decode == "exact" else LATENTS - model.options.kept + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_in_budget(dtype):
    ids = some_tokens()
    exact, _ = one_by_one(tiny("self", "refill"), ids, tiny("self", "refill")(ids[:, :0])[1])
    model = tiny("self", "refill").to(dtype)
    plain = torch.cat([model(ids[:, : t + 1], latents=n)[0][:, -1:] for t, n in enumerate(latents_used(TOKENS))], 1)
    kept, _ = one_by_one(model, ids, model(ids[:, :0])[1])
    assert_in_budget(kept, plain, exact, dtype)


def latents_used(tokens):
    """Of each token, refilling 2 of 5."""
    used, latents = [], 0
    for _ in range(tokens):
        latents = 2 if latents == LATENTS else latents + 1
        used.append(latents)
    return used


@each_history
@pytest.mark.parametrize("refill", [None, 4])
@pytest.mark.parametrize("trained", ["exact", "refill"])
@pytest.mark.parametrize("decode", ["refill", "frozen"])
def test_a_model_decodes_in_another_mode_as_one_that_was_made_so(form, trained, decode, refill):
    model, made_so, ids = tiny(form, trained), tiny(form, decode, refill=refill), some_tokens()
    config_hash = model.config_hash
    model.set_decode(decode, refill)
    assert model.config_hash == config_hash
    assert model.options == made_so.options
    assert model.most_new_tokens(9) == made_so.most_new_tokens(9)
    state, expected = model.read(ids[:, :9]), made_so.read(ids[:, :9])
    for token in ids[:, 9:10].split(1, 1):
        logits, state = model(token, state)
        assert_exact(logits, made_so(token, expected)[0])
    model.set_decode("exact")
    assert_exact(model.read(ids[:, :9])["start"], tiny(form).read(ids[:, :9])["start"])


@pytest.mark.parametrize("call", ["forward", "hidden", "read"])
def test_a_state_of_another_mode_is_refused(call, tmp_path):
    model, ids = tiny("self"), some_tokens()
    model.read(ids[:, :9]).save(tmp_path / "state.safetensors")
    exact = State.load(tmp_path / "state.safetensors", config_hash=model.config_hash)
    model.set_decode("refill")
    with pytest.raises(
        ValueError, match="was made with decode=exact and the model has decode=refill and refill=2; res"
    ):
        getattr(model, call)(ids[:, 9:], exact)
    half = model.read(ids[:, :9])
    model.set_decode("refill", 3)
    with pytest.raises(
        ValueError, match="with decode=refill and refill=2 and the model has decode=refill and refill=3"
    ):
        getattr(model, call)(ids[:, 9:], half)
    model.set_decode("frozen", 2)
    with pytest.raises(
        ValueError, match="with decode=refill and refill=2 and the model has decode=frozen and refill=2"
    ):
        getattr(model, call)(ids[:, 9:], half)
    model.set_decode("exact")
    getattr(model, call)(ids[:, 9:], exact)


def test_modes_that_do_not_fit_are_refused_and_leave_the_mode():
    model = tiny("self", "refill", refill=4)
    for arguments, match in (
        (("thaw",), "unknown decode 'thaw'; valid: exact, frozen, refill"),
        (("refill", 6), "refill must be at most latents, got refill=6, latents=5"),
        (("exact", 2), "refill=2 has no effect with decode='exact'; leave it out"),
        (("frozen", 5), "decode='frozen' needs refill below latents, got 5 of 5"),
    ):
        with pytest.raises(ValueError, match=match):
            model.set_decode(*arguments)
    assert (model.options.decode, model.options.refill) == ("refill", 4)
