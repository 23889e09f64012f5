"""Scaled positions, and adapters with embeddings and norms on transformers models."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen3Config, T5Config

from subquad.adaptation import extended
from subquad.hf import SubquadConfig, SubquadForCausalLM, lora
from subquad.testing import assert_exact, assert_in_budget
from tests.models.small import assert_refused

# PEFT asks transformers for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
VOCABULARY, OWN = 24, 16
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": OWN,
}  # fmt: skip
TOKENS = torch.randint(0, VOCABULARY, (2, 4 * OWN), generator=torch.Generator().manual_seed(1))


def llama(**changes):
    return LlamaConfig(**{**SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": True} | changes)


CONFIGS = {
    "llama": llama(),
    "llama, untied": llama(tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
    "gpt-neox": GPTNeoXConfig(**SHAPE),
}


def save(name, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


def adapter(name, home, **changes):
    """An extension whose every trained tensor differs from the original's, and its folder."""
    base = save(name, home / "base")
    config = extended.scale_positions(AutoConfig.from_pretrained(base), 4 * OWN, "linear")
    wanted = {"rank": 2, "alpha": None, "dropout": 0.0, "embeddings": True, "norms": True} | changes
    adapted = extended.adapt(extended.load_original(base, config), base=lora.Base.of(base), **wanted)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    lora.save_adapter(adapted, home / "run")
    config.save_pretrained(home / "run")
    return adapted, home / "run"


def frequencies(config):
    return AutoModelForCausalLM.from_config(config).model.rotary_emb


def test_ntk_scaling_divides_the_lowest_frequency_and_keeps_the_highest():
    scaled, size = extended.scale_positions(llama(), 64, "ntk"), 8
    thetas = [torch.tensor(config.rope_parameters["rope_theta"]).double() for config in (llama(), scaled)]
    before, after = (theta ** (-torch.arange(0, size, 2).double() / size) for theta in thetas)
    assert_exact(after[0], before[0])
    assert_in_budget(after[-1], (before[-1] / 4).float(), before[-1] / 4, torch.float32)  # theta is float32
    assert all((after[1:-1] < before[1:-1]) & (after[1:-1] > before[1:-1] / 4))
    assert_in_budget(frequencies(scaled).inv_freq, after.float(), after, torch.float32)


def test_linear_yarn_and_dynamic_are_those_of_transformers():
    given = llama()
    linear, yarn, dynamic = (extended.scale_positions(given, 64, name) for name in ("linear", "yarn", "dynamic"))
    assert given.rope_parameters["rope_type"] == "default", "the given configuration stays as it was"
    plain = frequencies(llama()).inv_freq
    assert_exact(frequencies(linear).inv_freq, plain / 4)
    assert yarn.rope_parameters == {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": OWN,
    }  # fmt: skip
    assert all((frequencies(yarn).inv_freq <= plain) & (frequencies(yarn).inv_freq >= plain / 4))
    assert frequencies(yarn).attention_scaling > 1
    assert (dynamic.max_position_embeddings, dynamic.rope_parameters["rope_type"]) == (OWN, "dynamic")


@pytest.mark.parametrize(("config", "length", "scaling", "match"), [
    (llama(), OWN, "linear", "length=16 must be above the model's own max_position_embeddings=16"),
    (llama(), 64, "alibi", "unknown scaling of positions 'alibi'; valid: linear, ntk, yarn, dynamic"),
    (GPT2Config(), 64, "linear", "only rotary positions, the same in all layers, can be scaled, and GPT2Config has no"),
    (extended.scale_positions(llama(), 64, "linear"), 99, "ntk", r"are already scaled \(rope_type='linear'\)"),
    (llama(max_position_embeddings=1), 64, "ntk", "max_position_embeddings of LlamaConfig must be .* 2, got 1"),
    (llama(head_dim=2), 64, "ntk", "ntk needs at least 4 rotary channels a head, this model has 2; use linear"),
])  # fmt: skip
def test_impossible_scalings_are_refused(config, length, scaling, match):
    with pytest.raises(ValueError, match=match):
        extended.scale_positions(config, length, scaling)


def test_folders_without_a_transformers_model_are_refused(tmp_path):
    ours = SubquadForCausalLM(SubquadConfig(vocab_size=8, dim=8, num_layers=1, num_heads=1, attention="full"))
    ours.save_pretrained(tmp_path / "ours")
    _, run = adapter("llama", tmp_path)
    find, missing = extended.find_model, FileNotFoundError
    assert_refused(
        (lambda: find("nowhere/at-all"), missing, "there is no folder nowhere/at-all, and the hub gives no model"),
        (lambda: find(str(tmp_path)), missing, r"holds no config\.json: it is not a transformers model"),
        (lambda: find(str(tmp_path / "ours")), ValueError, r"holds a subquad model.*subquad export"),
        (lambda: find(str(run)), ValueError, "holds an adapter, not a whole model"),
        (lambda: extended.open_extension(tmp_path / "base"), missing, "holds no extension"),
    )


def test_weights_that_do_not_fit_are_an_error(tmp_path):
    base = save("llama", tmp_path / "base")
    deep, wide = (AutoConfig.from_pretrained(base) for _ in range(2))
    deep.num_hidden_layers, wide.vocab_size = 3, 10**9
    load, linear = extended.load_original, torch.nn.Linear(2, 2)
    assert_refused(
        (lambda: load(base, deep), ValueError, r"weights are missing: model\.layers\.2"),
        (lambda: load(base, wide), ValueError, r"weights do not fit .*: model\.embed_tokens\.weight has shape"),
        (lambda: load(base, T5Config()), ValueError, "Unrecognized configuration class"),
        (lambda: extended.projections(linear), ValueError, "Linear has no linear layer to adapt in a module named at"),
    )


def test_factors_in_attention_embeddings_and_norms_are_trained(tmp_path):
    adapted, _ = adapter("qwen3", tmp_path)
    trains = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trains if "lora_" in name}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    whole = {name.split(".modules_to_save")[0].rpartition(".")[2] for name in trains if "lora_" not in name}
    norms = {"norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
    assert whole == {"embed_tokens", *norms}
    factors_alone, _ = adapter("qwen3", tmp_path / "alone", embeddings=False, norms=False)
    assert all("lora_" in name for name, parameter in factors_alone.named_parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_reads_the_folder_too_and_the_merged_model_is_the_same(name, tmp_path):
    adapted, run = adapter(name, tmp_path)
    expected = logits(adapted)
    opened = extended.open_extension(run)
    assert_exact(logits(opened), expected)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=AutoConfig.from_pretrained(run))
    assert_exact(logits(PeftModel.from_pretrained(original, run)), expected)
    merged = lora.merge(opened)
    merged_logits = logits(merged)
    assert_in_budget(merged_logits, expected, logits(extended.open_extension(run).double()), torch.float32)
    merged.save_pretrained(tmp_path / "merged")
    assert_exact(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), merged_logits)
    if merged.config.tie_word_embeddings:
        assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_the_original_may_have_moved_but_must_have_the_same_weights(tmp_path):
    adapted, run = adapter("llama", tmp_path)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="which is not there"):
        extended.open_extension(run)
    assert_exact(logits(extended.open_extension(run, tmp_path / "moved")), logits(adapted))
    save("llama, untied", tmp_path / "other")
    with pytest.raises(ValueError, match="was trained on other weights"):
        extended.open_extension(run, tmp_path / "other")
    assert json.loads((run / "adapter_config.json").read_text())["ensure_weight_tying"] is True
