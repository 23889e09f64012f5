import pytest

from subquad.attention import build
from subquad.testing import AttentionContract


class TestLlp(AttentionContract):
    name = "llp"
    options = {"segment": 16}


class TestLlpWithShiftedHeads(AttentionContract):
    """Half of the heads have boundaries moved by a quarter of a segment."""

    name = "llp"
    with_inductor = False
    options = {"segment": 16, "shifted_heads": True, "num_kv_heads": 1}
    fewest_heads = 2


class TestLlpBidirectional(AttentionContract):
    """Its half segment and both neighbours."""

    name = "llp"
    with_inductor = False
    options = {"segment": 16, "causal": False}


@pytest.mark.parametrize("option", ["first_block_projections", "shared_kv", "key_norm", "split_output"])
def test_options_of_the_printed_form_name_the_mechanism_that_has_them(option):
    with pytest.raises(ValueError, match=rf"'{option}' is an option of attention 'llp_printed' now, not of 'llp'"):
        build("llp", dim=16, num_heads=2, **{option: True})


def test_states_of_earlier_versions_are_still_known():
    assert build("llp", dim=16, num_heads=2, segment=8).config_hash == "39e610b3a796efe5"
