from typing import Any

import pytest

from subquad.layers.scaling import RopeScaling


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "longrope"}, "kind must be one of its choices, got 'longrope'"),
        ({"factor": 0.5}, r"rope_scaling\.factor must be at least 1, got 0\.5"),
        ({"kind": "yarn", "factor": 2.0}, r"rope_scaling\.original, the length trained on, must be at least 1"),
        ({"kind": "dynamic", "original": 8, "length": 4}, "length must be at least original, got length=4, original=8"),
        ({"beta_slow": 33.0}, "beta_slow must be above 0 and at most beta_fast"),
        ({"low_freq_factor": 4.0}, "low_freq_factor must be above 0 and below high_freq_factor"),
        ({"attention_factor": 0.0}, r"attention_factor must be above 0, got 0\.0"),
    ],
)
def test_scalings_that_mean_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling.from_dict(values)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown rope scaling 'longrope'"):
        RopeScaling(kind="longrope")  # type: ignore[arg-type]


def test_dynamic_scaling_needs_more_than_one_pair() -> None:
    with pytest.raises(ValueError, match="needs more than 2 rotated channels per head, got 2"):
        RopeScaling(kind="dynamic", factor=2.0, original=8, length=16).frequencies(2, 100.0)
