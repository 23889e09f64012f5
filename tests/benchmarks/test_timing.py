"""Repeats that take turns, and failures that stop nothing."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import Failure, Run, Timing, clock_of, gpu_clock, interleave, rounds, wall_clock
from tests.training.helpers import raising


def in_order(calls):
    """Runs that note their names, and a clock that calls them."""
    return {name: Run(lambda _, name=name: calls.append(name)) for name in "ABC"}


def test_cases_take_turns_and_the_first_call_of_each_does_not_count():
    calls = []
    found = interleave(in_order(calls), repeats=3)
    assert "".join(calls) == "ABC" * 4
    assert {name: len(timing.seconds) for name, timing in found.items()} == {"A": 3, "B": 3, "C": 3}
    ticks = iter([100.0, 1.0, 2.0, 3.0])
    found = interleave({"A": Run(lambda _: None)}, clock=lambda run: next(ticks), repeats=3)
    assert found["A"].seconds == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(("firsts", "seconds", "expected"), [
    ([0.1, 0.1], 2.0, 10), ([0.001], 20.0, 25), ([1.9, 1.0], 3.0, 5), ([2.1, 1.0], 3.0, 3), ([], 1.0, 25)
])  # fmt: skip
def test_repeats_fit_into_the_time(firsts, seconds, expected):
    assert rounds(firsts, seconds) == expected


def test_without_a_number_the_repeats_come_from_the_first_counted_call():
    calls = []
    interleave(in_order(calls), clock=lambda run: run.call(None) or 1.0, seconds=18.0)
    assert "".join(calls) == "ABC" * 7  # one to warm up, six rounds of three seconds


@pytest.mark.parametrize(("error", "status"), [
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
    (MemoryError(), "out of memory"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    (RuntimeError("shapes differ"), "failed"),
    (ValueError("memory of things past"), "failed"),
], ids=str)  # fmt: skip
def test_a_case_that_fails_is_left_out_and_the_others_go_on(error, status):
    calls = []
    runs = in_order(calls)

    def fail(_):
        calls.append("x")
        if calls.count("x") == 2:
            raise error

    found = interleave({"A": runs["A"], "x": Run(fail), "C": runs["C"]}, repeats=3)
    assert "".join(calls) == "AxCAxCACAC"
    assert isinstance(found["x"], Failure)
    assert found["x"].status == status
    assert len(found["A"].seconds) == len(found["C"].seconds) == 3


def test_an_interruption_is_no_failure():
    with pytest.raises(KeyboardInterrupt):
        interleave({"A": Run(raising(KeyboardInterrupt()))}, repeats=1)


def test_work_before_a_call_is_not_timed(monkeypatch):
    now = [0.0]

    def passes(seconds, value=None):
        now[0] += seconds
        return value

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    given = []
    assert wall_clock(Run(lambda x: passes(2.0, given.append(x)), before=lambda: passes(5.0, "made"))) == 2.0
    assert given == ["made"]


def test_a_gpu_is_timed_between_events_behind_a_flushed_cache(monkeypatch):
    calls = []
    event = SimpleNamespace(record=lambda: calls.append("event"), elapsed_time=lambda stop: 250.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: event if enable_timing else None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    flushed = SimpleNamespace(zero_=lambda: calls.append("flush"))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: flushed)
    run = Run(lambda given: calls.append(f"call {given}"), before=lambda: calls.append("before") or "it")
    assert gpu_clock(run) == 0.25
    assert calls == ["before", "flush", "wait", "event", "call it", "event", "synchronize"]
    assert (clock_of("cuda:0"), clock_of("cpu")) == (gpu_clock, wall_clock)


def test_percentiles():
    timing = Timing((50.0, 10.0, 30.0, 0.0, 20.0, 40.0))
    assert (timing.p20, timing.median, timing.p80) == (10.0, 25.0, 40.0)
    assert (Timing((3.0,)).p20, Timing((3.0,)).p80) == (3.0, 3.0)


def test_a_ratio_is_the_median_over_rounds():
    """1 of 1 s, 9 of 3, 3 of 2 and 20 of 10 are ratios of 1, 3, 1.5 and 2; the medians' ratio would be 6 / 2.5."""
    assert Timing((1.0, 9.0, 3.0, 20.0)).relative_to(Timing((1.0, 3.0, 2.0, 10.0))) == 1.75
