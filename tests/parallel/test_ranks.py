"""One sequence over several ranks, which are threads here: layers at many sizes, decoders. The contract has a size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.testing.ranks import on_ranks
from tests.parallel import cases


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CAUSAL)
@settings(max_examples=100)
@given(ranks=st.integers(1, 9), tokens=st.integers(1, 24))
def test_a_layer_is_the_same_at_many_sizes(name, ranks, tokens):
    on_ranks(ranks, lambda group: cases.a_layer(group, name, tokens))


# Real processes do the same with checkpoints and on two ranks: test_processes.py.


@pytest.mark.parametrize("case", cases.DECODERS)
def test_losses_and_gradients_of_a_decoder_add_up(case):
    on_ranks(3, lambda group: cases.a_loss(group, case, 5))


@pytest.mark.parametrize(("ranks", "tokens"), [(3, 2), pytest.param(4, 5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", cases.DECODERS)
def test_one_process_continues_a_prompt_of_several_ranks(case, ranks, tokens):
    on_ranks(ranks, lambda group: cases.a_prefill(group, case, tokens))
