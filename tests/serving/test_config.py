"""The limits of the server."""

import pytest

from subquad.serving import ServeConfig


@pytest.mark.parametrize(("name", "value", "rule"), [
    *((name, 0, "at least 1") for name in ("slots", "max_prompt", "max_tokens", "max_body", "prefill_chunk")),
    ("max_requests", -1, "at least 1"),
    ("max_logprobs", -1, "at least 0"),
    ("prefix_bytes", -1, "at least 0"),
    ("max_seconds", 0.0, "above 0 and finite"),
    ("client_seconds", float("inf"), "above 0 and finite"),
    ("grace_seconds", -1.0, "at least 0 and finite"),
])  # fmt: skip
def test_a_limit_out_of_range_is_refused(name, value, rule):
    with pytest.raises(ValueError, match=f"{name} must be {rule}, got {value}"):
        ServeConfig(**{name: value})
