"""Families of transformers: every field of their configurations, buffers of old checkpoints, and other families."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from subquad.hf import from_transformers
from subquad.hf.families import FAMILIES
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.test_transfer import ROPES, TOKENS, all_float64, rotated, theirs

TEXT = TOKENS[:, :24]
SMALLEST = {
    "mistral": {"sliding_window": 7},
    "ministral": {"sliding_window": 7},
    "mamba2": {"chunk_size": 8},
    "granitemoehybrid": {"mamba_chunk_size": 8},
    "bamba": {"mamba_chunk_size": 8},
    "gpt_neox": rotated(partial_rotary_factor=0.4),
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}
"""Changes to a family's first case of `test_transfer.CASES`, where its own fields matter."""
CASES = {"granitemoehybrid": "granite", "qwen3_5_text": "qwen3_5"}
"""Names of first cases that are not the family's."""
OTHER = {
    "activation_function": "relu",
    "attn_layer_indices": [0, 2],
    "attention_multiplier": 0.5,
    "embd_pdrop": 0.3,
    "hidden_act": "relu",
    "linear_num_key_heads": 1,
    "mamba_n_groups": 3,
    "max_window_layers": 0,
    "mlp_only_layers": [0],
    "n_groups": 3,
    "n_inner": 36,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "position_embedding_type": "rope",
    "reorder_and_upcast_attn": True,
    "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.35} | ROPES["linear"],
    "sliding_window": 5,
    "time_step_limit": (0.01, 0.06),
}
"""Values of fields that twice the family's value, or its opposite, would not try."""
TOGETHER = {
    "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "layer_types", "num_attention_heads",
    "n_head", "num_heads", "head_dim", "expand", "mamba_n_heads", "mamba_d_head", "mamba_expand",
    "linear_num_value_heads",
}  # fmt: skip
"""Sizes that must fit each other; the cases of `test_transfer` differ in them."""
WITHOUT_LOGITS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "num_logits_to_keep", "classifier_dropout",
    "initializer_range", "rescale_prenorm_residual", "z_loss_coefficient", "time_step_rank", "time_step_min",
    "time_step_max", "time_step_floor", "output_router_logits", "router_aux_loss_coef", "num_experts_per_tok",
    "norm_topk_prob", "moe_intermediate_size", "shared_expert_intermediate_size",
}  # fmt: skip
"""Fields of losses, of classifiers, of new weights, and of the experts that our families are without."""


def other(name, value):
    """A value of a field that differs from `value`."""
    if name in OTHER:
        return OTHER[name]
    return not value if isinstance(value, bool) else 2 * value + (0.1 if isinstance(value, float) else 0)


@pytest.mark.parametrize("family", [
    pytest.param(name, marks=pytest.mark.slow if name in ("bamba", "granitemoehybrid", "qwen3_5_text") else [])
    for name in FAMILIES
])  # fmt: skip
@torch.no_grad()
def test_every_field_gives_equal_logits_or_is_refused_by_its_name(family, monkeypatch):
    case, changes = CASES.get(family, family), SMALLEST.get(family, {})
    kind = getattr(transformers, FAMILIES[family].model).config_class
    equal, refused = {}, {}
    with all_float64(monkeypatch):
        config = theirs(case, **changes).config
        for name in (*vars(kind)["__annotations__"], "is_causal"):
            if name in TOGETHER | WITHOUT_LOGITS or name.startswith("summary_"):
                continue
            value = other(name, getattr(config, name, True))
            model = theirs(case, **changes | {name: value}).double()
            try:
                ours = from_transformers(model)
            except ValueError as error:
                refused[f"{name}={value!r}"] = str(error)
            else:
                equal[f"{name}={value!r}"] = ours, model(TEXT).logits
    for said, (ours, expected_BTV) in equal.items():
        assert_same_maths(ours(TEXT).logits, expected_BTV, said)
    for said, message in refused.items():
        setting = "partial_rotary_factor=0.35" if said.startswith("rope_parameters") else said
        assert f"{family} with " in message
        assert setting in message
    assert len(equal) > 5
    assert "is_causal=False" in refused


def changed(folder, file, **values):
    """Write values into a JSON file of the folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(("case", "prefix", "buffers"), [
    ("gpt2", "", ("h.{}.attn.bias", "h.{}.attn.masked_bias")),
    ("gpt2", "transformer.", ("h.{}.attn.bias", "h.{}.attn.masked_bias")),
    ("gpt_neox", "gpt_neox.", ("layers.{}.attention.bias", "layers.{}.attention.masked_bias",
                               "layers.{}.attention.rotary_emb.inv_freq")),
    ("llama", "model.", ("layers.{}.self_attn.rotary_emb.inv_freq",)),
    ("mistral", "model.", ("layers.{}.self_attn.rotary_emb.inv_freq",)),
])  # fmt: skip
def test_buffers_of_old_checkpoints_are_left_out_and_other_tensors_are_not(case, prefix, buffers, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path)
    file, own = tmp_path / "model.safetensors", f"{model.base_model_prefix}."
    tensors = {name.replace(own, prefix, 1): tensor for name, tensor in load_file(file).items()}
    old = {prefix + name.format(layer): torch.ones(1, 1, 8, 8) for name in buffers for layer in (0, 1)}
    save_file(tensors | old, file, {"format": "pt"})
    assert_exact(from_transformers(tmp_path)(TEXT).logits, from_transformers(model)(TEXT).logits, case)
    weight = f"{prefix}{buffers[0].format(0).rpartition('.')[0]}.more"
    save_file(tensors | old | {weight: torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"unexpected keys: {weight}$"):
        from_transformers(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "strange"])
def test_a_folder_of_another_family_is_refused_with_the_families_that_there_are(name, tmp_path):
    theirs("llama").save_pretrained(tmp_path)
    changed(tmp_path, "config.json", model_type=name)
    with pytest.raises(
        ValueError, match=f"family '{name}'; .*valid: bamba, .*llama, mamba2, ministral, mistral, qwen2"
    ):
        from_transformers(tmp_path)


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path):
    model = theirs("ministral")
    model.save_pretrained(tmp_path)
    changed(tmp_path, "config.json", model_type="mistral")
    assert from_transformers(tmp_path).config.attention == ["window", "full"]


def test_an_attention_in_the_place_of_windows_is_refused():
    model = theirs("mistral")
    model.config.subquad = {"attention": "llp", "options": {"segment": 8}}
    with pytest.raises(
        ValueError, match="attention 'llp' in the place of full attention, but the mistral model has layer"
    ):
        from_transformers(model)
