"""A language model of this library in transformers' own Trainer, alone and with PEFT's factors in it."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models.config import DecoderConfig
from subquad.testing import assert_exact, assert_same_maths

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "attention": "latte",
    "position": "sinusoidal",
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Eight rows that count up, each from another number on; the longer half of a row counts in every second one."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) + index) % 16
        labels = tokens.clone()
        labels[: 6 * (index % 2)] = -100
        return {"input_ids": tokens, "labels": labels}


def make_model() -> SubquadForCausalLM:
    torch.manual_seed(0)
    return SubquadForCausalLM(SubquadConfig.from_decoder(DecoderConfig(**SHAPE)))


def fit(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """Train for some steps; the losses that were reported."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        **{"max_steps": 20, "per_device_train_batch_size": 4, **options},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    trainer.save_model(str(folder))
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_the_stock_trainer_trains_and_saves_it(tmp_path: Path) -> None:
    model = make_model()
    losses = fit(model, tmp_path)
    assert losses[-1] < 0.5 * losses[0]
    loaded = SubquadForCausalLM.from_pretrained(tmp_path)
    tokens = Rows()[0]["input_ids"][None]
    assert_exact(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


def test_accumulated_rows_with_unequal_labels_make_the_step_of_one_batch(tmp_path: Path) -> None:
    whole, parts = make_model().double(), make_model().double()
    fit(whole, tmp_path / "whole", max_steps=1, optim="sgd")
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    fit(parts, tmp_path / "parts", max_steps=1, optim="sgd", **split)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert_same_maths(one.detach(), other.detach(), name)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_peft_trains_factors_alone(tmp_path: Path) -> None:
    base = make_model()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted: Any = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["up", "down"], task_type="CAUSAL_LM"))
    losses = fit(adapted, tmp_path)
    assert losses[-1] < losses[0]
    assert (tmp_path / "adapter_model.safetensors").is_file()
    again = peft.PeftModel.from_pretrained(make_model(), tmp_path)
    tokens = Rows()[0]["input_ids"][None]
    assert_exact(again.eval()(tokens).logits, adapted.eval()(tokens).logits)
    for name, tensor in base.state_dict().items():
        plain = name.replace(".base_layer", "")
        if plain in before:
            assert_exact(tensor, before[plain], name)


@pytest.mark.parametrize("attention", ["llp", "linear"])
def test_other_mechanisms_train_too(tmp_path: Path, attention: str) -> None:
    torch.manual_seed(0)
    shape = {**SHAPE, "attention": attention}
    model = SubquadForCausalLM(SubquadConfig.from_decoder(DecoderConfig(**shape)))
    losses = fit(model, tmp_path, max_steps=8)
    assert losses[-1] < losses[0]
