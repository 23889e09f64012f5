"""Models of transformers as ours, and back: logits, tensors, gradients, and what is refused."""

import json
from contextlib import contextmanager

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from subquad import hf
from subquad.hf import SubquadCache, SubquadConfig, SubquadForCausalLM, from_transformers, to_transformers
from subquad.hf.families import FAMILIES, rope
from subquad.hf.pattern_attention import OPTIONS
from subquad.hf.transfer import canonical
from subquad.layers.feedforward import build_feedforward
from subquad.layers.scaling import RopeScaling
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from tests.hf.small import HYBRID, by_torch, positions
from tests.models.small import assert_refused

NEOX = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
SMALL = NEOX | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
MAMBA2 = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 8, "state_size": 5,
    "n_groups": 2, "initializer_range": 0.2,
}  # fmt: skip
GRANITE = SMALL | {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
    "shared_intermediate_size": 40, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_n_groups": 2,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 7.0, "attention_multiplier": 0.3,
    "position_embedding_type": "nope",
}  # fmt: skip
BAMBA = SMALL | {
    "num_hidden_layers": 3, "attn_layer_indices": [1], "num_attention_heads": 2, "num_key_value_heads": 1,
    "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_n_groups": 2, "pad_token_id": None,
}  # fmt: skip
HYBRID_TOO = HYBRID | {
    "hidden_size": 26, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
}  # fmt: skip
DENSE = HYBRID | {"num_experts": 0}
DENSE_TOO = DENSE | {"linear_num_key_heads": 1, "layer_types": ["full_attention", "linear_attention"] * 2}
ORIGINAL = "original_max_position_embeddings"
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16},
    "yarn_all": {
        "rope_type": "yarn", "factor": 8.0, ORIGINAL: 8, "beta_fast": 4.0, "beta_slow": 2.0, "mscale": 0.7,
        "mscale_all_dim": 0.3, "truncate": False,
    },
    "llama3": {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip
TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
TIED, UNTIED, BIASES = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"attention_bias": True}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
SERIAL = TIED | {"use_parallel_residual": False, "attention_bias": False}


def rotated(base=1e4, **values):
    return {"rope_parameters": {"rope_theta": base, **values}}


