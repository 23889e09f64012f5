"""Runs in their folders: what is resumed bit for bit, what is refused, what is never overwritten."""

import logging
import shutil

import pytest

from subquad.training import checkpoint, train
from subquad.training.errors import CheckpointError
from subquad.training.processes import Processes
from subquad.training.reading import NumberedWindows
from subquad.training.run import settings_of
from subquad.training.tasks import prepare_task
from subquad.training.tasks_classify import first_phase
from tests.training.configs import CLASSIFY, MQAR, PROBE, TOY, perceiver, pretraining
from tests.training.helpers import assert_same_run, assert_same_weights, forget, steps_of

RESUMED = {
    **{name: {"optimizer.name": name, "schedule.kind": "cosine"} for name in ("adamw", "adam", "radam", "muon")},
    "packed documents": {"data.pack": "documents", "data.path": "TEXTS"},
    "perceiver": perceiver(vary_latents=True, prefix_dropout=0.3),
    "classify": CLASSIFY,
    "probe": PROBE,
}


@pytest.mark.parametrize("name", RESUMED)
def test_every_kind_of_run_resumes_at_its_window_to_the_same_bits(make_config, text, tmp_path, monkeypatch, name):
    seen, item = [], NumberedWindows.__getitem__
    monkeypatch.setattr(NumberedWindows, "__getitem__", lambda self, index: (seen.append(index), item(self, index))[1])
    changes = {k: str(text.parent / "texts") if v == "TEXTS" else v for k, v in RESUMED[name].items()}
    whole = train(make_config(changes, folder="whole")).folder
    forget(shutil.copytree(whole, tmp_path / "run"), 4)
    train(make_config(changes, resume="must"))
    assert_same_run(whole, tmp_path / "run")
    first, second, again = (seen[i * len(seen) // 3 : (i + 1) * len(seen) // 3] for i in range(3))
    assert first != second == again


def test_damaged_checkpoints_and_leftovers_are_skipped_with_their_reason(run_at_4, make_config, finished, caplog):
    root = run_at_4 / "checkpoints"
    weights = root / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    (root / ".saving-checkpoint-5").mkdir()
    with caplog.at_level(logging.INFO, logger="subquad"):
        train(make_config())
    for said in ("skipped checkpoint-4", f"resuming from {root / 'checkpoint-2'}", "deleted .saving-checkpoint-5"):
        assert said in caplog.text
    assert steps_of(root) == [2, 4]
    assert_same_weights(finished.folder, run_at_4)


@pytest.mark.parametrize(("changes", "message"), [
    ({"run.seed": 1}, "other settings: run.seed was 0, is 1"),
    ({"optimizer.lr": 0.5}, r"other settings: optimizer\.lr was 0\.003, is 0\.5; restore them"),
    ({"model.num_layers": 2}, r"other settings: model\.num_layers was 1, is 2; restore"),
    ({"data.held_out": 0.3}, "other settings: data was"),
    ({"data.pack": "documents"}, r"other settings: .*data\.pack was null, is 'documents'"),
    ({"batch.size": 8}, r"other settings: a step had 8 windows .*, has 16"),
    ({"run.steps": 3}, "is at step 4, past run.steps=3"),
    ({"run.resume": "never"}, "run.resume is 'never'; choose another run.folder"),
    ({"run.resume": "must", "run.folder": "nowhere"}, r"run\.resume is 'must' but .* has no checkpoint"),
])  # fmt: skip
def test_a_run_is_not_resumed_as_another(run_at_4, make_config, monkeypatch, changes, message):
    monkeypatch.chdir(run_at_4.parent)
    with pytest.raises(CheckpointError, match=message):
        train(make_config({"run.steps": 6, **changes}))


def test_a_text_that_changed_since_is_told_by_name(make_config, text, tmp_path):
    texts = shutil.copytree(text.parent / "texts", tmp_path / "texts")
    config = make_config({"data.path": str(texts), "data.pack": "documents"}, steps=2, eval_every=0)
    train(config)
    first, second = sorted(texts.iterdir())[:2]
    first.rename(texts / "new.txt")
    second.write_text(second.read_text() + "!")
    told = f"settings: text removed: {first.name}; text added: new.txt; text changed: {second.name}; "
    with pytest.raises(CheckpointError, match=told):
        train(config)


@pytest.mark.parametrize(("base", "phase", "changes"), [
    (CLASSIFY, None, [
        {"classify": TOY | {"seed": 1}},
        {"classify": TOY | {"pooling": "last"}},
        {"classify": TOY | {"causal": True}},
        {"classify": TOY | {"examples": 41}},
        {"batch": {"length": 21, "size": 4}},
        {"pretrain": {"joint_weight": 0.5}},
    ]),
    (pretraining(), None, [pretraining(steps=5)]),
    (pretraining(kind="causal"), None, [pretraining(kind="none")]),  # neither has a mask token: the models are the same
    (pretraining(), first_phase, [
        pretraining(mask_fraction=0.4),
        pretraining(lr=1e-4),
        {"classify": TOY | {"pooling": "class"}},
        {"classify": TOY | {"seed": 1}},
    ]),
    (PROBE, None, [{"probe": MQAR | {"seed": 1}}, {"probe": MQAR | {"pairs": 1}}]),
])  # fmt: skip
def test_what_must_stay_the_same_is_in_the_settings_of_every_task(make_config, base, phase, changes):
    def settings(change):
        config = make_config(base, change)
        return settings_of(prepare_task(phase(config) if phase else config, None), "float32", Processes())

    for change in changes:
        with pytest.raises(CheckpointError, match="was made with other settings: "):
            checkpoint.check_settings({"step": 1, "settings": settings({})}, settings(change))


def test_auto_does_not_resume_in_another_precision(run_at_4, make_config, monkeypatch):
    monkeypatch.setattr("subquad.training.run._multiplies_bf16", lambda device: True)
    with pytest.raises(CheckpointError, match=r"other settings: run\.precision was 'float32', is 'bf16'"):
        train(make_config(steps=5, precision="auto"))
    monkeypatch.setattr("subquad.training.run._multiplies_bf16", lambda device: False)
    assert train(make_config(steps=5, precision="auto")).steps == 5


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_other_random_numbers_after_a_change_of_processes_are_announced(run_at_4, make_config, caplog, dropout):
    """The checkpoint of one process, made to look like one of two processes."""
    made = run_at_4 / "checkpoints" / "checkpoint-4"
    draft = made.rename(made.with_name("draft"))
    shutil.copy(draft / "rng_state_0.safetensors", draft / "rng_state_1.safetensors")
    settings = checkpoint.read_manifest(draft)["settings"]
    (draft / "manifest.json").unlink()
    checkpoint.publish(draft, made, step=4, settings={**settings, "model": settings["model"] | {"dropout": dropout}})
    assert train(make_config({"model.dropout": dropout}, steps=5)).steps == 5
    assert ("checkpoint-4 was made by 2 processes and is resumed by 1" in caplog.text) is bool(dropout)


def test_a_folder_that_is_not_a_run_is_not_overwritten(make_config, tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("notes.md", "a", "b", "c"):
        (tmp_path / "other" / name).write_text("mine")
    with pytest.raises(ValueError, match=r"is not a run, but has other files \(a, b, c, \.\.\.\), which might be over"):
        train(make_config(folder="other"))
    with pytest.raises(ValueError, match=r"notes\.md' is a file; give a folder"):
        train(make_config(folder="other/notes.md"))
    assert sorted(file.name for file in (tmp_path / "other").iterdir()) == ["a", "b", "c", "notes.md"]
