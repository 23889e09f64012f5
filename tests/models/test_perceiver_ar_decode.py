"""Decoding with Perceiver AR: what each mode equals."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import State
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from subquad.testing.tools import assert_same_state
from tests.models import small
from tests.ops.cases import thinned

HISTORIES = ("cross-short", "self", "segments", "compressed-late")


def decoding(form, decode="exact", refill=None, **fields):
    return small.perceiver_ar(form, {"decode": decode, "refill": refill}, **fields)


@pytest.mark.parametrize(("form", "fields"), [
    *((form, {}) for form in ("cross", "segments-short", "compressed", "compressed-late")),
    *(("self-short", {"position": position}) for position in ("sinusoidal", "learned", "none")),
    ("self", {"num_kv_heads": 1}), ("compressed-late", small.POST),
])  # fmt: skip
def test_exact_equals_the_pass_over_all_tokens_at_each_step(form, fields):
    """With all latents in use, that pass is the whole model's."""
    model, ids = decoding(form, **fields), small.tokens(2)
    for prompt in (0, 9):
        _, state = model(ids[:, :prompt])
        start = state["start"]
        for t in range(prompt, small.TOKENS):
            logits, state = model(ids[:, t : t + 1], state)
            start = max(start, t + 1 - small.LATENTS)
            assert state["start"] == start
            assert_same_maths(logits, model(ids[:, : t + 1], latents=t + 1 - start)[0][:, -1:], f"token {t}")
        assert state.seen == small.TOKENS


@pytest.mark.parametrize("decode", ["exact", "refill"])
def test_one_latent_decodes_as_a_pass_for_each_token(decode):
    model, ids = small.perceiver_ar("segments-short", {"latents": 1, "decode": decode}), small.tokens(2)
    state = model.read(ids[:, :3])
    for t in range(3, small.TOKENS):
        logits, state = model(ids[:, t : t + 1], state)
        assert_same_maths(logits, model(ids[:, : t + 1])[0], f"token {t}")


def test_rows_that_get_their_latents_at_different_times_are_as_alone():
    """Kept keys of a row that got fewer tokens are moved to the end, where the next token looks for them."""
    model, ids = decoding("self", "refill"), small.tokens(2)
    _, state = model(ids[:, :2])
    for step, got in enumerate([[True, False], [False, True], [True, True]]):
        logits, state = model(ids[:, 2 + step : 3 + step], state, torch.tensor(got)[:, None])
    for row, read in enumerate(([0, 1, 2, 4], [0, 1, 3, 4])):
        assert_same_maths(logits[row, -1], model(ids[row : row + 1, read])[0][0, -1], f"row {row}")


def test_a_state_without_spare_slots_is_trimmed_to_itself():
    model = decoding("self-short", "refill", 2)
    state = model.read(small.tokens(1, 7))  # 5 tokens before the latents, of which 4 are history
    trimmed = model.trim_state(state)
    for i in range(len(model.layers)):
        assert_exact(trimmed.child(f"layers.{i}").tensor("keys"), state.child(f"layers.{i}").tensor("keys"))


@small.every_history
def test_refill_equals_the_pass_with_the_same_first_latent(form):
    for refill in (2, small.LATENTS) if form == "self" else (2,):
        model, ids = decoding(form, "refill", refill), small.tokens(2)
        _, state = model(ids[:, :3])
        latents = 3
        for t in range(3, small.TOKENS):
            logits, state = model(ids[:, t : t + 1], state)
            latents = refill if latents == small.LATENTS else latents + 1
            assert t + 1 - state["start"] == latents
            assert_same_maths(logits, model(ids[:, : t + 1], latents=latents)[0][:, -1:], f"token {t}")


@small.every_history
def test_frozen_equals_one_pass_and_ends_where_the_latents_do(form):
    model, ids = decoding(form, "frozen", 2), small.tokens()
    state = model.read(ids[:, :9])
    assert state["start"] == 7
    logits, state = model(ids[:, 9:12], state)
    assert_same_maths(logits, model(ids[:, :12], latents=small.LATENTS)[0][:, -3:])
    with pytest.raises(ValueError, match=r"decode='frozen' has used all 5 latents .* choose decode exact or refill"):
        model(ids[:, 12:13], state)
    assert model.most_new_tokens(10) == 3
    assert model.most_new_tokens(1) == small.LATENTS
    assert decoding(form).most_new_tokens(10) is None


