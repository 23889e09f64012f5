"""What a run shows and writes."""

import importlib.util
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from subquad.training import train
from subquad.training.progress import draw_curves, loss_range, read_metrics

pytestmark = pytest.mark.draws


def test_metrics_events_and_curves_are_written(make_config, tmp_path: Path) -> None:
    train(make_config())
    lines = read_metrics(tmp_path / "run")
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4, 6, 8, 9, 10]
    assert set(training[0]) == {"step", "loss", "lr", "grad_norm", "tokens", "epochs", "tokens_per_s", "seconds"}
    assert training[-1]["tokens"] == 10 * 32 * 8
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 10]
    assert lines[-1]["eval_loss"] < lines[3]["loss"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [4, 8, 10]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([line["loss"] for line in training])
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left(make_config) -> None:
    screen = io.StringIO()
    train(make_config(), console=Console(file=screen, force_terminal=True, width=120))
    shown = screen.getvalue()
    assert "10/10" in shown
    for word in ("loss", "held-out", "tokens/s", "left"):
        assert word in shown


def test_no_terminal_gets_plain_lines(make_config) -> None:
    screen = io.StringIO()
    train(make_config(), console=Console(file=screen, force_terminal=False, width=120))
    assert "encoding" in screen.getvalue()
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("step")]
    assert lines[0].startswith("step 1/10 loss 5.")
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "8/10", "10/10"]
    assert "tokens/s" in lines[-1]
    assert "\x1b" not in screen.getvalue()


def test_without_a_console_progress_goes_to_the_log(make_config, caplog: pytest.LogCaptureFixture, capfd) -> None:
    with caplog.at_level(logging.INFO, logger="subquad"):
        train(make_config({"run.steps": 3}))
    assert "step 3/3 loss" in caplog.text
    out, err = capfd.readouterr()
    assert out == ""
    assert "Writing model shards" not in err


def test_curves_need_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no loss to draw among 1 records"):
        draw_curves([{"step": 1}], tmp_path / "curves.png", title="x")
    draw_curves([json.loads('{"step": 1, "eval_loss": 2.0}')], tmp_path / "curves.png", title="x")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_curves_show_the_losses_after_the_first_steps() -> None:
    train = [(1, 9.0), *((step, 2.0 - step / 100) for step in range(5, 101))]
    low, high = loss_range(train, [(100, 1.5)])
    assert 0.9 < low < 1.0
    assert 1.95 < high < 2.1
    low, high = loss_range([(1, 9.0)], [])
    assert low < 9.0 < high
    assert loss_range(train, [(1, 9.0)])[1] > 9.0


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else found(name))
    with pytest.raises(ValueError, match=r"run\.trackers=tensorboard,wandb: wandb is not installed; pip install wandb"):
        train(make_config({"run.trackers": ["tensorboard", "wandb"]}))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"run\.trackers\[0\] must be one of its choices, got 'comet'"):
        make_config({"run.trackers": ["comet"]})


def test_trackers_get_the_numbers_of_the_metrics(make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Tracker:
        def __init__(self, project: str, **options: Any) -> None:
            self.project, self.options, self.records = project, options, []
            made.append(self)

        def start(self) -> None:
            self.records: list[tuple[int, dict[str, float]]] = []

        def log(self, values: dict[str, float], step: int) -> None:
            self.records.append((step, values))

        def finish(self) -> None:
            self.records.append((-1, {}))

    for name in ("WandBTracker", "MLflowTracker"):
        monkeypatch.setattr(f"accelerate.tracking.{name}", Tracker)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    train(make_config({"run.trackers": ["wandb", "mlflow"], "run.steps": 4}))
    lines = read_metrics(tmp_path / "run")
    for tracker in made:
        assert tracker.project == "subquad"
        assert [step for step, _ in tracker.records] == [line["step"] for line in lines] + [-1]
        assert tracker.records[0][1]["train/loss"] == lines[0]["loss"]
        assert tracker.records[-2][1] == {"eval/loss": lines[-1]["eval_loss"]}
    assert made[0].options["name"] == made[1].options["run_name"] == "run"
    assert not (tmp_path / "run" / "tensorboard").exists()
    train(make_config({"run.trackers": ["wandb"], "run.steps": 6, "run.resume": "must"}))
    assert made[2].options == made[0].options, "a run that goes on is the same run"
