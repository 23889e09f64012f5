"""What the sequences of a classification say without their labels: hidden tokens, or the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset, Subset

from subquad.training._task import Items, Task
from subquad.training._task_classify import labelled, size, with_vocabulary
from subquad.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

    from subquad.hf import SubquadForPreTraining


class Unlabelled(Dataset[dict[str, Tensor]]):
    """The sequences of labelled items without their labels; of a pair each sequence is an item."""

    def __init__(self, items: Items, towers: int) -> None:
        self.items, self.towers = items, towers

    def __len__(self) -> int:
        return self.towers * size(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, tower = divmod(index, self.towers)
        prefix = "pair_" if tower else ""
        item = self.items[number]
        tokens_T = item[f"{prefix}input_ids"]
        return {"input_ids": tokens_T, "attention_mask": item[f"{prefix}attention_mask"], "labels": tokens_T}


def pretraining_task(config: TrainConfig, console: Console | None = None) -> Task:
    """The training sequences of `config` without their labels; the others are never read.

    Of them `run.eval_windows`, or a tenth where that is less, are set aside for the periodic evaluation: whole
    examples, evenly spread, since files may be sorted by class.
    Raises `ValueError` as `train` says.
    """
    from subquad.training.pretrain import check_pretraining

    corpus = labelled(config, console)
    config = with_vocabulary(config, corpus)
    check_pretraining(config)
    towers, examples = config.classify.towers, size(corpus.train)
    if examples < 2:
        raise ValueError(f"pretraining needs at least 2 examples, one of them to be measured on, got {examples}")
    items = Unlabelled(corpus.train, towers)
    measured = max(1, min(config.run.eval_windows, len(items) // 10) // towers)
    aside = {(i + 1) * examples // measured - 1 for i in range(measured)}
    learned = [number for number in range(len(items)) if number // towers not in aside]
    return Task(
        config=config,
        data=corpus,
        train=Subset(items, learned),
        count=len(learned),
        held_out=Subset(items, [towers * number + i for number in sorted(aside) for i in range(towers)]),
        make_model=lambda: _model(config),
        identity={"task": "pretrain", "data": corpus.fingerprint, "objective": _objective(config)},
    )


def _objective(config: TrainConfig) -> dict[str, str | float | bool]:
    options = config.pretrain
    values: dict[str, str | float | bool] = {"kind": options.kind, "causal": config.classify.causal}
    if options.kind == "denoise":
        values |= {"mask_fraction": options.mask_fraction, "random_fraction": options.random_fraction}
        if config.classify.pooling == "class":
            values["class_token"] = True  # a weight more
    return values


def _model(config: TrainConfig) -> SubquadForPreTraining:
    from subquad.hf import SubquadForPreTraining
    from subquad.hf.encoders import SubquadPretrainingConfig
    from subquad.training.pretrain import pretrained_encoder

    options = config.pretrain
    return SubquadForPreTraining(
        SubquadPretrainingConfig.from_encoder(
            pretrained_encoder(config),
            objective=options.kind,
            mask_fraction=options.mask_fraction,
            random_fraction=options.random_fraction,
        )
    )