@thinned(2, form=HISTORIES, decode=("exact", "refill"))
@settings(max_examples=2)
@given(prompt=st.integers(0, 10), cuts=st.lists(st.integers(0, 8), max_size=3).map(sorted))
def test_many_tokens_at_once_are_the_same_as_one_by_one(form, decode, prompt, cuts):
    model, ids = decoding(form, decode), small.tokens(2)
    _, state = model(ids[:, :prompt])
    expected, outputs, alone = [], [], state
    for token in ids[:, prompt:].split(1, 1):
        logits, alone = model(token, alone)
        expected.append(logits)
    for part in ids[:, prompt:].tensor_split(cuts, 1):
        logits, state = model(part, state)
        outputs.append(logits)
    assert_same_maths(torch.cat(outputs, 1), torch.cat(expected, 1))
    assert (state.seen, state["start"]) == (alone.seen, alone["start"])
    assert_exact(state.tensor("tokens"), alone.tensor("tokens"))


@thinned(2, form=HISTORIES, decode=("exact", "refill"))
def test_padding_is_as_if_removed_before_and_after_a_state(form, decode):
    prompt = 8 if decode == "exact" else 2
    model, ids, mask = decoding(form, decode), small.tokens(4), small.sparse_mask()
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


def test_tokens_at_padding_after_a_state_change_no_bit():
    model, ids, mask = decoding("self", "refill").float(), small.tokens(4), small.sparse_mask()
    results = []
    for other in (ids, torch.where(mask, ids, -7)):
        _, state = model(other[:, :8], mask=mask[:, :8])
        results.append(model(other[:, 8:], state, mask[:, 8:])[0])
    assert_exact(*results)


def test_a_full_frozen_row_raises_only_when_it_gets_a_token():
    model, ids = decoding("self", "frozen", 1), small.tokens(2)
    _, state = model(ids[:, :4], mask=torch.tensor([[True] * 4, [False, False, True, True]]))
    logits, state = model(ids[:, 4:6], state, torch.tensor([[True, False], [True, True]]))
    logits, state = model(ids[:, 6:7], state, torch.tensor([[False], [True]]))
    assert_same_maths(logits[1, -1], model(torch.cat([ids[1:, 2:7]], 1))[0][0, -1])
    with pytest.raises(ValueError, match="has used all 5 latents"):
        model(ids[:, 7:8], state, torch.tensor([[True], [False]]))


@thinned(3, form=HISTORIES, decode=("exact", "refill", "frozen"))
def test_reading_without_outputs_leaves_the_state_of_reading(form, decode):
    model, ids = decoding(form, decode), small.tokens()
    for prompt in (4, 9):
        expected = model.hidden(ids[:, :prompt], latents=model.options.prompt_latents)[1]
        state = model.read(ids[:, :prompt])
        if decode != "frozen":
            state, expected = model.read(ids[:, prompt:13], state), model.hidden(ids[:, prompt:13], expected)[1]
        assert (state.seen, state["start"], list(state)) == (expected.seen, expected["start"], list(expected))
        assert_same_maths(model(ids[:, 13:14], state)[0], model(ids[:, 13:14], expected)[0])


@pytest.mark.parametrize(("form", "decode"), [
    ("cross-short", "refill"), ("self", "exact"), ("segments", "refill"), ("compressed-late", "refill"),
])  # fmt: skip
def test_a_state_survives_a_file_and_reordered_rows(form, decode, tmp_path):
    model, ids = decoding(form, decode), small.tokens(4)
    _, state = model(ids[:, :7], mask=small.sparse_mask()[:, :7])
    expected, _ = model(ids[:, 7:], state)
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors", config_hash=model.config_hash)
    assert_exact(model(ids[:, 7:], loaded)[0], expected)
    order = torch.tensor([2, 0, 0, 3])
    turned = loaded.map(lambda tensor: tensor[order])
    assert_same_maths(model(ids[order][:, 7:], turned)[0], expected[order])


