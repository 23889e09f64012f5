"""The loop: steps that aren't finite, signals, precision, optimizers, what mechanisms hear of steps."""

import logging
import math
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer

from subquad import program
from subquad.attention import Attention
from subquad.hf import SubquadForCausalLM
from subquad.testing import assert_exact
from subquad.training import TrainConfig, train
from subquad.training.errors import NonFiniteError
from subquad.training.loop import Loop, StopSignal
from subquad.training.run import precision_of
from subquad.training.saving import Checkpoints
from tests.training.helpers import (
    assert_same_weights,
    before_pass,
    change_loss,
    read_json,
    records,
    steps_of,
    stop_at_once,
)


def infinite_gradient(loss):
    """Return the same loss with an infinite gradient."""
    return loss.detach() + (loss * 0).clamp(min=0).sqrt()


@pytest.mark.parametrize(("change", "what", "clip"), [
    (lambda loss: loss * math.nan, "the loss is nan", 1.0),
    (lambda loss: loss + math.inf, "the loss is inf", 0.0),  # with a finite gradient
    (infinite_gradient, "the gradient norm is nan", 1.0),
    (infinite_gradient, "the gradient norm is nan", 0.0),
])  # fmt: skip
def test_a_non_finite_step_ends_the_run_before_the_optimizer_steps(make_config, tmp_path, change, what, clip):
    config = make_config({"optimizer.clip": clip}, steps=3, eval_every=0)
    windows, steps = [], []
    training_pass, optimizer_step = Loop.training_pass, torch.optim.AdamW.step

    def logged(self, batch, *args, **kwargs):
        windows.extend(batch["window"].tolist())
        training_pass(self, batch, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        change_loss(patch, {3}, lambda loss: change(loss) if len(windows) == 6 * 4 else loss)  # its second half
        patch.setattr(Loop, "training_pass", logged)
        patch.setattr(torch.optim.AdamW, "step", lambda *args: (steps.append(1), optimizer_step(*args)))
        with pytest.raises(NonFiniteError) as error:
            train(config)
    assert re.search(f"{what} at step 3, in the batch of windows {re.escape(str(windows[16:]))}", str(error.value))
    assert "Newest checkpoint: checkpoint-2" in str(error.value)
    assert len(steps) == 2
    assert steps_of(tmp_path / "run" / "checkpoints") == [2]
    assert not (tmp_path / "run" / "config.json").exists()
    assert train(config).steps == 3


def test_a_skipped_step_changes_nothing_but_the_schedule_and_is_counted(make_config, monkeypatch, caplog):
    run = {"steps": 6, "save_every": 1, "keep": 9, "eval_every": 0, "nonfinite": "skip"}
    config = make_config({"schedule.kind": "cosine"}, **run)
    change_loss(monkeypatch, {3, 4}, lambda loss: loss * torch.inf)
    result = train(config)
    assert (result.steps, result.skipped) == (6, 2)
    assert re.search(r"the loss is inf at step 3, in the batch of windows \[.*\]; skipped the step \(1 so", caplog.text)
    lines = records(result.folder)
    assert [(line["step"], line.get("skipped", 0)) for line in lines] == [(1, 0), (2, 0), (5, 2), (6, 2)]
    peak = config.optimizer.lr
    assert [line["lr"] / peak for line in lines] == [config.schedule.factor(step, 6) for step in (0, 1, 4, 5)]
    before, after = (result.folder / "checkpoints" / f"checkpoint-{step}" for step in (2, 4))
    assert_same_weights(before, after)
    states = [torch.load(folder / "optimizer.pt", weights_only=True)["state"] for folder in (before, after)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        for name, value in state.items():
            assert_exact(states[1][number][name], value, name)


def test_too_many_skipped_steps_in_a_row_end_the_run_and_a_resume_keeps_count(make_config, tmp_path):
    config = make_config(steps=6, eval_every=0, save_every=4, nonfinite="skip", nonfinite_limit=3)
    message = r"the loss is inf at step 5.*nonfinite_limit=3 steps in a row.*\(4 in total\); nothing was saved"
    with pytest.MonkeyPatch.context() as patch:
        change_loss(patch, {1, 3, 4, 5, 6}, lambda loss: loss * torch.inf)
        for _ in range(2):
            with pytest.raises(NonFiniteError, match=message):
                train(config)
            saved = read_json(tmp_path / "run" / "checkpoints" / "checkpoint-4" / "skipped.json")
            assert saved == {"total": 3, "in_a_row": 2}
    assert train(config).skipped == 3


def test_weights_that_are_not_finite_are_never_saved(make_config, tmp_path, monkeypatch):
    save = Checkpoints.save

    def break_weights(self, state):
        if state.step == 4:
            next(self.model.parameters()).data[0, 0] = math.nan
        save(self, state)

    monkeypatch.setattr(Checkpoints, "save", break_weights)
    with pytest.raises(NonFiniteError, match=r"the weight model\.\S+ is not finite after step 4.*checkpoint-2"):
        train(make_config())
    assert steps_of(tmp_path / "run" / "checkpoints") == [2]


def test_a_held_out_loss_that_is_not_finite_stops_the_run(make_config, monkeypatch):
    monkeypatch.setattr(Loop, "evaluate", lambda self: {"eval_loss": math.nan})
    with pytest.raises(NonFiniteError, match="the held-out loss is nan after step 2; nothing was saved"):
        train(make_config())


def test_the_best_checkpoint_survives_rotation_and_a_resume(make_config, monkeypatch):
    monkeypatch.setattr(Loop, "evaluate", lambda self: {"eval_loss": 1.0 + self.state.step})
    for steps, kept in ((4, [1, 3, 4]), (6, [1, 5, 6])):
        result = train(make_config(steps=steps, save_every=1, eval_every=1, keep=2))
        assert steps_of(result.folder / "checkpoints") == kept
    assert (result.best_step, result.best_loss) == (1, 2.0)


def test_the_loss_of_an_accumulated_step_is_the_mean_over_all_its_labels(make_config, text, caplog):
    """Batches of packed documents hold different numbers of labels: a mean of means would be another step."""
    losses, packed = [], {"data.path": str(text.parent / "texts"), "data.pack": "documents", "model.dropout": 0.0}
    for size in (1, 8):
        batch = {"batch.size": size, "batch.accumulation": 8 // size}
        with caplog.at_level(logging.INFO):
            result = train(make_config(packed, batch, steps=3, eval_every=0, folder=f"size {size}"))
        losses.append([line["loss"] for line in records(result.folder)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] == pytest.approx(math.log(256), rel=0.05)
    assert caplog.text.count("windows of whole documents, ") == 4


def test_the_folder_has_the_last_model_and_the_configuration_that_was_trained(finished):
    loaded = SubquadForCausalLM.from_pretrained(finished.folder)
    tokens = torch.arange(20)[None]
    assert_exact(loaded.eval()(tokens).logits, finished.model.eval()(tokens).logits)
    assert loaded.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(finished.folder)
    assert tokenizer.decode(tokenizer("def f(a):\n    é").input_ids) == "def f(a):\n    é"
    assert TrainConfig.from_file(finished.folder / "config.yaml") == finished.config
    assert finished.config.model.vocab_size == finished.corpus.train.vocab_size == 256, "the tokenizer's"


def test_bfloat16_is_autocast_over_float32_weights(make_config, monkeypatch):
    result = train(make_config(steps=2, precision="bf16", eval_every=0))
    assert all(parameter.dtype == torch.float32 for parameter in result.model.parameters())
    tokens, loaded = torch.arange(20)[None], SubquadForCausalLM.from_pretrained(result.folder).eval()
    assert torch.equal(result.model.eval()(tokens).logits, loaded(tokens).logits), "training's autocast is left behind"
    for precision in ("bf16", "float32"):
        assert precision_of(make_config(precision=precision)) == precision
        monkeypatch.setattr("subquad.training.run._multiplies_bf16", lambda cpu, fast=precision == "bf16": fast)
        assert precision_of(make_config(precision="auto")) == precision


def test_recomputed_activations_change_no_bit(make_config, tmp_path):
    model = {"model.attention": ["llp", "latte"], "model.num_layers": 2, "model.position": "sinusoidal"}
    for again in (False, True):
        run = {"steps": 2, "eval_every": 0, "activation_checkpointing": again}
        assert train(make_config(model, folder=str(again), **run)).decoder.gradient_checkpointing is again
    assert_same_weights(tmp_path / "False", tmp_path / "True")


def test_a_signal_saves_and_the_run_is_resumed_from_there(make_config, finished, caplog):
    with pytest.MonkeyPatch.context() as patch:
        before_pass(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        result = train(make_config())
    assert (result.interrupted, result.steps) == (True, 3)
    assert "received SIGTERM: saving after this step" in caplog.text
    line = ["train", "--config", result.folder / "config.yaml"]
    assert result.command == program.command(*line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert result.command == program.command(*line, processes=2), "as many, which `parallel.context` needs"
    assert steps_of(result.folder / "checkpoints") == [2, 3]
    assert not (result.folder / "config.json").exists()
    again = train(make_config())
    assert (again.interrupted, again.steps) == (False, 4)
    assert_same_weights(finished.folder, again.folder)


def test_the_first_signal_is_received_a_second_ctrl_c_interrupts_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with StopSignal() as stop:
            os.kill(os.getpid(), number)
            assert stop.received
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with ThreadPoolExecutor(1) as pool:  # where no handlers can be set
        assert pool.submit(lambda: StopSignal().__enter__().received).result() is False


def test_mechanisms_hear_of_every_step_and_what_they_change_is_saved_and_resumed(make_config, monkeypatch):
    heard = []

    @torch.no_grad()
    def shrink(self, step):
        heard.append((id(self), step))
        self.get_parameter("out.weight").mul_(1 - 0.1 / step)

    monkeypatch.setattr(Attention, "after_step", shrink)
    two_layers = {"model.num_layers": 2}
    whole = train(make_config(two_layers, folder="whole", eval_every=0))
    layers = [id(block.attention) for block in whole.decoder.blocks()]
    assert heard == [(layer, step) for step in (1, 2, 3, 4) for layer in layers], "once for all its batches"
    with monkeypatch.context() as patch:
        stop_at_once(patch)
        assert train(make_config(two_layers, eval_every=0)).steps == 1
    assert_same_weights(whole.folder, train(make_config(two_layers, eval_every=0)).folder)
