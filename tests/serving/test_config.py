"""The limits of the server."""

import subprocess
import sys

import pytest

from subquad.serving import ServeConfig


@pytest.mark.parametrize(("values", "match"), [
    ({"slots": 0}, "slots must be at least 1, got 0"),
    ({"max_prompt": 0}, "max_prompt must be at least 1, got 0"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_requests": -1}, "max_requests must be at least 1, got -1"),
    ({"max_body": 0}, "max_body must be at least 1, got 0"),
    ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
    ({"max_seconds": 0.0}, "max_seconds must be above 0 and finite, got 0.0"),
    ({"client_seconds": float("inf")}, "client_seconds must be above 0 and finite, got inf"),
    ({"grace_seconds": -1.0}, "grace_seconds must be at least 0 and finite, got -1.0"),
])  # fmt: skip
def test_a_limit_out_of_range_is_refused(values, match):
    with pytest.raises(ValueError, match=match):
        ServeConfig(**values)


def test_a_context_holds_the_prompt_and_the_generated_tokens():
    assert ServeConfig(max_prompt=30, max_tokens=12).max_context == 42


def test_the_configuration_loads_without_fastapi():
    code = "import sys; sys.modules['fastapi'] = sys.modules['prometheus_client'] = None; import subquad.serving.config"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
