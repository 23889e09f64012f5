from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.ops import documents
from subquad.ops.documents import before_others, grouped, lay_out, real_tokens
from subquad.testing import assert_exact

rows = st.integers(0, 12).flatmap(
    lambda tokens: st.lists(st.lists(st.integers(-1, 3), min_size=tokens, max_size=tokens), max_size=4).map(
        lambda ids: torch.tensor(ids, dtype=torch.int64).reshape(len(ids), tokens)
    )
)


def documents_of(ids_BT):
    """The row and the places of each document, by walking along."""
    found = []
    for b, row in enumerate(ids_BT.tolist()):
        before = None
        for t, id in enumerate(row):
            if id == -1:
                continue
            if id != before:
                found.append((b, []))
            found[-1][1].append(t)
            before = id
    return found


@given(rows, st.booleans())
def test_each_document_is_a_row_of_its_own_and_comes_back(ids, last_apart):
    laid = lay_out(ids, None, *ids.shape, last_apart=last_apart)
    x = torch.arange(1.0, ids.numel() + 1).reshape(*ids.shape, 1)
    found = []
    for group in laid.groups:
        C = group.places_RC.shape[1]
        lengths = [C] * len(group.places_RC) if group.lengths_R is None else group.lengths_R.tolist()
        for row, taken, length in zip(group.rows_R.tolist(), laid.take(x, group)[..., 0], lengths, strict=True):
            assert not taken[length:].any(), "slots without a token hold zeros"
            found.append((row, [int(number) - 1 - row * ids.shape[1] for number in taken[:length]]))
    expected = documents_of(ids)
    empty = [(b, []) for b in range(len(ids)) if (last_apart or not expected) and (ids[b] < 0).all()]
    assert sorted(found) == sorted(expected + empty)
    assert_exact(laid.put([laid.take(x, group) for group in laid.groups]), x * (ids != -1)[..., None])
    for b, places in expected:
        assert laid.positions_BT[b, places].tolist() == list(range(len(places)))
    if last_apart:
        last = {b: len(places) for b, places in expected}
        seen = torch.as_tensor(laid.seen).expand(len(ids))
        assert seen.tolist() == [last.get(b, 0) for b in range(len(ids))]
        assert laid.groups[0].rows_R.tolist() == list(range(len(ids)))


@given(rows)
def test_the_tokens_before_other_documents(ids):
    found = documents_of(ids)
    ends = [(b, places[-1]) for (b, places), (after, _) in pairwise(found) if after == b]
    assert before_others(ids, None).nonzero().tolist() == [list(end) for end in ends]
    shifted = ids.masked_fill(ids == -1, 5)
    assert_exact(before_others(shifted, ids != -1), before_others(ids, None))
    assert_exact(real_tokens(shifted, ids != -1), real_tokens(ids, None))


@given(rows)
def test_a_mask_and_the_id_of_padding_say_the_same(ids):
    one, other = lay_out(ids, None, *ids.shape), lay_out(ids.masked_fill(ids == -1, 5), ids != -1, *ids.shape)
    assert_exact(one.slots_BT, other.slots_BT)
    assert len(one.groups) == len(other.groups)


def partitions(n):
    """All ways to cut n things in a row into groups."""
    for cuts in range(1 << max(0, n - 1)):
        ends = [i + 1 for i in range(n - 1) if cuts >> i & 1] + [n]
        yield list(zip([0, *ends[:-1]], ends, strict=True))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=7), st.integers(0, 30))
def test_groups_have_the_fewest_slots(lengths, overhead):
    before, documents.GROUP_TOKENS = documents.GROUP_TOKENS, overhead
    try:
        groups = grouped(np.array(lengths))
    finally:
        documents.GROUP_TOKENS = before
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    cost = sum(len(group) * max(lengths[i] for i in group) + overhead for group in groups)
    down = sorted(lengths, reverse=True)
    least = min(sum((stop - start) * down[start] + overhead for start, stop in cut) for cut in partitions(len(down)))
    assert cost == least


def test_many_lengths_take_less_than_twice_their_tokens():
    lengths = np.random.default_rng(0).integers(1, 2048, 500)
    assert grouped(np.array([], dtype=np.int64)) == []
    slots = sum(len(group) * lengths[group].max() for group in grouped(lengths))
    assert slots < 2 * lengths.sum()


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(("ids", "mask", "error", "message"), [
    (IDS.float(), None, TypeError, "doc_ids must hold integers, the document's id at each of its tokens, got"),
    (IDS.bool(), None, TypeError, "doc_ids must hold integers"),
    (IDS.mT, None, ValueError, r"doc_ids must have shape \(2, 3\), one id per token"),
    (IDS - 2, None, ValueError, "doc_ids must be 0 or more, or -1 for padding, got -2"),
    (IDS, torch.ones(2, 4, dtype=torch.bool), ValueError, r"mask must have shape \(2, 3\)"),
])  # fmt: skip
def test_ids_and_masks_that_do_not_fit_are_refused(ids, mask, error, message):
    with pytest.raises(error, match=message):
        lay_out(ids, mask, 2, 3)
