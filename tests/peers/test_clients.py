"""Programs that train, embed and measure any transformers model, on ours: TRL, sentence-transformers, lm-eval, PEFT."""

import json
import re
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import peft
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths

WORDS = 30
OPTIONS = {"latte": {"num_latents": 8}, "window": {"width": 8}, "llp": {"segment": 8}, "perceiver_ar": {"latents": 6}}
ROPE = ("window", "llp", "perceiver_ar")
TASKS = Path(__file__).parents[1] / "evaluation" / "tasks"
COMMON = {
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
    "learning_rate": 1e-2, "per_device_train_batch_size": 4, "bf16": False, "seed": 0,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def tokenizer():
    pieces = {f"w{i}": i for i in range(WORDS)} | {"[UNK]": WORDS, "<end>": WORDS + 1, "<pad>": WORDS + 2}
    own = Tokenizer(models.WordLevel(pieces, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]", eos_token="<end>", pad_token="<pad>")


def language_model(name="latte", **fields):
    torch.manual_seed(0)
    options = {name: OPTIONS[name]} if name in OPTIONS else {}
    position = "rope" if name in ROPE else "none"
    shape = {"vocab_size": WORDS + 3, "dim": 16, "num_layers": 1, "num_heads": 2, "pad_token_id": WORDS + 2}
    shape |= {"eos_token_id": WORDS + 1, "attention": name, "options": options, "position": position}
    return SubquadForCausalLM(SubquadConfig(**shape | fields))


def saved(folder, name="latte", **fields):
    language_model(name, **fields).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def counting(begin, words=20):
    return " ".join(f"w{(begin + i) % 10}" for i in range(words))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


TEXTS = [{"text": counting(i % 10, 6 + i % 5)} for i in range(40)]


@pytest.mark.parametrize("packing", [{}, {"packing": True}, {"packing": True, "packing_strategy": "wrapped"}], ids=str)
@pytest.mark.parametrize("name", ["latte", "window", "gated_delta_net", "llp"])
def test_sft_of_trl_learns(peer, tmp_path, name, packing):
    trl = peer("trl")
    arguments = trl.SFTConfig(str(tmp_path), max_steps=30, max_length=32, **COMMON, **packing)
    data = Dataset.from_list(TEXTS)
    trainer = trl.SFTTrainer(language_model(name), args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    first, *_, last = losses(trainer)
    assert last < first - 1, (first, last)


@pytest.mark.parametrize("name", ["latte", "window", "gated_delta_net"])
def test_packed_texts_of_trl_do_not_see_each_other(peer, tmp_path, name):
    """The loss of a packed batch is the mean over the labels of its texts, each read alone."""
    trl = peer("trl")
    arguments = trl.SFTConfig(str(tmp_path), max_steps=1, max_length=32, packing=True, **COMMON)
    data, model = Dataset.from_list(TEXTS), language_model(name)
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer())
    batch = next(iter(trainer.get_train_dataloader()))
    (row,), model = batch["input_ids"], model.double().eval()
    begins = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), len(row)]
    assert len(begins) > 4
    pieces = [row[None, a:b] for a, b in pairwise(begins)]
    alone = torch.cat([model(piece).logits for piece in pieces], 1)
    named = {key: value for key, value in batch.items() if key != "labels"}
    assert_same_maths(model(**named).logits, alone)


@pytest.mark.parametrize("adapted", [False, True])
def test_dpo_of_trl_prefers_what_was_chosen(peer, tmp_path, adapted):
    trl = peer("trl")
    rows = [{"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w9 w1"}] * 16
    model = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "model"))
    arguments = trl.DPOConfig(str(tmp_path), max_steps=8, **COMMON)
    factors = peft.LoraConfig(task_type="CAUSAL_LM", r=4) if adapted else None
    trainer = trl.DPOTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), peft_config=factors
    )
    trainer.train()
    first, *_, last = losses(trainer)
    assert last < first, (first, last)


def test_grpo_of_trl_samples_and_trains(peer, tmp_path):
    trl = peer("trl")
    rewarded = []

    def reward(completions, **named):
        rewarded.append([float(text.count("w5")) for text in completions])
        return rewarded[-1]

    arguments = trl.GRPOConfig(str(tmp_path), max_steps=25, num_generations=4, max_completion_length=6, **COMMON)
    data, model = Dataset.from_list([{"prompt": "w1 w2 w3"}] * 16), language_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer = trl.GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer()
    )
    trainer.train()
    assert [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert sum(map(sum, rewarded[-6:])) > sum(map(sum, rewarded[:6]))


def test_a_reward_model_of_trl_ranks(peer, tmp_path):
    trl = peer("trl")
    rows = [{"chosen": "w1 w2 w3 w4", "rejected": "w1 w9 w8"}] * 16
    model = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path / "model"), num_labels=1)
    arguments = trl.RewardConfig(str(tmp_path), max_steps=10, **COMMON)
    data = Dataset.from_list(rows)
    trainer = trl.RewardTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    first, *_, last = losses(trainer)
    assert last < first / 2, (first, last)


