"""The models of a language model's configuration as transformers' users expect them: backbone, classifiers, tables."""

import json
import subprocess
import sys
from functools import partial

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from subquad.data import load_tokenizer
from subquad.hf import (
    SubquadCache,
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
    SubquadModel,
)
from subquad.hf.lora import put_adapter
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from tests.hf.small import FORMS, language_model, left_padded, perceiver_ar, pretraining, prompt
from tests.models.small import LATENTS, assert_refused

FEW = ("full", "llp", "latte", "luna", "looped", "perceiver_ar self-short", "perceiver_ar compressed")
some_forms = pytest.mark.parametrize("make", [pytest.param(FORMS[name], id=name) for name in FEW])


@some_forms
@torch.no_grad()
def test_the_backbone_is_what_the_head_reads(make, tmp_path):
    model, tokens = make(), left_padded()["inputs"]
    mask = left_padded()["attention_mask"]
    backbone = getattr(model, model.base_model_prefix)
    assert type(backbone) is SubquadModel
    assert backbone is model.base_model is model.get_decoder()
    output = backbone(input_ids=tokens, attention_mask=mask)
    logits = model.lm_head(output.last_hidden_state)
    logits = logits if model.lookup is None else model.lookup(logits)
    assert_exact(logits, model(tokens, attention_mask=mask).logits)
    assert isinstance(output.past_key_values, SubquadCache)
    model.save_pretrained(tmp_path)
    alone = AutoModel.from_pretrained(tmp_path)
    assert type(alone) is SubquadModel
    assert_same_maths(alone(tokens, mask).last_hidden_state, output.last_hidden_state)
    alone.save_pretrained(tmp_path / "alone")
    again = AutoModel.from_pretrained(tmp_path / "alone")
    assert_same_maths(again(tokens, mask).last_hidden_state, output.last_hidden_state)
    rest = backbone(tokens[:, :1], past_key_values=output.past_key_values)
    assert rest.last_hidden_state.shape == (2, 1, 16)


@some_forms
@torch.no_grad()
def test_hidden_states_are_what_each_block_reads_and_the_last_vectors(make):
    model, tokens, mask = make(), left_padded()["inputs"], left_padded()["attention_mask"]
    read, hooks = [], []
    for block in model.decoder.blocks():
        hooks.append(block.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])))
    output = model(tokens, output_hidden_states=True)
    assert len(output.hidden_states) == len(read) + 1 == model.config.num_layers * model.config.loops + 1
    for found, expected in zip(output.hidden_states, read, strict=False):
        assert_exact(found, expected)
    assert_exact(output.hidden_states[-1], model.model(tokens).last_hidden_state)
    assert model(tokens).hidden_states is None
    model.config.output_hidden_states = True
    padded = model(tokens, attention_mask=mask, use_cache=False).hidden_states
    alone = model(tokens[1:, mask[1].bool()]).hidden_states
    for found, expected in zip(padded, alone, strict=True):
        kept = min(found.shape[1], expected.shape[1])
        assert_same_maths(found[1:, -kept:], expected[:, -kept:])


@torch.no_grad()
def test_vectors_take_the_place_of_tokens():
    for make in (partial(language_model, "latte", embedding_scale=2.0), partial(language_model, "llp")):
        model, tokens, mask = make(), left_padded()["inputs"], left_padded()["attention_mask"]
        vectors = model.get_input_embeddings()(tokens)
        for named in ({}, {"attention_mask": mask}, {"doc_ids": torch.arange(8)[None].expand(2, -1) // 3}):
            assert_exact(model(inputs_embeds=vectors, **named).logits, model(tokens, **named).logits)
        found = model.generate(inputs_embeds=vectors, attention_mask=mask, max_new_tokens=4, do_sample=False)
        whole = model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
        assert_exact(found, whole[:, 8:])
    loss = model.train()(inputs_embeds=vectors.requires_grad_(), labels=tokens).loss
    with torch.enable_grad():
        loss = model(inputs_embeds=vectors.detach().requires_grad_(), labels=tokens).loss
    assert_same_maths(loss, model(tokens, labels=tokens).loss)
    assert_refused(
        (lambda: model(inputs_embeds=vectors[..., :5]), ValueError, r"vectors .* must have shape \[B, T, 16\]"),
        (lambda: perceiver_ar()(inputs_embeds=vectors), ValueError, "perceiver_ar reads tokens, .* no vectors"),
    )


def classifier_of(model, folder, **fields):
    model.save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, **fields).double().eval()


@some_forms
def test_a_sequence_is_labelled_by_its_last_real_token(make, tmp_path):
    model, tokens = make(), prompt(3, 7)
    labelling = classifier_of(model, tmp_path, num_labels=3, pad_token_id=0)
    assert type(labelling) is SubquadForSequenceClassification
    assert_exact(labelling.get_input_embeddings().weight, model.get_input_embeddings().weight)
    alone = labelling(tokens).logits
    vectors = labelling.model(tokens).last_hidden_state[:, -1]
    assert_exact(alone, vectors @ labelling.score.weight.mT)
    ones, zeros = torch.ones_like(tokens), torch.zeros(3, 2, dtype=torch.long)
    right, left = torch.cat([tokens, zeros], 1), torch.cat([zeros, tokens], 1)
    assert_same_maths(labelling(right, attention_mask=torch.cat([ones, zeros], 1)).logits, alone)
    assert_same_maths(labelling(left, attention_mask=torch.cat([zeros, ones], 1)).logits, alone)
    assert_same_maths(labelling(right).logits, alone, "padding by its token")
    labelling.save_pretrained(tmp_path / "labelling")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "labelling")
    assert_same_maths(again.double()(tokens).logits, alone)


