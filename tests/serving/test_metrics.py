"""Prometheus' text format."""

from subquad.serving.metrics import Load, Metrics


def test_each_count_reaches_its_metric():
    metrics = Metrics()
    metrics.count_request("/", "GET", 200)
    metrics.count_prompts(7)
    metrics.count_token(0.02, later=False)
    metrics.count_token(0.004, later=True)
    metrics.count_end("tokens")
    text = metrics.text(Load(running=1, waiting=2, free=3, state_bytes=4096), slots=4)
    assert {
        "subquad_sequences_running 1.0",
        "subquad_sequences_waiting 2.0",
        "subquad_slots_free 3.0",
        "subquad_slots 4.0",
        "subquad_state_bytes 4096.0",
        "subquad_prompt_tokens_total 7.0",
        "subquad_generated_tokens_total 2.0",
        'subquad_sequences_ended_total{reason="tokens"} 1.0',
        "subquad_time_per_token_seconds_sum 0.004",
        'subquad_time_per_token_seconds_bucket{le="0.0025"} 0.0',
        'subquad_time_per_token_seconds_bucket{le="0.005"} 1.0',
        'subquad_time_to_first_token_seconds_bucket{le="0.01"} 0.0',
        'subquad_time_to_first_token_seconds_bucket{le="0.025"} 1.0',
        'subquad_requests_total{method="GET",route="/",status="200"} 1.0',
    } <= set(text.splitlines())
    assert "_created" not in text
