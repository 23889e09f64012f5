"""`run.weights=best`: chosen by one half of the held-out text, reported on the other."""

import pytest

from subquad.testing import assert_exact
from subquad.training import train
from subquad.training.tasks_text import reported_from
from tests.training.helpers import records, steps_of


def test_the_best_weights_are_chosen_by_the_first_half_and_reported_on_the_second(make_config, monkeypatch):
    config = make_config({"data.held_out": 0.5}, steps=6, save_every=1, keep=9, eval_windows=99, weights="best")
    losses = iter([3.0, 1.0, 2.0])
    seen = []

    def planted(loop):
        seen.append(len(loop.task.held_out))
        return {"eval_loss": next(losses)}

    monkeypatch.setattr("subquad.training.loop.Loop.evaluate", planted)
    result = train(config)
    assert (result.best_step, result.steps, steps_of(result.folder / "checkpoints")[-1]) == (4, 6, 6)
    best = type(result.model).from_pretrained(result.folder / "checkpoints/checkpoint-4")
    final = type(result.model).from_pretrained(result.folder)
    for one, two, three in zip(result.model.parameters(), best.parameters(), final.parameters(), strict=True):
        assert_exact(one, two)
        assert_exact(three, two)
    tokens = len(result.corpus.held_out)
    assert reported_from(result.config, tokens) == tokens // 2
    assert seen[0] * 31 <= tokens // 2 < (seen[0] + 2) * 31, "windows of the first half"
    assert reported_from(make_config(), tokens) == 0
    assert [record["eval_loss"] for record in records(result.folder) if "eval_loss" in record] == [3.0, 1.0, 2.0]


def test_best_weights_need_a_stream(make_config):
    with pytest.raises(ValueError, match=r"run\.weights=best needs data\.pack=stream, got documents"):
        make_config({"data.pack": "documents"}, weights="best")