def test_losses_of_labels_values_and_several_labels(tmp_path):
    model, tokens = language_model(), prompt(3, 7)
    classes = classifier_of(model, tmp_path, num_labels=3)
    logits, labels = classes(tokens).logits, torch.tensor([2, 0, 1])
    assert_same_maths(classes(tokens, labels=labels).loss, F.cross_entropy(logits, labels))
    several = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    both = classifier_of(model, tmp_path, num_labels=3, problem_type="multi_label_classification")
    logits = both(tokens).logits
    assert_same_maths(both(tokens, labels=several).loss, F.binary_cross_entropy_with_logits(logits, several))
    values = classifier_of(model, tmp_path, num_labels=1)
    wanted = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    output = values(tokens, labels=wanted, output_hidden_states=True)
    assert_same_maths(output.loss, (output.logits[:, 0] - wanted).square().mean())
    assert len(output.hidden_states) == 3
    loss, logits = values(tokens, labels=wanted, return_dict=False)
    assert_exact(loss, output.loss)


def test_tokens_are_labelled_each(tmp_path):
    model, tokens = language_model(), prompt(2, 7)
    model.save_pretrained(tmp_path)
    tagging = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=4).double().eval()
    assert type(tagging) is SubquadForTokenClassification
    labels = torch.tensor([[0, 1, 2, 3, -100, 0, 1]] * 2)
    output = tagging(tokens, labels=labels)
    assert output.logits.shape == (2, 7, 4)
    assert_exact(output.loss, F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten()))
    changed = tokens.clone()
    changed[:, 5] += 1
    assert_exact(tagging(changed).logits[:, :5], output.logits[:, :5], "tokens see no later ones")
    with pytest.raises(ValueError, match="token classification needs a vector of each token"):
        SubquadForTokenClassification(perceiver_ar().config)


def test_weights_that_are_missing_from_a_classifiers_own_folder_are_refused(tmp_path):
    labelling = classifier_of(language_model(), tmp_path / "model", num_labels=3)
    labelling.save_pretrained(tmp_path / "labelling")
    with pytest.raises(ValueError, match=r"unexpected keys: score\.weight"):
        SubquadForCausalLM.from_pretrained(tmp_path / "labelling")
    file = tmp_path / "labelling" / "model.safetensors"
    weights = load_file(file)
    save_file({name: w for name, w in weights.items() if name != "score.weight"}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: score\.weight"):
        SubquadForSequenceClassification.from_pretrained(tmp_path / "labelling")


def test_the_tables_by_which_transformers_and_peft_decide():
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert causal["subquad"] == SubquadForCausalLM.__name__, "the Trainer shifts labels for these names"
    assert language_model(lookup=4).get_output_embeddings() is None, "a look-up follows the head"
    for name, tied in (("latte", True), ("gla", False), ("elita", True)):
        model = language_model(name, tie_embeddings=tied).float()
        assert model.get_output_embeddings() is model.lm_head
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        adapted = put_adapter(model, peft.LoraConfig(task_type="CAUSAL_LM"))
        factors = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
        assert {name.split(".lora_A")[0].rpartition(".")[2] for name in factors} <= {"query", "value"}
        assert len(factors) >= 2


def test_the_smoothed_loss_of_the_trainer_is_that_of_the_next_tokens(tmp_path):
    model, tokens = language_model(), prompt(2, 9)
    arguments = transformers.TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, arguments)
    loss = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens})
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    exact = F.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.1)
    plain = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), label_smoothing=0.1)
    assert_in_budget(loss, plain, exact, torch.float32)  # the Trainer's smoothing rounds to float32


