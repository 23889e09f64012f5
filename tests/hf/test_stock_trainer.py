"""A language model of this library in transformers' own Trainer, alone and with PEFT's factors in it."""

import re
from pathlib import Path

import peft
import pytest
import torch
from transformers import Trainer, TrainingArguments

from subquad.hf import SubquadForCausalLM
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import language_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def row(index):
    """A row that counts up from `index`; of every second one only the longer half counts in the loss."""
    tokens = (torch.arange(12) + index) % 16
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(12) < 6 * (index % 2), -100)}


def make_model(name="latte"):
    return language_model(name, vocab_size=16, init_std=0.02).float()


def fit(model, folder, *callbacks, **options):
    """Train for some steps, save the model, and return the reported losses."""
    options = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 0.02} | options
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    arguments = TrainingArguments(output_dir=str(folder), lr_scheduler_type="constant", **quiet, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=[row(i) for i in range(8)], callbacks=list(callbacks))
    trainer.train()
    trainer.save_model(str(folder))
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_the_stock_trainer_trains_and_saves_it(tmp_path):
    model, tokens = make_model(), row(0)["input_ids"][None]
    losses = fit(model, tmp_path)
    assert losses[-1] < 0.5 * losses[0]
    assert_exact(SubquadForCausalLM.from_pretrained(tmp_path)(tokens).logits, model.eval()(tokens).logits)


def test_accumulated_rows_with_unequal_labels_make_the_step_of_one_batch(tmp_path):
    whole, parts = make_model().double(), make_model().double()
    fit(whole, tmp_path / "whole", max_steps=1, optim="sgd")
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    fit(parts, tmp_path / "parts", max_steps=1, optim="sgd", **split)
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert_same_maths(one.detach(), other.detach(), name)


def test_a_callback_lets_performer_redraw_its_features(tmp_path):
    model = language_model("performer", vocab_size=16, options={"performer": {"redraw_interval": 2}}).float()
    layer, drawn, page = model.model.decoder.layers[0].attention, [], {}
    code = re.search(r"^```python\n(from transformers import TrainerCallback.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(code[1], page)  # noqa: S102 the page's own code

    class Watch(page["AfterStep"]):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            before = layer.directions.clone()
            super().on_step_end(args, state, control, model=model, **kwargs)
            drawn.append(not torch.equal(before, layer.directions))

    fit(model, tmp_path, Watch(), max_steps=4, per_device_train_batch_size=2)
    assert drawn == [False, True, False, True]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
def test_peft_trains_factors_alone(tmp_path):
    base, tokens = make_model("llp"), row(0)["input_ids"][None]
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    config = peft.LoraConfig(r=4, target_modules=["query", "up", "down"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    losses = fit(adapted, tmp_path)
    assert losses[-1] < losses[0]
    assert (tmp_path / "adapter_model.safetensors").is_file()
    again = peft.PeftModel.from_pretrained(make_model("llp"), tmp_path)
    assert_exact(again.eval()(tokens).logits, adapted.eval()(tokens).logits)
    for name, tensor in base.state_dict().items():
        plain = name.replace(".base_layer", "")
        if plain in before:
            assert_exact(tensor, before[plain], name)
    changed = {name for name, p in adapted.merge_and_unload().named_parameters() if not torch.equal(p, before[name])}
    layers = ("attention.query", "feedforward.up", "feedforward.down")
    assert changed == {f"model.decoder.layers.{i}.{name}.weight" for i in (0, 1) for name in layers}
