"""`run.minutes`: the number of steps by a clock that is set by hand, and runs of so many steps that resume alike."""

import inspect
import textwrap
import time

import pytest

from subquad.config import read_mapping
from subquad.training import progress, train
from subquad.training.config import RunConfig
from subquad.training.errors import CheckpointError
from subquad.training.loop import Loop
from subquad.training.processes import Processes
from subquad.training.progress import Pace
from subquad.training.schedule import ScheduleConfig
from tests.training.helpers import assert_same_weights, records, stop_at_once

FIXED = 9
"""Steps that the test clock fits into a run."""


class Clock:
    """A clock that a test moves: the first step takes `first` seconds, each other one `each`."""

    def __init__(self, patch, first, each):
        self.now, self.first, self.each = 100.0, first, each
        patch.setattr(time, "monotonic", lambda: self.now)

    def pace(self, minutes, begun=0, evaluating=lambda steps: 0.0):
        """Return at which step the number of steps was known, and the number."""
        pace, step = Pace(minutes, begun), begun
        while True:
            self.now += self.first if step == begun else self.each
            step += 1
            if (steps := pace.steps_that_fit(step, evaluating)) is not None:
                return step, steps


@pytest.mark.parametrize(("minutes", "first", "each", "expected"), [
    (1.0, 2.0, 1.0, (5, 59)),  # 6 s of 60 for 5 steps, then 54 steps
    (10.0, 2.0, 1.0, (17, 599)),  # 3 % of 600 s, which is 18 s
    (1.0, 30.0, 10.0, (4, 4)),  # no time for an estimate
    (1.0, 70.0, 1.0, (1, 1)),
    (1.0, 2.0, 0.01, (5, 5 + 5796)),  # 57.96 s for steps of 10 ms
])  # fmt: skip
def test_the_steps_that_fit(minutes, first, each, expected, monkeypatch):
    step, steps = Clock(monkeypatch, first, each).pace(minutes)
    assert step == expected[0]
    assert abs(steps - expected[1]) <= 1, "rounding of the seconds"


def test_evaluations_take_their_time_and_a_resumed_run_begins_anew(monkeypatch):
    step, steps = Clock(monkeypatch, 2.0, 1.0).pace(1.0, evaluating=lambda steps: steps / 10)
    assert (step, steps) == (5, 5 + int(54 / 1.1))
    assert Clock(monkeypatch, 2.0, 1.0).pace(1.0, begun=7) == (12, 66)