CASES = {
    "llama": ("LlamaForCausalLM", SMALL),
    "llama_tied_biases": ("LlamaForCausalLM", SMALL | TIED | BIASES | {"mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama_head_dim": ("LlamaForCausalLM", SMALL | {"head_dim": 10, "num_key_value_heads": 1}),
    **{f"llama_{name}": ("LlamaForCausalLM", SMALL | rotated(500.0, **rope)) for name, rope in ROPES.items()},
    "mistral": ("MistralForCausalLM", SMALL | {"sliding_window": 7, "head_dim": 10}),
    "mistral_full": ("MistralForCausalLM", SMALL | TIED | {"sliding_window": None}),
    "ministral": ("MinistralForCausalLM", SMALL | BOTH | {"sliding_window": 9, "head_dim": 6}),
    "qwen2": ("Qwen2ForCausalLM", SMALL),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        SMALL | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "qwen2_tied": ("Qwen2ForCausalLM", SMALL | TIED | {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", SMALL | {"head_dim": 8}),
    "qwen3_windows": (
        "Qwen3ForCausalLM",
        SMALL | BOTH | {"use_sliding_window": True, "sliding_window": 9, "head_dim": 8},
    ),
    "qwen3_biases": ("Qwen3ForCausalLM", SMALL | TIED | BIASES | {"head_dim": 6}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2_untied": ("GPT2LMHeadModel", GPT2 | UNTIED | {"n_inner": 36, "activation_function": "gelu"}),
    "gpt_neox": ("GPTNeoXForCausalLM", NEOX | rotated(partial_rotary_factor=0.4)),
    "gpt_neox_serial": ("GPTNeoXForCausalLM", NEOX | SERIAL | rotated(partial_rotary_factor=1.0)),
    "qwen3_5": ("Qwen3_5ForCausalLM", HYBRID | rotated(partial_rotary_factor=0.5)),
    "qwen3_5_tied_biases": ("Qwen3_5ForCausalLM", HYBRID_TOO | BIASES | rotated(500.0, partial_rotary_factor=1.0)),
    "qwen3_next": ("Qwen3NextForCausalLM", DENSE | rotated(partial_rotary_factor=0.5)),
    "qwen3_next_yarn": ("Qwen3NextForCausalLM", DENSE_TOO | rotated(500.0, **ROPES["yarn"], partial_rotary_factor=0.5)),
    "mamba2": ("Mamba2ForCausalLM", MAMBA2),
    "mamba2_tied": (
        "Mamba2ForCausalLM",
        MAMBA2
        | TIED
        | {"use_bias": True, "time_step_limit": (0.01, 0.06), "layer_norm_epsilon": 1e-3, "conv_kernel": 3},
    ),
    "bamba": ("BambaForCausalLM", BAMBA),
    "bamba_biases": (
        "BambaForCausalLM",
        BAMBA | TIED | BIASES | rotated(500.0, partial_rotary_factor=1.0) | {"mlp_bias": True, "rms_norm_eps": 1e-3},
    ),
    "granite": ("GraniteMoeHybridForCausalLM", GRANITE),
    "granite_rope": (
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | TIED
        | BIASES
        | rotated(500.0, rope_type="default")
        | {
            "mamba_proj_bias": True,
            "time_step_limit": (1.0, 1.4),
            "position_embedding_type": "rope",
            "rms_norm_eps": 1e-3,
            "attention_multiplier": 6**-0.5,
        },
    ),
}


@contextmanager
def all_float64(monkeypatch):
    """Within the block, what transformers computes in float32 whatever the model's dtype, it computes in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def theirs(case, **changes):
    """A model of transformers with random weights, norms and biases too."""
    torch.manual_seed(0)
    name, values = CASES[case]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**values | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return by_torch(model).eval()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case, monkeypatch):
    with all_float64(monkeypatch):
        model = theirs(case).double()
        expected = model(TOKENS, labels=TOKENS)
        expected.loss.backward()
    ours = from_transformers(model)
    actual = ours(TOKENS, labels=TOKENS)
    actual.loss.backward()
    assert_same_maths(actual.logits, expected.logits, case)
    gradients = {name: parameter.grad for name, parameter in ours.decoder.named_parameters()}
    theirs_too = {name: parameter.grad for name, parameter in model.named_parameters()}
    family = FAMILIES[model.config.model_type]
    for move in family.moves(canonical(ours.config.decoder_config())):
        for name, gradient in zip(move.ours, move.cut(theirs_too[move.theirs]), strict=True):
            assert_same_maths(gradients.pop(name), gradient, name)
    if "head.weight" in gradients:
        assert_same_maths(gradients.pop("head.weight"), theirs_too[family.head], "head")
    assert not gradients, "every parameter has been compared"
    assert all(bool(p.grad.any()) for p in ours.parameters() if p.numel() > 24)


@pytest.mark.parametrize("case", [
    "llama", "mistral", "ministral", "qwen3", "gpt2", "gpt_neox", "mamba2", "granite", "qwen3_5", "qwen3_next",
])  # fmt: skip
@torch.no_grad()
def test_padding_and_the_cache_give_the_logits_of_transformers(case, monkeypatch):
    mask_BT = torch.ones(2, 40, dtype=torch.int64)
    mask_BT[0, :7] = 0
    with all_float64(monkeypatch):
        model = theirs(case).double()
        places = {} if case.startswith("mamba") else {"position_ids": positions(mask_BT)}
        expected_BTV = model(TOKENS, attention_mask=mask_BT, **places).logits
    ours, cache, parts = from_transformers(model), SubquadCache(), []
    for start, stop in ((0, 30), *((t, t + 1) for t in range(30, 40))):
        known = {"attention_mask": mask_BT[:, :stop], "past_key_values": cache}
        parts.append(ours(TOKENS[:, start:stop], **known).logits)
    real = mask_BT.bool()
    assert_same_maths(ours(TOKENS, attention_mask=mask_BT).logits[real], expected_BTV[real], "whole")
    assert_same_maths(torch.cat(parts, 1)[real], expected_BTV[real], "cached")


@pytest.mark.parametrize("case", ["llama_yarn", "mistral", "qwen2", "gpt2", "gpt_neox", "mamba2", "granite", "qwen3_5"])
@torch.no_grad()
def test_float32_logits_are_as_near_to_the_exact_ones_as_those_of_transformers(case):
    model = theirs(case)
    ours = from_transformers(model)
    actual, plain = ours(TOKENS).logits, model(TOKENS).logits
    assert_in_budget(actual, plain, ours.double()(TOKENS).logits, torch.float32, case)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_there_and_back_gives_the_same_tensors_and_settings(case, tmp_path):
    model = theirs(case)
    ours = from_transformers(model)
    back = to_transformers(ours, model.config.model_type)
    assert type(back) is type(model)
    fitting = to_transformers(ours).config.model_type  # the first family that fits
    earlier = {"mistral_full": "llama", "qwen3_next": "qwen3_5_text", "qwen3_next_yarn": "qwen3_5_text"}
    assert fitting == earlier.get(case, model.config.model_type)
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert_exact(after[name], tensor, name)
    assert_exact(back(TOKENS).logits, model(TOKENS).logits, case)
    back.save_pretrained(tmp_path)
    assert from_transformers(tmp_path).config.decoder_config() == ours.config.decoder_config()


def test_a_decoder_of_ours_goes_to_llama():
    torch.manual_seed(0)
    config = SubquadConfig(vocab_size=61, dim=24, num_layers=2, num_heads=4, attention="full", feedforward="swiglu")
    ours = SubquadForCausalLM(config).eval()
    model = to_transformers(ours)
    assert model.config.model_type == "llama"
    with torch.no_grad():
        actual, plain = model(TOKENS).logits, ours(TOKENS).logits
        assert_in_budget(actual, plain, ours.double()(TOKENS).logits, torch.float32)


def test_a_hybrid_of_ours_goes_to_granite():
    torch.manual_seed(0)
    config = SubquadConfig(
        vocab_size=61, dim=24, num_layers=4, num_heads=4, num_kv_heads=2, attention=["mamba2", "full"], position="none",
        norm_eps=1e-5, options={"mamba2": {"num_heads": 6, "state_channels": 5}, "latte": {}},
    )  # fmt: skip
    ours = SubquadForCausalLM(config).eval()
    model = to_transformers(ours)
    assert model.config.model_type == "granitemoehybrid"
    with torch.no_grad():
        actual, plain = model(TOKENS).logits, ours(TOKENS).logits
        assert_in_budget(actual, plain, ours.double()(TOKENS).logits, torch.float32)


@pytest.mark.parametrize(("case", "changes", "message"), [
    ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop=0.3"),
    ("mamba2", {"use_conv_bias": False}, "mamba2 with use_conv_bias=False; use_conv_bias must be True"),
    ("mamba2", {"hidden_act": "gelu"}, "mamba2 with hidden_act='gelu'"),
    ("granite", {"num_local_experts": 2}, "granitemoehybrid with num_local_experts=2; num_local_experts must be 0"),
    ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    ("granite", {"mamba_conv_bias": False}, "mamba_conv_bias=False"),
    ("granite", {"head_dim": 8}, "head_dim=8; head_dim must be 6"),
])  # fmt: skip
def test_settings_that_our_decoder_does_not_have_are_named(case, changes, message):
    with pytest.raises(ValueError, match=message):
        from_transformers(theirs(case, **changes))


@pytest.mark.parametrize(("change", "message"), [
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5; it"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "a layer of type 'chunked_attention'; layer_types must"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding attention and sliding_window=None; sliding_w"),
    ({"is_causal": False}, "qwen3 with is_causal=False; is_causal must be True"),
    ({"rms_norm_eps": 0.0}, r"qwen3 with rms_norm_eps=0\.0; rms_norm_eps must be above 0"),
    ({"attention_dropout": 1.0}, r"with attention_dropout=1\.0; attention_dropout must be at least 0 and below 1"),
    ({"tie_word_embeddings": True}, r"should be tied, but 'lm_head\.weight' differs from its table"),
])  # fmt: skip
def test_settings_changed_after_the_model_was_made_are_named(change, message):
    model = theirs("qwen3")
    for name, value in change.items():
        setattr(model.config, name, value | {"rope_theta": 1e4} if isinstance(value, dict) else value)
    with pytest.raises(ValueError, match=message):
        from_transformers(model)


@pytest.mark.parametrize(("changes", "message"), [
    ({"attention": "llp"}, "do not support attention 'llp', only 'full', 'gated_delta_net', 'mamba2', 'window'"),
    ({"attention": "window", "options": {"window": {"sinks": 4}}}, r"mistral: options=\{'window': \{'sinks': 4\}"),
    ({"attention": "mamba2", "position": "none"}, "llama: it has no attention 'mamba2'; .*ff_dim=64"),
    ({"feedforward": "bilinear"}, "feedforward='bilinear'"),
    ({"loops": 2}, "loops=2"),
    ({"lookup": 8}, "lookup=8"),
    ({"norm_position": "post"}, "norm_position='post'"),
    ({"head_bias": True}, "head_bias=True"),
    ({"feedforward": "relu"}, "feedforward='relu'"),
    ({"position": "sinusoidal"}, "position='sinusoidal'"),
])  # fmt: skip
def test_settings_that_transformers_does_not_have_are_named(changes, message):
    values = {"vocab_size": 61, "dim": 24, "num_layers": 2, "num_heads": 4, "attention": "full", **changes}
    with pytest.raises(ValueError, match=message):
        to_transformers(SubquadForCausalLM(SubquadConfig(**values)))


def test_other_models_families_and_names_are_refused(tmp_path):
    bert = transformers.BertConfig(hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=24)
    llama, wrong_type = transformers.LlamaModel(transformers.LlamaConfig(**SMALL)), "must be a LlamaForCausalLM, got Ll"
    nowhere = "nowhere/at-all"
    model, ours = theirs("llama"), from_transformers(theirs("llama"))
    assert_refused(
        (lambda: from_transformers(llama), ValueError, wrong_type),
        (lambda: from_transformers(transformers.BertModel(bert)), ValueError, "not support models of family 'bert'"),
        (lambda: from_transformers(3), TypeError, "must be a model of transformers"),
        (lambda: from_transformers(nowhere), FileNotFoundError, "there is no folder nowhere/at-all, and the hub gives"),
        (lambda: from_transformers(tmp_path), FileNotFoundError, r"holds no config\.json, so it is not the folder of"),
        (lambda: to_transformers(ours, "qwen3"), ValueError, "qk_norm=False"),
        (lambda: to_transformers(ours, "lama"), ValueError, "unknown family 'lama'; did you mean 'llama'"),
        (lambda: to_transformers(model), TypeError, "must be a SubquadForCausalLM"),
        (lambda: build_feedforward("bilinear", 4, hidden=8), ValueError, "'bilinear' has no hidden width of its own"),
    )


def test_a_folder_with_tensors_missing_or_left_over_is_refused(tmp_path, capsys):
    theirs("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        from_transformers(tmp_path)
    save_file({**tensors, "more": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="unexpected keys: more"):
        from_transformers(tmp_path)
    assert "LOAD REPORT" not in capsys.readouterr().err, "the error says it"


@pytest.mark.parametrize(("change", "message"), [
    ({"rope_type": "linaer"}, "does not support llama with rope_type='linaer'; did you mean 'linear'"),
    ({"factor": "2"}, "the rope parameter 'factor' of llama must be a number, got '2'"),
    ({"factr": 2.0}, "llama has the rope parameter 'factr'; did you mean 'factor'"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_wrong_rope_parameters_are_refused_before_a_model_is_made(change, message, tmp_path):
    theirs("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"] |= change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        from_transformers(tmp_path)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name, monkeypatch):
    rope = {"rope_theta": 500.0, **ROPES[name]}
    config = transformers.LlamaConfig(**{**SMALL, "head_dim": 12, "rope_parameters": rope})
    length = 96 if name == "dynamic" else None
    with all_float64(monkeypatch):
        init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        expected, amplitude = init(config, torch.device("cpu"), seq_len=length)
    values = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    original = values.pop(ORIGINAL, 64 if name == "dynamic" else None)
    scaling = RopeScaling.from_dict({"kind": rope["rope_type"], "original": original, "length": length, **values})
    assert_same_maths(torch.tensor(scaling.frequencies(12, 500.0), dtype=torch.float64), expected)
    assert_same_maths(torch.tensor([scaling.amplitude]).double(), torch.tensor([amplitude]).double())


def test_zeros_in_yarn_are_its_defaults():
    plain, zeros = ROPES["yarn"], dict.fromkeys(("mscale", "mscale_all_dim", "beta_fast", "beta_slow"), 0)
    read = [rope.read(transformers.LlamaConfig(**SMALL, **rotated(**values))) for values in (plain, plain | zeros)]
    assert read[0] == read[1]


def test_more_end_tokens_of_generation_than_the_configurations_are_kept():
    model = theirs("llama")
    model.generation_config.eos_token_id = [2, 5]
    assert from_transformers(model).generation_config.eos_token_id == [2, 5]


def test_yarn_without_a_factor_has_that_of_the_positions():
    values = ROPES["yarn"] | {"factor": None}  # 64 positions for the 16 trained on
    assert rope.read(transformers.LlamaConfig(**SMALL, **rotated(**values)))["rope_scaling"]["factor"] == 4


def test_tensors_that_are_not_all_used_or_misshapen_are_refused():
    more, fewer, other = theirs("llama"), theirs("llama"), theirs("llama")
    ours = from_transformers(theirs("llama"))
    more.more = ours.model.more = torch.nn.Parameter(torch.ones(2))
    del fewer.model.layers[1].mlp.up_proj
    other.model.norm.weight = torch.nn.Parameter(torch.ones(5))
    assert_refused(
        (lambda: from_transformers(more), ValueError, "tensors that our decoder lacks: more"),
        (lambda: from_transformers(fewer), ValueError, r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (lambda: from_transformers(other), ValueError, r"'model\.decoder\.norm\.weight' must be \[24\], got \[5\]"),
        (lambda: to_transformers(ours), ValueError, r"tensors that llama lacks: model\.more"),
    )


def test_dynamic_scaling_warns_and_frequencies_of_one_length_do_not_go_out(caplog):
    values = from_transformers(theirs("llama_dynamic")).config.decoder_config().to_dict()
    assert "transformers changes the frequencies with every call longer than 64 tokens" in caplog.text
    values["max_positions"] = 128
    back = to_transformers(SubquadForCausalLM(SubquadConfig(**values))).config
    assert back.max_position_embeddings == 64, "where transformers' frequencies begin to change"
    values["rope_scaling"]["length"] = 128
    with pytest.raises(ValueError, match=r"does not support rope_scaling\.length=128"):
        to_transformers(SubquadForCausalLM(SubquadConfig(**values)))


@pytest.mark.parametrize(("case", "attention"), [
    pytest.param(case, name, marks=pytest.mark.slow if (i + j) % 2 else [])
    for i, name in enumerate(OPTIONS) for j, case in enumerate(("llama", "gpt2"))
])  # fmt: skip
def test_the_attention_that_the_configuration_names_comes_along(attention, case, monkeypatch):
    options = {"llp": {"segment": 8}, "shifted": {"group": 8}, "bigbird": {"block": 4}, "full": {}}
    with all_float64(monkeypatch):
        model = theirs(case).double()
        plain = from_transformers(model)
        hf.set_attention(model, attention, **options.get(attention, dict.fromkeys(OPTIONS[attention][:1], 3)))
        expected_BTV = model(TOKENS).logits.detach()
    ours = from_transformers(model)
    assert ours.config.attention == attention
    with torch.no_grad():
        assert_same_maths(ours(TOKENS).logits, expected_BTV, attention)
        assert torch.equal(plain(TOKENS).logits, ours(TOKENS).logits) == (attention == "full")


def test_special_tokens_outside_of_the_vocabulary_are_left_out(caplog):
    model = theirs("llama")
    model.config.update({"bos_token_id": 60, "eos_token_id": [61, 2], "pad_token_id": -1})
    ours = from_transformers(model).config
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (60, [2], None)
    assert "eos_token_id=[61, 2] becomes [2]: the vocabulary has 61 tokens" in caplog.text


def test_only_what_differs_is_said_so_that_any_mechanism_can_take_a_layers_place():
    config = from_transformers(theirs("llama_tied_biases")).config.decoder_config()
    assert (config.bias, config.head_dim, config.qkv_bias, config.out_bias, config.ff_bias) == (True, *4 * (None,))
    kept = ("ff_dim", "norm_eps", "num_kv_heads")
    assert [getattr(config, name) for name in kept] == [40, 1e-3, 2]
    qwen = from_transformers(theirs("qwen2_tied")).config.decoder_config()
    assert (qwen.bias, qwen.qkv_bias, qwen.out_bias, qwen.num_kv_heads) == (False, True, False, None)
