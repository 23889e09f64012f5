"""The loop: no step on what isn't finite, the last good checkpoint stays, NaN is never saved, precision, optimizers."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from subquad.hf import SubquadForCausalLM
from subquad.testing import assert_exact
from subquad.training import TrainConfig, checkpoint, train
from subquad.training.errors import NonFiniteError
from subquad.training.loop import Loop
from subquad.training.reading import NumberedWindows
from subquad.training.run import precision_of
from subquad.training.saving import Checkpoints, Standing


def poison(monkeypatch: pytest.MonkeyPatch, number: int, change: Callable[[Tensor], Tensor]) -> list[list[int]]:
    """Change the loss of the `number`-th training batch; returns the windows of each batch, as they come."""
    batches: list[list[int]] = []
    loss, training_pass = Loop.loss, Loop.training_pass

    def poisoned(self: Loop, *args: Any) -> Tensor:
        value = loss(self, *args)
        return change(value) if len(batches) == number else value

    def logged(self: Loop, batch: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        batches.append(batch["window"].tolist())
        training_pass(self, batch, *args, **kwargs)

    monkeypatch.setattr(Loop, "loss", poisoned)
    monkeypatch.setattr(Loop, "training_pass", logged)
    return batches


def infinite_gradient(loss: Tensor) -> Tensor:
    """The same loss with an infinite gradient."""
    zero = (loss * 0).clamp(min=0)
    return loss.detach() + zero.sqrt()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda loss: loss * math.nan, "the loss is nan"),
        (lambda loss: loss * math.inf, "the loss is inf"),
        (infinite_gradient, "the gradient norm is nan"),
    ],
)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_what_is_not_finite_stops_the_run_before_the_step_and_names_step_and_windows(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, what: str, clip: float
) -> None:
    config = make_config({"optimizer.clip": clip})
    batches = poison(monkeypatch, 10, change)  # the second half of step 5
    steps: list[int] = []
    optimizer_step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *a, **k: (steps.append(1), optimizer_step(self, *a, **k))[1]
    )
    with pytest.raises(NonFiniteError) as error:
        train(config)
    windows = re.escape(str(batches[8] + batches[9]))
    assert re.search(f"{what} at step 5, in the batch of windows {windows}", str(error.value))
    assert "Newest checkpoint: checkpoint-4" in str(error.value)
    assert len(steps) == 4
    root = tmp_path / "run" / "checkpoints"
    assert checkpoint.newest_complete(root) == root / "checkpoint-4"
    assert not (tmp_path / "run" / "config.json").exists()

    monkeypatch.undo()
    assert train(config).steps == 10


def test_weights_that_are_not_finite_are_never_saved(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Checkpoints.save

    def break_weights(self: Checkpoints, standing: Standing) -> None:
        if standing.step == 6:
            next(self.model.parameters()).data[0, 0] = math.nan
        save(self, standing)

    monkeypatch.setattr(Checkpoints, "save", break_weights)
    with pytest.raises(NonFiniteError, match=r"the weight model\.\S+ is not finite after step 6.*checkpoint-4"):
        train(make_config())
    root = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in checkpoint.listing(root)] == [3, 4]
    assert not list(root.glob(".*"))


def test_a_held_out_loss_that_is_not_finite_stops_the_run(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Loop.evaluate
    monkeypatch.setattr(Loop, "evaluate", lambda self: {**evaluate(self), "eval_loss": math.nan})
    with pytest.raises(NonFiniteError, match="the held-out loss is nan after step 4; nothing was saved"):
        train(make_config())


def test_the_best_checkpoint_survives_rotation_and_a_resume(
    make_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Loop.evaluate

    def worse_and_worse(self: Loop) -> dict[str, float]:
        evaluate(self)
        return {"eval_loss": 1.0 + self.standing.step}

    monkeypatch.setattr(Loop, "evaluate", worse_and_worse)
    root = tmp_path / "run" / "checkpoints"
    changes = {"run.eval_every": 2, "run.save_every": 2, "run.keep": 2, "schedule.kind": "constant"}
    train(make_config({**changes, "run.steps": 8}))
    assert [step for step, _ in checkpoint.listing(root)] == [2, 6, 8]
    result = train(make_config({**changes, "run.steps": 12}))
    assert [step for step, _ in checkpoint.listing(root)] == [2, 10, 12]
    assert (result.best_step, result.best_loss) == (2, 3.0)


def test_the_loss_of_an_accumulated_step_is_the_mean_of_its_halves(make_config, tmp_path: Path) -> None:
    changes = {"model.dropout": 0.0, "run.steps": 3, "run.log_every": 1}
    halves = make_config({**changes, "batch.size": 4, "batch.accumulation": 2, "run.folder": str(tmp_path / "halves")})
    whole = make_config({**changes, "batch.size": 8, "batch.accumulation": 1, "run.folder": str(tmp_path / "whole")})
    losses = []
    for config in (halves, whole):
        train(config)
        lines = (Path(config.run.folder) / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if '"loss"' in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] == pytest.approx(math.log(256), rel=0.05)


def test_the_model_at_the_top_of_the_folder_is_the_last_one(make_config, tmp_path: Path) -> None:
    result = train(make_config({"run.steps": 4}))
    loaded = SubquadForCausalLM.from_pretrained(tmp_path / "run")
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded.eval()(tokens).logits, result.model.eval()(tokens).logits)
    assert loaded.config.use_cache
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert tokenizer.decode(tokenizer("def f(a):\n    é").input_ids) == "def f(a):\n    é"


@pytest.mark.parametrize("name", ["adam", "radam", "muon"])
def test_every_optimizer_trains_and_goes_on_exactly(make_config, tmp_path: Path, name: str) -> None:
    changes = {"optimizer.name": name, "schedule.kind": "constant", "run.eval_every": 0}
    whole = train(make_config({**changes, "run.steps": 6, "run.folder": str(tmp_path / "whole")}))
    train(make_config({**changes, "run.steps": 3}))
    parts = train(make_config({**changes, "run.steps": 6}))
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_is_autocast_over_float32_weights(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(make_config({"run.steps": 3, "run.precision": "bf16"}))
    assert all(parameter.dtype == torch.float32 for parameter in result.model.parameters())
    tokens, loaded = torch.arange(20)[None], SubquadForCausalLM.from_pretrained(result.folder).eval()
    assert torch.equal(result.model.eval()(tokens).logits, loaded(tokens).logits), "training's autocast is left behind"
    assert precision_of(make_config({"run.precision": "bf16"})) == "bf16"
    assert precision_of(make_config({"run.precision": "float32"})) == "float32"
    for instructions in (True, False):
        monkeypatch.setattr("subquad.training.run._multiplies_bf16", lambda cpu, has=instructions: has)
        assert precision_of(make_config()) == ("bf16" if instructions else "float32")


def test_texts_shorter_than_a_window_are_refused(make_config) -> None:
    with pytest.raises(
        ValueError, match=r"batch.length 2000 is longer than the training part of the text, which has \d+"
    ):
        train(make_config({"batch.length": 2000}))
    with pytest.raises(ValueError, match=r"batch\.length 400 is longer than the held-out part of the text"):
        train(make_config({"batch.length": 400}))


def test_an_evaluation_changes_nothing_in_training(make_config, tmp_path: Path) -> None:
    weights = []
    for name, every in (("often", 1), ("never", 0)):
        train(make_config({"run.eval_every": every, "run.folder": str(tmp_path / name), "run.steps": 4}))
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    for name, tensor in weights[0].items():
        assert_exact(tensor, weights[1][name], name)


def test_numbered_windows_carry_their_number() -> None:
    windows = NumberedWindows([{"input_ids": torch.tensor([1])}, {"input_ids": torch.tensor([2])}])  # type: ignore[arg-type]
    assert len(windows) == 2
    assert int(windows[1]["window"]) == 1


def test_the_vocabulary_follows_the_tokenizer(make_config) -> None:
    config: TrainConfig = make_config({"run.steps": 3, "run.save_every": 3, "run.eval_every": 0})
    assert config.model.vocab_size == 4096
    result = train(config)
    assert result.model.config.vocab_size == result.corpus.train.vocab_size == 256
    assert TrainConfig.from_file(result.folder / "config.yaml") == result.config