BUGS = {
    "the first step, which is slow, counts": ("self._later = now", "self._later = 0.0"),
    "a step too many": ("(done - 1) / (now", "done / (now"),
    "the time that has passed is forgotten": ("(self.seconds - now) *", "self.seconds *"),
    "the steps done are forgotten": ("return step + int", "return int"),
    "evaluations take no time": ("(1 + evaluating(step + left) / (step + left))", "1"),
    "few steps are enough": ("done < PACED_STEPS", "done < 2"),
    "a moment is enough": ("now < PACED_PART * self.seconds", "False"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, monkeypatch):
    source = textwrap.dedent(inspect.getsource(Pace.steps_that_fit))
    assert source.count(BUGS[bug][0]) == 1
    scope = dict(vars(progress))
    exec(source.replace(*BUGS[bug]), scope)  # noqa: S102
    monkeypatch.setattr(Pace, "steps_that_fit", scope["steps_that_fit"])
    clock = Clock(monkeypatch, 2.0, 1.0)
    found = clock.pace(1.0), clock.pace(10.0), clock.pace(1.0, evaluating=lambda steps: steps / 10)
    assert found != ((5, 59), (18, 600), (5, 54))


@pytest.mark.parametrize(("every", "steps", "expected"), [
    (None, 5, 10), (None, 99, 10), (None, 560, 56), (None, 5_000, 100), (7, 5_000, 7), (0, 50, 0),
])  # fmt: skip
def test_evaluations_follow_the_number_of_steps(every, steps, expected):
    assert RunConfig(eval_every=every).evaluation_interval(steps) == expected


def fail(loop):
    raise KeyboardInterrupt


@pytest.fixture
def paced(monkeypatch):
    """Let `FIXED` steps fit into any run, known after the third."""
    monkeypatch.setattr(Pace, "steps_that_fit", lambda self, step, _: FIXED if step - self.first >= 3 else None)


SCHEDULE = {"schedule": {"warmup": 2, "kind": "cosine"}, "run.steps": None, "run.save_every": 4}


@pytest.mark.usefixtures("paced")
def test_a_run_of_minutes_is_a_run_of_so_many_steps(make_config, tmp_path):
    """The steps are kept in the folder's configuration, and the same weights come of them, resumed or not."""
    whole = train(make_config(SCHEDULE, folder="whole"))
    assert (whole.steps, whole.config.run.steps) == (FIXED, FIXED)
    assert read_mapping(tmp_path / "whole/config.yaml")["run"]["steps"] == FIXED
    rates = [record["lr"] for record in records(whole.folder) if "lr" in record]
    schedule = ScheduleConfig(**SCHEDULE["schedule"])
    assert rates == [3e-3 * schedule.factor(step, FIXED) for step in range(FIXED)]
    given = train(make_config(SCHEDULE, folder="given", steps=FIXED))
    assert_same_weights(whole.folder, given.folder)


@pytest.mark.usefixtures("paced")
def test_the_first_process_fixes_the_steps_of_all(make_config, monkeypatch):
    """Another process is told the number, which its own clock does not change."""
    by_the_first = Processes.by_the_first

    def told(processes, work):
        return FIXED - 2 if work.__name__ == "fix" else by_the_first(processes, work)

    monkeypatch.setattr(Processes, "by_the_first", told)
    assert train(make_config(SCHEDULE)).steps == FIXED - 2


@pytest.mark.usefixtures("paced")
def test_an_interrupted_run_of_minutes_keeps_its_steps(make_config, tmp_path, monkeypatch):
    whole = train(make_config(SCHEDULE, folder="whole"))
    broken = make_config(SCHEDULE)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "report_evaluation", fail)
        with pytest.raises(KeyboardInterrupt):
            train(broken.replace(run=broken.run.replace(eval_every=5)))
    # The machine is faster now; the number of steps stays.
    monkeypatch.setattr(Pace, "steps_that_fit", lambda self, step, evaluating: 100)
    resumed = train(broken)
    assert resumed.steps == FIXED
    assert_same_weights(whole.folder, resumed.folder)
    longer = train(broken.replace(run=broken.run.replace(minutes=2 * broken.run.minutes)))
    assert longer.steps == 2 * FIXED, "other minutes, other steps in proportion"
    with pytest.raises(CheckpointError, match=r"checkpoint-18 is at step 18, past run\.steps=9"):
        train(broken)


@pytest.mark.usefixtures("paced")
def test_a_run_that_stopped_before_its_steps_were_known_measures_again(make_config, tmp_path, monkeypatch):
    config = make_config(SCHEDULE)
    with monkeypatch.context() as patch:
        stop_at_once(patch)
        stopped = train(config)
    assert (stopped.steps, stopped.interrupted, stopped.config.run.steps) == (1, True, None)
    assert train(config).steps == FIXED


def test_a_warm_up_that_is_longer_than_the_run_is_shortened(make_config, monkeypatch):
    """A recipe of many steps may have one, and its user few minutes."""
    monkeypatch.setattr(Pace, "steps_that_fit", lambda self, step, _: 20 if step == 2 else None)
    result = train(make_config({"schedule": {"warmup": 2_000, "kind": "constant"}, "run.steps": None}))
    assert (result.steps, result.config.schedule.warmup) == (20, 2)
    rates = [record["lr"] for record in records(result.folder) if "lr" in record]
    assert rates[1] < 1e-5
    assert rates[2] == 3e-3
