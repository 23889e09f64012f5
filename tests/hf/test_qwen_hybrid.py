"""Qwen3.5's language model and Qwen3-Next without experts: what is refused, folders with images, decoding, export.

Logits, gradients, tensors and settings are compared in test_transfer.py.
"""

import pytest
import torch
import transformers

from subquad.generation import generate
from subquad.hf import SubquadConfig, SubquadForCausalLM, from_transformers, to_transformers
from subquad.models.build import build_model
from subquad.testing import assert_exact, assert_in_budget
from tests.hf.small import HYBRID, by_torch
from tests.hf.test_transfer import TOKENS, all_float64, rotated, theirs
from tests.models.small import assert_refused

DELTA = {"gated_delta_net": {"num_heads": 4, "num_key_heads": 2, "key_channels": 3, "value_channels": 5}}
OURS = {
    "vocab_size": 61, "dim": 22, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ff_dim": 20,
    "attention": ["gated_delta_net", "full"], "norm": "zero_centred_rms", "qk_norm": True, "rope_fraction": 0.5,
    "options": DELTA | {"full": {"output_gate": True}},
}  # fmt: skip


def test_experts_and_layers_that_rotate_nothing_are_refused():
    experts = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    some = theirs("qwen3_next", **experts, num_experts_per_tok=2, decoder_sparse_step=2)
    linear = theirs("qwen3_5", layer_types=["linear_attention"] * 4)
    other, relu = theirs("qwen3_next"), theirs("qwen3_5", hidden_act="relu")
    other.config.layer_types = [*["linear_attention"] * 3, "sliding_attention"]
    assert_refused(
        (lambda: from_transformers(some), ValueError, "qwen3_next with num_experts=4 in layer 1; num_experts must be"),
        (lambda: from_transformers(linear), ValueError, "position='rope' needs a layer that rotates"),
        (lambda: from_transformers(other), ValueError, "qwen3_next with a layer of type 'sliding_attention'; layer_ty"),
        (lambda: from_transformers(relu), ValueError, "qwen3_5_text with hidden_act='relu'"),
    )


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_tied_biases", "qwen3_next"])
def test_the_configuration_comes_back_the_same(case):
    model = theirs(case)
    back = to_transformers(from_transformers(model), model.config.model_type)
    assert back.config.to_dict() == model.config.to_dict()


def test_experts_that_no_layer_has_are_no_hindrance():
    model = theirs("qwen3_next", num_experts=4, mlp_only_layers=[0, 1, 2, 3])
    ours = from_transformers(model)
    assert to_transformers(ours, "qwen3_next").config.num_experts == 0
    with torch.no_grad():
        assert_in_budget(ours(TOKENS).logits, model(TOKENS).logits, ours.double()(TOKENS).logits, torch.float32)


def test_a_hybrid_of_ours_goes_out_and_what_the_family_lacks_is_named():
    torch.manual_seed(0)
    ours = SubquadForCausalLM(SubquadConfig(**OURS)).eval()
    model = by_torch(to_transformers(ours))
    assert model.config.model_type == "qwen3_5_text"
    assert to_transformers(ours, "qwen3_next").config.linear_num_key_heads == 2
    assert from_transformers(model).config.decoder_config().options["gated_delta_net"]["key_channels"] == 3
    with torch.no_grad():
        assert_in_budget(model(TOKENS).logits, ours(TOKENS).logits, ours.double()(TOKENS).logits, torch.float32)

    def exported(**changes):
        return lambda: to_transformers(SubquadForCausalLM(SubquadConfig(**OURS | changes)), "qwen3_5_text")

    assert_refused(
        (exported(norm="rms"), ValueError, r"norm='rms' \(it has 'zero_centred_rms'\)"),
        (exported(qk_norm=False), ValueError, r"qk_norm=False \(it has True\)"),
        (exported(options=DELTA), ValueError, "options=.*it has .*'output_gate': True"),
        (exported(dim=24, attention=["linear", "full"]), ValueError, "do not support attention 'linear'"),
    )


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
def test_a_greedy_text_is_that_of_transformers(case, monkeypatch):
    with all_float64(monkeypatch):
        model = theirs(case).double()
        expected = model.generate(TOKENS[:1, :9], max_new_tokens=24, do_sample=False, pad_token_id=0)[0, 9:].tolist()
    prompt = TOKENS[0, :9].tolist()
    assert list(generate(from_transformers(model).decoder, prompt, max_new_tokens=24, temperature=0)) == expected


def test_the_language_model_of_a_folder_with_images_is_taken(tmp_path):
    text = HYBRID | rotated(partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True)
    sight = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24,
             "num_position_embeddings": 4, "patch_size": 2}  # fmt: skip
    torch.manual_seed(0)
    model = by_torch(
        transformers.Qwen3_5ForConditionalGeneration(
            transformers.Qwen3_5Config(text_config=text, vision_config=sight, image_token_id=0, video_token_id=1)
        )
    ).eval()
    model.save_pretrained(tmp_path)
    ours = from_transformers(tmp_path)
    with torch.no_grad():
        tokens = TOKENS.clamp(min=2)
        assert_in_budget(ours(tokens).logits, model(tokens).logits, ours.double()(tokens).logits, torch.float32)


def test_a_setting_of_projections_needs_one_layer_that_has_it():
    model = build_model(SubquadConfig(**OURS).decoder_config())
    assert [block.attention.option_names() >= {"head_dim"} for block in model.blocks()] == [False, True]
    delta = SubquadConfig(**OURS | {"attention": "gated_delta_net", "position": "none", "rope_fraction": 1.0,
                                    "num_kv_heads": None, "options": DELTA}).decoder_config()  # fmt: skip
    with pytest.raises(ValueError, match="head_dim=8 has no meaning for attention 'gated_delta_net'"):
        build_model(delta)


def test_dropout_is_that_of_full_attention_alone_and_norms_begin_with_a_scale_of_one():
    ours = from_transformers(theirs("qwen3_5", attention_dropout=0.25))
    assert [block.attention.config.dropout for block in ours.decoder.blocks()] == [0.0, 0.0, 0.0, 0.25]
    assert to_transformers(ours).config.attention_dropout == 0.25
    fresh = build_model(ours.config.decoder_config())
    assert not any(p.any() for name, p in fresh.named_parameters() if name.split(".")[-2].endswith("norm"))


def test_norms_of_an_imported_model_are_its_own_weights():
    model = theirs("qwen3_next")
    ours = from_transformers(model).decoder.layers[3].attention
    assert_exact(ours.query_norm.weight, model.model.layers[3].self_attn.q_norm.weight)
    assert ours.key_norm.eps == model.config.rms_norm_eps
