"""Prometheus' text format."""

import re

from subquad.serving.metrics import Load, Metrics

SAMPLE = re.compile(r'[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.e+-]+')


def test_every_line_is_a_sample_or_says_what_one_is():
    metrics = Metrics()
    metrics.count_request("/", "GET", 200)
    metrics.count_prompts(7)
    metrics.count_token(0.02, later=False)
    metrics.count_token(0.004, later=True)
    metrics.count_end("tokens")
    text = metrics.text(Load(running=1, waiting=2, free=3, state_bytes=4096), slots=4)
    assert text.endswith("\n")
    named = set()
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            assert what in ("HELP", "TYPE")
            assert what == "HELP" or rest in ("counter", "gauge", "histogram")
            named.add(name)
        else:
            assert SAMPLE.fullmatch(line), line
            name = line.partition("{")[0].partition(" ")[0]
            assert name in named or re.sub("_(bucket|sum|count)$", "", name) in named
    lines = text.splitlines()
    for line in (
        "subquad_sequences_running 1.0",
        "subquad_sequences_waiting 2.0",
        "subquad_slots_free 3.0",
        "subquad_slots 4.0",
        "subquad_state_bytes 4096.0",
        "subquad_prompt_tokens_total 7.0",
        "subquad_generated_tokens_total 2.0",
        'subquad_sequences_ended_total{reason="tokens"} 1.0',
        "subquad_time_per_token_seconds_sum 0.004",
        'subquad_time_to_first_token_seconds_bucket{le="0.025"} 1.0',
        'subquad_requests_total{method="GET",route="/",status="200"} 1.0',
    ):
        assert line in lines


def test_buckets_count_all_that_is_smaller():
    metrics = Metrics()
    for seconds in (0.0005, 0.001, 0.002, 7.0):
        metrics.count_token(seconds, later=True)
    name = "subquad_time_per_token_seconds_bucket"
    assert [metrics.registry.get_sample_value(name, {"le": le}) for le in ("0.001", "0.0025", "2.5", "+Inf")] == [
        2, 3, 3, 4,
    ]  # fmt: skip


def test_the_process_has_memory():
    rss = Metrics().registry.get_sample_value("process_resident_memory_bytes")
    assert rss is None or rss > 1 << 20
