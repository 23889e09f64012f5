"""Models of transformers as ours, and back: logits, tensors, gradients, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from subquad.hf import SubquadConfig, SubquadForCausalLM, from_transformers, set_attention, to_transformers
from subquad.hf.pattern_attention import OPTIONS
from subquad.layers.scaling import RopeScaling
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_all": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 4.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SMALL),
    "llama_tied_biases": (
        "LlamaForCausalLM",
        {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3},
    ),
    "llama_head_dim": ("LlamaForCausalLM", {**SMALL, "head_dim": 10, "num_key_value_heads": 1}),
    **{
        f"llama_{name}": ("LlamaForCausalLM", {**SMALL, "rope_parameters": {"rope_theta": 500.0, **rope}})
        for name, rope in ROPES.items()
    },
    "qwen2": ("Qwen2ForCausalLM", SMALL),
    "qwen2_tied": ("Qwen2ForCausalLM", {**SMALL, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", {**SMALL, "head_dim": 8}),
    "qwen3_biases": ("Qwen3ForCausalLM", {**SMALL, "head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2_untied": (
        "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 36, "activation_function": "gelu"},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {**NEOX, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}}),
    "gpt_neox_serial": (
        "GPTNeoXForCausalLM",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
}


@contextmanager
def all_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, what transformers computes in float32 whatever the model's dtype, it computes in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def theirs(case: str, **changes: Any) -> PreTrainedModel:
    """A model of transformers with random weights, norms and biases too."""
    torch.manual_seed(0)
    name, values = CASES[case]
    cls: Any = getattr(transformers, name)
    model: PreTrainedModel = cls(cls.config_class(**{**values, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def inputs(rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_BT = inputs()
    with all_float64(monkeypatch):
        model = theirs(case).double()
        expected_BTV = model(tokens_BT).logits
    ours = from_transformers(model)
    with torch.no_grad():
        assert_same_maths(ours(tokens_BT).logits, expected_BTV.detach(), case)


@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_padding_and_the_cache_give_the_logits_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_BT, mask_BT = inputs(), torch.ones(2, 40, dtype=torch.int64)
    mask_BT[0, :7] = 0
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    with all_float64(monkeypatch):
        model = theirs(case).double()
        expected_BTV = model(tokens_BT, attention_mask=mask_BT, position_ids=positions_BT).logits.detach()
    ours = from_transformers(model)
    with torch.no_grad():
        first = ours(tokens_BT[:, :30], attention_mask=mask_BT[:, :30], use_cache=True)
        cache, parts = first.past_key_values, [first.logits]
        for t in range(30, 40):
            parts.append(
                ours(tokens_BT[:, t : t + 1], attention_mask=mask_BT[:, : t + 1], past_key_values=cache).logits
            )
        whole_BTV = ours(tokens_BT, attention_mask=mask_BT).logits
    real = mask_BT.bool()
    assert_same_maths(whole_BTV[real], expected_BTV[real], "whole")
    assert_same_maths(torch.cat(parts, 1)[real], expected_BTV[real], "cached")


@pytest.mark.parametrize("case", ["llama_yarn", "qwen2", "qwen3", "gpt2", "gpt_neox"])
def test_float32_logits_are_as_near_to_the_exact_ones_as_those_of_transformers(case: str) -> None:
    tokens_BT, model = inputs(), theirs(case)
    ours = from_transformers(model)
    with torch.no_grad():
        actual, plain = ours(tokens_BT).logits, model(tokens_BT).logits
        exact = ours.double()(tokens_BT).logits
    assert_in_budget(actual, plain, exact, torch.float32, case)


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_same_tensors_and_settings(case: str, tmp_path: Path) -> None:
    model = theirs(case)
    back = to_transformers(from_transformers(model), model.config.model_type)
    assert type(back) is type(model)
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert_exact(after[name], tensor, name)
    tokens_BT = inputs()
    with torch.no_grad():
        assert_exact(back(tokens_BT).logits, model(tokens_BT).logits, case)
    back.save_pretrained(tmp_path)
    again = from_transformers(tmp_path)
    assert again.config.decoder_config() == from_transformers(model).config.decoder_config()


@pytest.mark.parametrize(("case", "family"), [("llama", "llama"), ("qwen2", "qwen2"), ("gpt2", "gpt2")])
def test_without_a_family_the_first_that_fits_is_taken(case: str, family: str) -> None:
    assert to_transformers(from_transformers(theirs(case))).config.model_type == family


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox"])
def test_gradients_are_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_BT = inputs()
    with all_float64(monkeypatch):
        model = theirs(case).double()
        model(tokens_BT, labels=tokens_BT).loss.backward()
    ours = from_transformers(model)
    ours(tokens_BT, labels=tokens_BT).loss.backward()
    table = model.get_input_embeddings().weight.grad
    assert table is not None
    assert_same_maths(ours.get_input_embeddings().weight.grad, table, case)
    assert all(p.grad is not None and bool(p.grad.any()) for p in ours.parameters() if p.numel() > 24)


def test_a_decoder_of_ours_goes_to_llama() -> None:
    torch.manual_seed(0)
    config = SubquadConfig(vocab_size=61, dim=24, num_layers=2, num_heads=4, attention="full", feedforward="swiglu")
    ours = SubquadForCausalLM(config).eval()
    model = to_transformers(ours)
    assert model.config.model_type == "llama"
    tokens_BT = inputs()
    with torch.no_grad():
        exact = SubquadForCausalLM(config)
        exact.load_state_dict(ours.state_dict())
        assert_in_budget(
            model(tokens_BT).logits,
            ours(tokens_BT).logits,
            exact.double().eval()(tokens_BT).logits,
            torch.float32,
            "llama",
        )


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function='relu'"),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop=0.3"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 16,
                    "short_factor": [1.0] * 3,
                    "long_factor": [2.0] * 3,
                }
            },
            "rope_type='longrope'",
        ),
    ],
)
def test_what_our_decoder_does_not_have_is_refused_by_name(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_transformers(theirs(case, **changes))


def test_other_models_are_refused() -> None:
    config = transformers.LlamaConfig(**SMALL)
    with pytest.raises(ValueError, match="must be a LlamaForCausalLM, got LlamaModel"):
        from_transformers(transformers.LlamaModel(config))
    bert = transformers.BertConfig(hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=24)
    with pytest.raises(ValueError, match="does not support models of family 'bert'"):
        from_transformers(transformers.BertModel(bert))
    with pytest.raises(TypeError, match="must be a model of transformers"):
        from_transformers(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "llp"}, "do not support attention 'llp'"),
        ({"feedforward": "bilinear"}, "feedforward='bilinear'"),
        ({"loops": 2}, "loops=2"),
        ({"lookup": 8}, "lookup=8"),
        ({"position": "sinusoidal"}, "position='sinusoidal'"),
    ],
)
def test_what_transformers_does_not_have_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    values = {"vocab_size": 61, "dim": 24, "num_layers": 2, "num_heads": 4, "attention": "full", **changes}
    with pytest.raises(ValueError, match=message):
        to_transformers(SubquadForCausalLM(SubquadConfig(**values)))


def test_a_family_that_does_not_fit_and_one_that_is_unknown_are_refused() -> None:
    ours = from_transformers(theirs("llama"))
    with pytest.raises(ValueError, match="qk_norm=False"):
        to_transformers(ours, "qwen3")
    with pytest.raises(ValueError, match="unknown family 'lama'; did you mean 'llama'"):
        to_transformers(ours, "lama")
    with pytest.raises(TypeError, match="must be a SubquadForCausalLM"):
        to_transformers(theirs("llama"))  # type: ignore[arg-type]


def test_a_folder_with_tensors_missing_or_left_over_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "linaer"}, "does not support llama with rope_type='linaer'; did you mean 'linear'"),
        ({"factor": "2"}, "the rope parameter 'factor' of llama must be a number, got '2'"),
        ({"factr": 2.0}, "llama has the rope parameter 'factr'; did you mean 'factor'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_rope_parameters_that_are_none_are_refused_before_a_model_is_made(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    theirs("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"] |= change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        from_transformers(tmp_path)


def test_a_name_that_the_hub_does_not_know_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere/at-all, and the hub gives no model of tha"):
        from_transformers("nowhere/at-all")


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_theta": 500.0, **ROPES[name]}
    config = transformers.LlamaConfig(**{**SMALL, "head_dim": 12, "rope_parameters": rope})
    length = 96 if name == "dynamic" else None
    with all_float64(monkeypatch):
        init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        expected, amplitude = init(config, torch.device("cpu"), seq_len=length)
    values = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    original = values.pop("original_max_position_embeddings", 64 if name == "dynamic" else None)
    scaling = RopeScaling.from_dict({"kind": rope["rope_type"], "original": original, "length": length, **values})
    assert_same_maths(torch.tensor(scaling.frequencies(12, 500.0), dtype=torch.float64), expected)
    assert_same_maths(torch.tensor([scaling.amplitude]).double(), torch.tensor([amplitude]).double())


def test_rope_parameters_that_are_not_ours_are_refused() -> None:
    for rope, message in (
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5; it must be 1"),
        ({"twist": 2.0}, "rope parameter 'twist'"),
    ):
        model = theirs("llama")
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, **rope}
        with pytest.raises(ValueError, match=message):
            from_transformers(model)


def test_a_layer_with_a_sliding_window_is_refused() -> None:
    model = theirs("qwen3")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="a layer of type 'sliding_attention';"):
        from_transformers(model)


def test_tensors_that_are_not_all_used_are_refused() -> None:
    model = theirs("llama")
    model.more = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="tensors that our decoder lacks: more"):
        from_transformers(model)
    del model.more
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        from_transformers(model)
    model = theirs("llama")
    model.model.norm.weight = torch.nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' must be \[24\], got \[5\]"):
        from_transformers(model)
    ours = from_transformers(theirs("llama"))
    ours.model.more = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"tensors that llama lacks: model\.more"):
        to_transformers(ours)


def test_a_head_that_says_it_is_tied_and_is_not_is_refused() -> None:
    model = theirs("llama")
    model.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match=r"should be tied, but 'lm_head\.weight' differs from its table"):
        from_transformers(model)


def test_dynamic_frequencies_of_one_length_do_not_go_out() -> None:
    ours = from_transformers(theirs("llama_dynamic"))
    values = ours.config.decoder_config().to_dict()
    values["rope_scaling"]["length"] = 128
    with pytest.raises(ValueError, match=r"does not support rope_scaling\.length=128"):
        to_transformers(SubquadForCausalLM(SubquadConfig(**values)))


def test_dynamic_scaling_says_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    from_transformers(theirs("llama_dynamic"))
    assert "transformers changes the frequencies with every call longer than 64 tokens" in caplog.text


@pytest.mark.parametrize("case", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", OPTIONS)
def test_the_attention_that_the_configuration_names_comes_along(
    attention: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_BT = inputs()
    options = {"llp": {"segment": 8}, "shifted": {"group": 8}, "bigbird": {"block": 4}, "full": {}}
    with all_float64(monkeypatch):
        model = theirs(case).double()
        plain = from_transformers(model)
        set_attention(model, attention, **options.get(attention, dict.fromkeys(OPTIONS[attention][:1], 3)))
        expected_BTV = model(tokens_BT).logits.detach()
    ours = from_transformers(model)
    assert ours.config.attention == attention
    with torch.no_grad():
        assert_same_maths(ours(tokens_BT).logits, expected_BTV, attention)
        assert torch.equal(plain(tokens_BT).logits, ours(tokens_BT).logits) == (attention == "full")


def test_special_tokens_outside_of_the_vocabulary_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = theirs("llama")
    model.config.update({"bos_token_id": 60, "eos_token_id": [61, 2], "pad_token_id": -1})
    ours = from_transformers(model).config
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (60, [2], None)
    assert "eos_token_id=[61, 2] becomes [2]: the vocabulary has 61 tokens" in caplog.text


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json, so it is not the folder of a transformers"):
        from_transformers(tmp_path)


def test_a_bilinear_network_has_no_width_of_its_own() -> None:
    from subquad.layers.feedforward import build_feedforward

    with pytest.raises(ValueError, match="'bilinear' has no hidden width of its own, got hidden=8"):
        build_feedforward("bilinear", 4, hidden=8)


def test_only_what_differs_is_said_so_that_any_mechanism_can_take_a_layers_place() -> None:
    config = from_transformers(theirs("llama_tied_biases")).config.decoder_config()
    assert (config.bias, config.head_dim, config.qkv_bias, config.out_bias, config.ff_bias) == (True, *4 * (None,))
    kept = ("ff_dim", "norm_eps", "num_kv_heads")
    assert [getattr(config, name) for name in kept] == [40, 1e-3, 2]
    qwen = from_transformers(theirs("qwen2_tied")).config.decoder_config()
    assert (qwen.bias, qwen.qkv_bias, qwen.out_bias, qwen.num_kv_heads) == (False, True, False, None)
