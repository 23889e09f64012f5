"""Prometheus' text format."""

from subquad.generation.prefix_cache import PrefixCounts
from subquad.serving.metrics import Load, Metrics


def test_each_count_reaches_its_metric():
    metrics = Metrics()
    metrics.count_request("/", "GET", 200)
    metrics.count_prompts(7)
    metrics.count_token(0.02, later=False)
    metrics.count_token(0.004, later=True)
    metrics.count_end("tokens")
    for prefixes in (
        PrefixCounts(1, 1, 256, 0, 64),
        PrefixCounts(hits=4, misses=5, tokens=768, evictions=6, nbytes=32),
    ):
        text = metrics.text(Load(running=1, waiting=2, free=3, state_bytes=4096, prefixes=prefixes), slots=4)
    for line in (
        "sequences_running 1", "sequences_waiting 2", "slots_free 3", "slots 4", "state_bytes 4096",
        "prefix_hits_total 4", "prefix_misses_total 5", "prefix_tokens_total 768", "prefix_evictions_total 6",
        "prefix_bytes 32", "prompt_tokens_total 7", "generated_tokens_total 2",
        'sequences_ended_total{reason="tokens"} 1',
        'time_per_token_seconds_bucket{le="0.0025"} 0', 'time_per_token_seconds_bucket{le="0.005"} 1',
        'time_to_first_token_seconds_bucket{le="0.01"} 0', 'time_to_first_token_seconds_bucket{le="0.025"} 1',
        'requests_total{method="GET",route="/",status="200"} 1',
    ):  # fmt: skip
        assert f"\nsubquad_{line}.0\n" in text
    assert "_created" not in text
