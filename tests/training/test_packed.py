"""Runs on packed documents and on sets of token shards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.data import write_tokens
from subquad.data.token_set import ShardError
from subquad.data.tokenizers import load_tokenizer
from subquad.testing import assert_exact
from subquad.training import TrainConfig, train
from subquad.training.errors import CheckpointError
from subquad.training.loop import Loop
from tests.data.sets import flip


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of token shards of documents of one to three dozen bytes."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(60):
        (texts / f"{i:02d}.txt").write_text(f"line {i}\n" * (1 + i * 7 % 5))
    write_tokens(tmp_path / "shards", [str(texts)], load_tokenizer("bytes"), shard_tokens=200)
    return tmp_path / "shards"


def packed(make_config: Callable[..., TrainConfig], shards: Path, **changes: object) -> TrainConfig:
    return make_config(
        {
            "data.path": str(shards),
            "data.pack": "documents",
            "data.held_out": 0.1,
            "schedule.kind": "constant",
            "schedule.warmup": 1,
            "run.steps": 4,
            "run.eval_every": 2,
            "run.save_every": 2,
            **{name.replace("__", "."): value for name, value in changes.items()},
        }
    )


def weights(config: TrainConfig) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in train(config).model.parameters()])


def test_a_step_is_the_mean_over_all_its_labels(
    make_config: Callable[..., TrainConfig],
    shards: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Windows hold unequal numbers of labels: a mean of means over the accumulation would be another step."""
    seen: list[tuple[int, int]] = []
    loss = Loop.loss

    def logged(self: Loop, batch: dict[str, torch.Tensor], labels: Any) -> torch.Tensor:
        seen.append((int((batch["labels"] != -100).sum()), int(labels)))
        return loss(self, batch, labels)

    monkeypatch.setattr(Loop, "loss", logged)
    with caplog.at_level(logging.INFO):
        train(packed(make_config, shards, run__steps=2, run__eval_every=0))
    assert len([1 for record in caplog.records if "windows of whole documents, " in record.message]) == 2
    assert len(seen) == 4
    for (first, all_first), (second, all_second) in batched(seen):
        assert first != second, "the test needs batches with unequal numbers of labels"
        assert all_first == all_second == first + second


def batched(pairs: list[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return list(zip(pairs[::2], pairs[1::2], strict=True))


def test_an_interrupted_run_goes_on_bit_for_bit_with_the_same_packing(
    make_config: Callable[..., TrainConfig], shards: Path, tmp_path: Path
) -> None:
    whole = weights(packed(make_config, shards))
    cut = packed(make_config, shards, run__folder=str(tmp_path / "cut"))
    train(cut.replace(run=cut.run.replace(steps=2)))
    with pytest.raises(CheckpointError, match=r"data\.pack was 'documents', is None"):
        train(cut.replace(data=cut.data.replace(pack="stream")))
    assert_exact(weights(cut), whole)


def test_a_bad_shard_stops_a_run_or_is_skipped(
    make_config: Callable[..., TrainConfig], shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(shards / "00001.tokens")
    config = packed(make_config, shards, data__pack="stream", batch__size=8, run__eval_every=0)
    with pytest.raises(ShardError, match=r"shard 00001\.tokens of .*shards cannot be read"):
        train(config)
    config = config.replace(data=config.data.replace(bad_shards="skip"))
    assert train(config.replace(run=config.run.replace(folder=config.run.folder + "-skip"))).steps == 4
    assert "shard 00001.tokens of" in caplog.text


def test_perceiver_ar_takes_no_packed_documents(make_config: Callable[..., TrainConfig], shards: Path) -> None:
    config = packed(make_config, shards, model__attention="perceiver_ar")
    config = config.replace(model=config.model.replace(options={"perceiver_ar": {"latents": 8}}))
    with pytest.raises(ValueError, match=r"perceiver_ar predicts a window's last tokens alone and takes no packed"):
        train(config)
