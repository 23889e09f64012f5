import pytest

from subquad.layers.scaling import RopeScaling


@pytest.mark.parametrize(("values", "message"), [
    ({"kind": "longrope"}, "unknown rope scaling 'longrope'"),
    ({"factor": 0.5}, r"rope_scaling\.factor must be at least 1, got 0\.5"),
    ({"kind": "yarn", "factor": 2.0}, r"rope_scaling\.original, the length trained on, must be at least 1"),
    ({"kind": "dynamic", "original": 8, "length": 4}, "length must be at least original, got length=4, original=8"),
    ({"beta_slow": 33.0}, "beta_slow must be above 0 and at most beta_fast"),
    ({"low_freq_factor": 4.0}, "low_freq_factor must be above 0 and below high_freq_factor"),
    ({"attention_factor": 0.0}, r"attention_factor must be above 0, got 0\.0"),
    ({"kind": "dynamic", "factor": 2.0, "original": 8}, "needs more than 2 rotated channels per head, got 2"),
])  # fmt: skip
def test_invalid_scalings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**values).frequencies(2, 100.0)