@pytest.mark.parametrize("name", ["latte", "window", "gated_delta_net"])
def test_sentences_are_embedded_by_the_mean_of_their_tokens(peer, tmp_path, name):
    peer("sentence_transformers")
    modules = peer("sentence_transformers.sentence_transformer.modules")
    folder, texts = saved(tmp_path, name), ["w1 w2 w3", "w4 w5 w6 w7 w8 w9", "w2"]
    read = modules.Transformer(folder, max_seq_length=32)
    pooled = modules.Pooling(16, pooling_mode="mean")
    model = peer("sentence_transformers").SentenceTransformer(modules=[read, pooled], device="cpu")
    together = model.encode(texts, convert_to_tensor=True)
    backbone, plain = AutoModel.from_pretrained(folder), []
    for text in texts:
        tokens = tokenizer()(text, return_tensors="pt").input_ids
        plain.append(backbone(tokens).last_hidden_state.mean(1).detach())
    exact = [
        backbone.double()(tokenizer()(text, return_tensors="pt").input_ids).last_hidden_state.mean(1) for text in texts
    ]
    assert_in_budget(together, torch.cat(plain), torch.cat(exact).detach(), torch.float32)


def test_a_classifier_made_of_a_language_model_is_trained_by_the_trainer(tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path / "model"), num_labels=3)
    rows = []
    for i in range(120):
        text = " ".join(f"w{(7 * i + 3 * j) % 20}" for j in range(4 + i % 5)) + f" w{20 + i % 3}"
        rows.append({"input_ids": tokenizer()(text).input_ids, "labels": i % 3})
    arguments = TrainingArguments(str(tmp_path), max_steps=60, **COMMON | {"per_device_train_batch_size": 8})
    trainer = Trainer(model, arguments, train_dataset=rows[:90], processing_class=tokenizer())
    trainer.train()
    found = trainer.predict(rows[90:])
    assert (found.predictions.argmax(-1) == found.label_ids).mean() > 0.9


@pytest.mark.parametrize("name", ["latte", "gla", "elita", "llp"])
def test_peft_by_its_defaults_trains_and_merges(name):
    model, tokens = language_model(name).double(), torch.arange(12)[None]
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    before = adapted.eval()(input_ids=tokens).logits
    assert_same_maths(adapted.merge_and_unload()(input_ids=tokens).logits, before)


def test_peft_warns_of_a_tied_head_and_learns_prompts():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        peft.get_peft_model(language_model(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
    assert any("tie" in str(warning.message) for warning in said)
    model, tokens = language_model(), torch.arange(12)[None]
    sizes = {"token_dim": 16, "num_layers": 1, "num_attention_heads": 2}  # PEFT knows them by no name of ours
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes)
    prompted = peft.get_peft_model(model, prompts)
    prompted(input_ids=tokens, labels=tokens).loss.backward()
    assert prompted.prompt_encoder.default.embedding.weight.grad.abs().max() > 0


def test_lm_evals_own_command_finds_what_subquad_eval_finds(tmp_path):
    """Both by commands, in processes that import no subquad of ours first; figures as lm-eval writes them."""
    folder, names = saved(tmp_path / "model", dim=32), "local_choices,local_texts"
    theirs = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", names, "--include_path", "."]
    theirs += ["--model_args", f"pretrained={folder},trust_remote_code=True,dtype=float32", "--device", "cpu"]
    theirs += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(theirs, cwd=TASKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    (file,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    ours = [sys.executable, "-m", "subquad", "eval", folder, "--tasks", names, "--task_path", "."]
    ours += ["--json", str(tmp_path / "ours.json")]
    done = subprocess.run(ours, cwd=TASKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    mine = json.loads((tmp_path / "ours.json").read_text())["results"]
    compared = 0
    for task, values in results.items():
        for measure, value in values.items():
            if isinstance(value, float) and not re.search("stderr|sample", measure):
                found = mine[task][measure] if measure in mine[task] else mine[task][measure.removesuffix(",none")]
                assert_exact(torch.tensor(found), torch.tensor(value), f"{task} {measure}")
                compared += 1
    assert compared >= 4
