"""Tokens that a model takes back: the state goes on as if they had not been read."""

import copy
import gc
import weakref

import pytest
import torch

from subquad.attention.past import Draft
from subquad.models.rollback import LONGEST, Rollback
from subquad.testing import assert_exact, assert_same_maths
from tests.generation.models import make, numbers, with_models

PROMPT, MORE = 9, [3, 1, 4]


def row_of(tokens, state, model):
    """The logits of `MORE` after `tokens`, read one at a time."""
    for token in tokens:
        state = model(torch.tensor([[token]]), state)[1]
    return torch.stack(
        [(read := model(torch.tensor([[token]]), state), state := read[1])[0][0][0, -1] for token in MORE]
    )


@torch.no_grad()
def check(name, rows=2):
    """Read a prompt, 5 tokens at once, 6 one at a time, and take some back, each row another number in the end."""
    model, rollback = make(name), Rollback(room=4)
    prompt, read = [torch.tensor([numbers(n, seed + b) for b in range(rows)]) for n, seed in ((PROMPT, 0), (15, 5))]
    begun = state = model(prompt)[1]
    kept = [[] for _ in range(rows)]
    at = 0

    def take(n):
        nonlocal state, at
        part = read[:, at : at + n]
        _, state = rollback.read(model, part, state, None)
        at += n
        for row, tokens in zip(kept, part.tolist(), strict=True):
            row.extend(tokens)

    def back(n):
        nonlocal state
        state = rollback.back(n)
        for row, count in zip(kept, torch.as_tensor(n).expand(rows).tolist(), strict=True):
            del row[len(row) - count :]

    take(5)
    back(2)
    for _ in range(6):
        take(1)
    back(0)
    back(4)
    take(2)
    back(3)
    take(2)
    back(torch.arange(rows) + 1)
    take(1)
    logits = []
    for token in MORE:
        out, state = rollback.read(model, torch.full((rows, 1), token), state, None)
        logits.append(out[:, -1])
    for b, tokens in enumerate(kept):
        assert_same_maths(torch.stack(logits)[:, b], row_of(tokens, begun.select(torch.tensor([b])), model), f"row {b}")


@with_models()
def test_a_model_goes_on_as_if_the_tokens_had_not_been_read(name):
    check(name)


def stale_rows(draft, lengths, given, entries_after=Draft.entries_after):
    rows, draft._rows = draft._rows, []
    entries = {name: x_BSC[:, -count:] for name, x_BSC, count in rows} | entries_after(draft, lengths, given)
    draft._rows = rows
    return entries


def one_more(draft, lengths, given, entries_after=Draft.entries_after):
    return entries_after(draft, lengths + 1 if isinstance(lengths, int) else lengths, given)


def without_the_state_before(draft, lengths, given, entries_after=Draft.entries_after):
    return {**entries_after(draft, lengths, None), "seen": given["seen"] + lengths} if given else {}


def all_rows_alike(draft, lengths, given, entries_after=Draft.entries_after):
    return entries_after(draft, lengths.amin() if isinstance(lengths, torch.Tensor) else lengths, given)


@pytest.mark.parametrize("planted", [stale_rows, one_more, without_the_state_before, all_rows_alike])
def test_planted_bugs_are_found(planted, monkeypatch):
    monkeypatch.setattr(Draft, "entries_after", planted)
    with pytest.raises(AssertionError):
        check("gated_delta_net")


@torch.no_grad()
def test_what_is_kept_is_bounded_and_old_states_are_freed(monkeypatch):
    monkeypatch.setattr("subquad.models.rollback.LONGEST", 40)
    model, rollback = make("latte"), Rollback(room=4)
    state, sizes, old = model(torch.tensor([[1, 2, 3]]))[1], [], []
    for token in range(30):
        state = rollback.read(model, torch.tensor([[token % 20]]), state, None)[1]
        rollback.back(0)
        sizes.append(rollback.nbytes)
        old.append(weakref.ref(next(iter(state.tensors()))))
    gc.collect()
    assert max(sizes) == max(sizes[:10])
    assert sum(x() is not None for x in old) <= 3
    assert rollback.back(4).seen == 29
    for token in range(90):  # nothing is taken back for long
        state = rollback.read(model, torch.tensor([[token % 20]]), state, None)[1]
    assert 40 <= rollback.kept <= 80
    assert sum(each.before is not None for each in rollback._passes) <= 4


@torch.no_grad()
def test_a_long_pass_is_read_in_two_parts():
    model, rollback = make("latte"), Rollback()
    tokens = torch.tensor([numbers(LONGEST + 30)])
    assert_same_maths(rollback.read(model, tokens, None, None)[0], model(tokens)[0])
    with pytest.raises(
        ValueError, match="256 tokens can be taken back, of room=16 and those read since the last time, at most 256"
    ):
        rollback.back(LONGEST + 1)
    assert_same_maths(
        model(tokens[:, :1], rollback.back(LONGEST))[0], model(torch.cat([tokens[:, :30], tokens[:, :1]], 1))[0][:, -1:]
    )


@pytest.mark.parametrize("name", ["latte", "window", "mamba2", "luna", "perceiver_ar cross exact"])
@torch.no_grad()
def test_padding_is_taken_back_as_places_of_a_row(name):
    model, rollback = make(name), Rollback()
    tokens = torch.tensor([numbers(9), numbers(9, 1)])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 0]]).bool()
    begun = model(tokens[:, :4], None, mask[:, :4])[1]
    state = rollback.read(model, tokens[:, 4:], begun, mask[:, 4:])[1]
    for taken in (0, 1, 3, torch.tensor([3, 4])):
        state = rollback.back(taken)
        kept = torch.arange(9) < 9 - torch.as_tensor(taken).expand(2)[:, None]
        assert torch.as_tensor(state.seen).tolist() == (mask & kept).sum(1).tolist()
        expected = model(tokens[:, 4:], begun, mask[:, 4:] & kept[:, 4:])[1]
        assert_same_maths(model(tokens[:, :2], state)[0], model(tokens[:, :2], expected)[0])
        rollback = Rollback()
        state = rollback.read(model, tokens[:, 4:], begun, mask[:, 4:])[1]


@torch.no_grad()
def test_a_copy_and_another_state_do_not_change_the_first():
    model, rollback = make("linear"), Rollback()
    state = rollback.read(model, torch.tensor([[1, 2, 3, 4]]), None, None)[1]
    other = copy.deepcopy(rollback)
    assert rollback.back(2).seen == 2
    assert other.back(1).seen == 3
    assert other.back(3) is None
    rollback.read(model, torch.tensor([[5]]), state, None)
    assert rollback.kept == 1
    for found, expected in zip(rollback.back(1).tensors(), state.tensors(), strict=True):
        assert_exact(found, expected)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="room is a number of tokens that can be taken back, at least 1, got 0"):
        Rollback(0)
    for n in (-1, torch.tensor([0, 1])):
        with pytest.raises(ValueError, match="0 tokens can be taken back"):
            Rollback().back(n)
