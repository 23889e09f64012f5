"""What a run shows and writes: metrics, trackers, a bar or plain lines, curves."""

import importlib.util
import io
import logging
import re
import resource
from unittest.mock import MagicMock

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from subquad.training import train
from subquad.training.errors import SaveError
from subquad.training.progress import Bar, Meter, Metrics, draw_curves, loss_range, metrics_line, read_metrics


@pytest.mark.draws
def test_metrics_events_curves_and_plain_lines_are_written(make_config, tmp_path):
    screen = io.StringIO()
    config = make_config({"data.cache": str(tmp_path / "cache")}, trackers=["tensorboard"])
    train(config, console=Console(file=screen, force_terminal=False, width=120))
    lines = read_metrics(tmp_path / "run")
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == [1, 2, 3, 4]
    assert set(training[0]) == {"step", "loss", "lr", "grad_norm", "tokens", "epochs", "tokens_per_s", "seconds"}
    assert training[-1]["tokens"] == 4 * 32 * 8
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    assert lines[-1]["eval_loss"] < lines[0]["loss"]

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([line["loss"] for line in training])
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"

    assert "encoding" in screen.getvalue()
    shown = [line for line in screen.getvalue().splitlines() if line.startswith("step")]
    assert shown[0].startswith("step 1/4 loss 5.")
    assert [line.split()[1] for line in shown] == ["1/4", "2/4", "4/4"]
    assert "tokens/s" in shown[-1]
    assert "\x1b" not in screen.getvalue()


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text(metrics_line({"step": 1, "loss": 2.0}) + '{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text(metrics_line({"step": 1, "loss": "high"}))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 must hold numbers, got"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(metrics_line({"step": 1, "loss": 2.0}).replace("2.0", "3.0"))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is damaged: its crc32 is not that of the other"):
        read_metrics(tmp_path)


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left():
    screen, meter = io.StringIO(), Meter(step_tokens=64)
    bar = Bar(Console(file=screen, force_terminal=True, width=160), meter, steps=10)
    bar.begin(8)
    meter.start()
    meter.stop()
    bar.report(10, {"loss": 2.5, "eval_loss": 2.25, "eval_accuracy": 0.5, "eval_bits_per_dim": 3.0})
    bar.move(10)
    bar.close()
    words = ("10/10", "loss 2.500", "held-out 2.250", "accuracy 50.0%", "3.0000 bits per dimension", "tokens/s", "left")
    for word in words:
        assert word in screen.getvalue()


def test_a_bar_of_80_columns_keeps_its_numbers_whole():
    screen, meter = io.StringIO(), Meter(step_tokens=64_000_000)
    bar = Bar(Console(file=screen, force_terminal=True, color_system=None, width=80), meter, steps=5000)
    bar.begin(0)
    meter.start()
    meter.stop()
    bar.report(4321, {"loss": 2.5, "eval_loss": 2.25, "eval_accuracy": 0.5})
    bar.move(4321)
    bar.close()
    line = [part for part in re.split(r"[\r\n]", screen.getvalue()) if "4321" in part][-1]
    assert " 4321/5000 loss 2.500  held-out 2.250  accuracy 50.0%  " in line
    assert line.rstrip().endswith(" left")  # the speed has no room
    assert "━" in line


@pytest.mark.draws
def test_curves_need_a_loss_and_show_the_losses_after_the_first_steps(tmp_path):
    with pytest.raises(ValueError, match="no loss to draw among 1 records"):
        draw_curves([{"step": 1}], tmp_path / "curves.png", title="x")
    draw_curves([{"step": 1, "eval_loss": 2.0}], tmp_path / "curves.png", title="x")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    train = [(1, 9.0), *((step, 2.0 - step / 100) for step in range(5, 101))]
    low, high = loss_range(train, [(100, 1.5)])
    assert 0.9 < low < 1.0
    assert 1.95 < high < 2.1
    assert loss_range([(1, 9.0)], [])[0] < 9.0 < loss_range([(1, 9.0)], [])[1]
    assert loss_range(train, [(1, 9.0)])[1] > 9.0


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(make_config, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else found(name))
    with pytest.raises(
        ValueError, match=r"trackers=tensorboard,wandb: wandb is not installed; .* -m pip install wandb"
    ):
        train(make_config(trackers=["tensorboard", "wandb"]))
    assert not (tmp_path / "run").exists()


def test_metrics_on_a_full_disk_say_what_to_do_and_keep_what_was_there(tmp_path):
    metrics, limits = Metrics(tmp_path, Meter(step_tokens=1), 10, 1, []), resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics.begin(0)
    metrics.evaluation(1, {"eval_loss": 2.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(
            SaveError, match=r"line of metrics.jsonl could not be .* large\. Checkpoints are untouched: free"
        ):
            metrics.evaluation(2, {"eval_loss": 1.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text().endswith('\n{"step": ')
    assert read_metrics(tmp_path) == [{"step": 1, "eval_loss": 2.0}]
    metrics.begin(1)
    metrics.evaluation(2, {"eval_loss": 1.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_trackers_get_the_metrics_and_the_log_shows_progress(make_config, tmp_path, monkeypatch, caplog, capfd):
    made = {"wandb": MagicMock(), "mlflow": MagicMock()}
    monkeypatch.setattr("accelerate.tracking.WandBTracker", made["wandb"])
    monkeypatch.setattr("accelerate.tracking.MLflowTracker", made["mlflow"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with caplog.at_level(logging.INFO, logger="subquad"):
        train(make_config(trackers=["wandb", "mlflow"], steps=2))
    assert "step 2/2 loss" in caplog.text
    out, err = capfd.readouterr()
    assert out == ""
    assert "Writing model shards" not in err
    lines = read_metrics(tmp_path / "run")
    for tracker in made.values():
        assert tracker.call_args.args == ("subquad",)
        assert [name for name, _, _ in tracker.return_value.mock_calls] == ["start", *["log"] * len(lines), "finish"]
        logged = tracker.return_value.log.call_args_list
        assert [call.kwargs["step"] for call in logged] == [line["step"] for line in lines]
        assert logged[0].args[0]["train/loss"] == lines[0]["loss"]
        assert logged[-1].args[0] == {"eval/loss": lines[-1]["eval_loss"]}
    first = made["wandb"].call_args
    assert first.kwargs["name"] == made["mlflow"].call_args.kwargs["run_name"] == "run"
    assert not (tmp_path / "run" / "tensorboard").exists()
    train(make_config(trackers=["wandb"], steps=3, resume="must"))
    assert made["wandb"].call_args == first, "a resumed run is the same run"