def test_stop_strings_and_lengths_are_transformers_own(tmp_path):
    own = load_tokenizer("bytes")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
    model = language_model(vocab_size=own.get_vocab_size())
    named = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    whole = model.generate(prompt()[:1], **named)[0, 8:].tolist()
    last = next(token for token in whole[3:] if token < 128)
    stop = tokenizer.decode(last)
    found = model.generate(prompt()[:1], **named, stop_strings=[stop], tokenizer=tokenizer)[0, 8:].tolist()
    assert found == whole[: whole.index(last) + 1]
    assert model.config.max_position_embeddings == model.config.max_positions


def test_what_is_not_there_is_named():
    model, tokens = language_model(), prompt()
    right = {"attention_mask": torch.tensor([[1] * 8, [1] * 6 + [0] * 2]), "max_new_tokens": 2}
    other = {"past_key_values": DynamicCache(), "max_new_tokens": 2}
    assert_refused(
        (lambda: model.generate(tokens, **right), ValueError, r"with padding in rows \[1\], .*padding_side='left'"),
        (lambda: model.generate(tokens, **other), TypeError, "subquad.hf.SubquadCache, got Dyn"),
        (lambda: model.generate(tokens, widht=3, max_new_tokens=2), ValueError, "widht"),
        (lambda: model(tokens, widht=3), TypeError, "widht"),
        (lambda: model.generate_batch([[1, 2]]), ValueError, "generate_batch keeps keys and values in pages"),
        (lambda: model.set_attn_implementation("sdpa"), ValueError, "attn_implementation='sdpa' is for transformers'"),
        (lambda: SubquadConfig(attention="window", width=8), ValueError,
         r"width=8 is an option of attention 'window': write options=\{'window': \{'width': 8\}\}"),
        (lambda: SubquadConfig(attention="latte", width=8), ValueError, "width=8 is an option of attention '"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_2' is for transformers' models"):
        AutoModelForCausalLM.from_config(model.config, attn_implementation="flash_attention_2")


def test_saved_folders_name_the_classes_for_programs_that_know_transformers_alone(tmp_path):
    model = language_model("latte")
    model.save_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert named["AutoModelForCausalLM"] == "modeling_subquad.SubquadForCausalLM"
    assert_same_maths(AutoModelForCausalLM.from_pretrained(tmp_path)(prompt()).logits, model(prompt()).logits)
    assert "pip install subquad" in (tmp_path / "modeling_subquad.py").read_text()
    assert type(AutoConfig.from_pretrained(tmp_path)) is SubquadConfig


@pytest.mark.slow
def test_a_program_that_knows_transformers_alone_finds_the_classes(tmp_path):
    language_model("latte").save_pretrained(tmp_path)
    code = (
        "from transformers import AutoModel, AutoModelForCausalLM as A\n"
        f"m = A.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)\n"
        f"b = AutoModel.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)\n"
        "print(type(m).__module__, type(b).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "subquad.hf.model SubquadModel\n", done.stderr[-300:]


def test_a_perceiver_gives_vectors_of_its_latents():
    model, tokens = perceiver_ar(), prompt(2, 11)
    assert model.model(tokens).last_hidden_state.shape == (2, LATENTS, 16)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="hidden states"):
        model(tokens[:, :1], past_key_values=cache, output_hidden_states=True)


def test_a_resized_backbone_and_classifier_know_their_vocabulary():
    backbone = language_model("llp").model
    classifier = SubquadForSequenceClassification(language_model("llp").config)
    for model in (backbone, classifier):
        model.resize_token_embeddings(30, mean_resizing=False)
    assert backbone.decoder.config.vocab_size == classifier.model.decoder.config.vocab_size == 30
    assert backbone.decoder.config_hash == classifier.model.decoder.config_hash
    with pytest.raises(ValueError, match='the mask token of objective="denoise" is the table\'s last row'):
        pretraining().resize_token_embeddings(30)


def test_weights_are_read_from_a_subfolder_and_without_a_folder(tmp_path):
    model = language_model("llp")
    model.save_pretrained(tmp_path / "inner")
    again = SubquadForCausalLM.from_pretrained(tmp_path, subfolder="inner")
    given = SubquadForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    for other in (again, given):
        assert_exact(other(prompt()).logits, model(prompt()).logits)
