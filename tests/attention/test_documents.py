import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.attention import build, mechanism, names
from subquad.ops import documents
from subquad.testing import assert_same_maths

OPTIONS = {"llp": {"segment": 4, "rope": True}, "window": {"width": 3, "rope": True}, "shifted": {"group": 4}}
causal = [name for name in names() if "causal" in mechanism(name).forms]


@pytest.mark.parametrize("name", causal)
@settings(max_examples=5, suppress_health_check=[HealthCheck.differing_executors])
@given(
    ids=st.lists(st.integers(-1, 2), min_size=1, max_size=30).map(lambda ids: torch.tensor([ids, ids[::-1]])),
    overhead=st.sampled_from([0, 10_000]),
)
def test_any_packing_is_as_its_documents_alone(name, ids, overhead):
    torch.manual_seed(0)
    layer = build(name, dim=8, num_heads=2, **OPTIONS.get(name, {})).double().eval()
    x = torch.randn(*ids.shape, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before, documents.GROUP_TOKENS = documents.GROUP_TOKENS, overhead
    try:
        y = layer(x, doc_ids=ids)[0]
    finally:
        documents.GROUP_TOKENS = before
    expected = torch.zeros_like(y)
    for group in documents.lay_out(ids, None, *ids.shape).groups:
        for row, places in zip(group.rows_R.tolist(), group.places_RC, strict=True):
            own = places[places < ids.numel()] - row * ids.shape[1]
            if len(own):
                expected[row, own] = layer(x[row : row + 1, own])[0][0]
    assert_same_maths(y, expected, name)


@pytest.mark.parametrize("name", ["full", "latte", "luna"])
def test_packed_documents_have_no_state_before_them(name):
    layer = build(name, dim=8, num_heads=2)
    x = torch.randn(1, 4, 8)
    state = layer(x)[1]
    with pytest.raises(ValueError, match="doc_ids begin new documents, and these have no state before them"):
        layer(x, state, doc_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_luna_hands_the_memory_of_its_row_on():
    torch.manual_seed(0)
    layer = build("luna", dim=8, num_heads=2, memory_tokens=3).double()
    x, memory = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 4]])
    y, _, handed = layer.mix_documents(x, documents.lay_out(ids, None, 2, 6), memory)
    assert handed is memory
    assert_same_maths(y[:1, 3:], layer.mix(x[:1, 3:], None, None, memory[:1])[0])
    assert_same_maths(y[1:], layer.mix(x[1:], None, None, memory[1:])[0])


def test_a_bidirectional_luna_takes_one_document_a_row():
    layer = build("luna", dim=8, num_heads=2, causal=False)
    with pytest.raises(ValueError, match="hands on a memory of each sequence and takes no packed documents"):
        layer(torch.randn(1, 4, 8), doc_ids=torch.zeros(1, 4, dtype=torch.int64))
