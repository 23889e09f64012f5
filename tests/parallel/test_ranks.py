"""One sequence over several ranks, which are threads here: every mechanism at any size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import attention
from tests.parallel import cases
from tests.parallel.ranks import on_ranks


def test_every_causal_mechanism_has_a_case():
    causal = {name for name in attention.names() if "causal" in attention.mechanism(name).forms}
    assert {name for name, _ in cases.MECHANISMS.values()} == causal


@pytest.mark.parametrize("compare", [cases.a_layer, cases.a_volume])
@pytest.mark.parametrize("case", cases.MECHANISMS)
@settings(max_examples=2)
@given(ranks=st.integers(1, 6), tokens=st.integers(1, 9))
def test_a_layer_is_the_same_on_any_number_of_ranks_and_sends_the_bytes_of_its_formula(compare, case, ranks, tokens):
    on_ranks(ranks, lambda group: compare(group, case, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.MECHANISMS)
@settings(max_examples=100)
@given(ranks=st.integers(1, 9), tokens=st.integers(1, 24))
def test_a_layer_is_the_same_at_many_sizes(case, ranks, tokens):
    on_ranks(ranks, lambda group: cases.a_layer(group, case, tokens))


# Real processes do the same with checkpoints and on two ranks: test_processes.py.


@pytest.mark.parametrize("case", cases.DECODERS)
def test_losses_and_gradients_of_a_decoder_add_up(case):
    on_ranks(3, lambda group: cases.a_loss(group, case, 5))


@pytest.mark.parametrize(("ranks", "tokens"), [(3, 2), (4, 5)])
@pytest.mark.parametrize("case", cases.DECODERS)
def test_one_process_continues_a_prompt_of_several_ranks(case, ranks, tokens):
    on_ranks(ranks, lambda group: cases.a_prefill(group, case, tokens))