@pytest.mark.parametrize(("form", "decode"), [("cross-short", "refill"), ("self", "exact"), ("segments", "refill")])
def test_rollback_goes_on_from_a_kept_state(form, decode):
    """The contract's law for this stack."""
    model, ids = decoding(form, decode), small.tokens(2)
    state = model(ids[:, :7])[1]
    copy = state.map(torch.Tensor.clone)
    expected = model(ids[:, 9:13], state)[0]
    after = model(ids[:, 7:9], state)[1]
    model(ids[:, 9:13], after)
    assert_same_state(state, copy, assert_exact, "kept state")
    assert_exact(model(ids[:, 9:13], state)[0], expected, "outputs after two tokens taken back")


@small.every_history
@pytest.mark.parametrize(("decode", "tokens"), [("exact", 3), ("exact", 17), ("refill", 9)])
def test_the_state_is_as_large_as_it_says_and_bounded_by_a_bounded_history(form, decode, tokens):
    model = decoding(form, decode).float()
    _, state = model(small.tokens(1, tokens))
    assert state.nbytes == model.state_bytes(tokens)
    for entry in state.entries.values():
        if isinstance(entry, torch.Tensor):
            assert entry.untyped_storage().nbytes() == entry.nbytes
    if limit := model.options.history_tokens:
        _, state = model(small.tokens(1, 20), state)
        assert state.tensor("tokens").shape[1] == limit + small.LATENTS
        sizes = set()
        for token in small.tokens(1, 8).split(1, 1):
            _, state = model(token, state)
            sizes.add(state.nbytes)
        assert len(sizes) == (1 if decode == "exact" else small.LATENTS - model.options.kept + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_in_budget(dtype):
    ids, latents = small.tokens(), [1, 2, 3, 4, 5, *[2, 3, 4, 5] * 3]
    exact, model = decoding("self", "refill"), decoding("self", "refill").to(dtype)
    plain = [model(ids[:, : t + 1], latents=n)[0][:, -1:] for t, n in enumerate(latents)]
    kept, expected = (small.in_pieces(m, ids, [*range(small.TOKENS)])[0] for m in (model, exact))
    assert_in_budget(kept, torch.cat(plain, 1), expected, dtype)


@pytest.mark.parametrize(("trained", "decode", "refill"), [
    ("exact", "refill", None), ("exact", "frozen", 4), ("refill", "frozen", None), ("refill", "refill", 4),
])  # fmt: skip
def test_a_model_decodes_in_another_mode_like_one_made_for_it(trained, decode, refill):
    model, made_so, ids = decoding("self", trained), decoding("self", decode, refill), small.tokens()
    config_hash = model.config_hash
    model.set_decode(decode, refill)
    assert model.config_hash == config_hash
    assert model.options == made_so.options
    assert model.most_new_tokens(9) == made_so.most_new_tokens(9)
    expected, _ = made_so(ids[:, 9:10], made_so.read(ids[:, :9]))
    assert_exact(model(ids[:, 9:10], model.read(ids[:, :9]))[0], expected)
    model.set_decode("exact")
    assert_exact(model.read(ids[:, :9])["start"], decoding("self").read(ids[:, :9])["start"])


@pytest.mark.parametrize("call", ["forward", "hidden", "read"])
def test_a_state_of_another_mode_is_refused(call):
    def named(decode, refill):
        return f"decode={decode}" + (f" and refill={refill}" if refill else "")

    model, ids = decoding("self"), small.tokens()
    modes = [("exact", None), ("refill", 2), ("refill", 3), ("frozen", 2)]
    for made, now in itertools.permutations(modes, 2):
        model.set_decode(*made)
        state = model.read(ids[:, :9])
        getattr(model, call)(ids[:, 9:10], state)
        model.set_decode(*now)
        match = f"was made with {named(*made)} and the model has {named(*now)}; restore the former"
        with pytest.raises(ValueError, match=match):
            getattr(model, call)(ids[:, 9:10], state)


def test_modes_that_do_not_fit_are_refused_and_leave_the_mode():
    model = decoding("self", "refill", 4)
    small.assert_refused(
        (lambda: model.set_decode("thaw"), ValueError, "unknown decode 'thaw'; valid: exact, frozen, refill"),
        (lambda: model.set_decode("frozen", 5), ValueError, "decode='frozen' needs refill below latents, got 5 of 5"),
    )
    assert (model.options.decode, model.options.refill) == ("refill", 4)
