"""Our attention in models of transformers: `register`, `set_attention`, and `config.subquad`."""

import itertools
import json

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig

from subquad import hf
from subquad.attention import build
from subquad.cli import main
from subquad.hf import interface
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import STOCK_KINDS, STOCK_OPTIONS, language_model, positions, stock, stock_config, stock_tokens
from tests.models.small import assert_refused

KINDS = dict(zip(STOCK_OPTIONS, itertools.cycle(STOCK_KINDS), strict=False))
each = pytest.mark.parametrize(("kind", "name"), [
    pytest.param(kind, name, marks=[] if KINDS[name] == kind else pytest.mark.slow)
    for kind in STOCK_KINDS for name in STOCK_OPTIONS
])  # fmt: skip
"""Each mechanism, in one kind of model after another; the other pairs are slow tests."""
VARIANTS = {"llp": [{"segment": 8, "shifted_heads": True}], "strided": [{"stride": 4, "kind": "fixed", "columns": 2}]}
"""Options with two groups of heads."""
LLP = {"attention": "llp", "options": {"segment": 8}}
SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert hf.register() == [f"subquad_{name}" for name in STOCK_OPTIONS]
    to_dict = LlamaConfig.to_dict
    assert hf.register() == [f"subquad_{name}" for name in STOCK_OPTIONS]
    assert LlamaConfig.to_dict is to_dict


def seen(name, T, options=None):
    """Bool `[1, H, T, T]`: the keys that the mechanism's definition gives weight to."""
    torch.manual_seed(1)
    layer = build(name, dim=16, num_heads=4, **(STOCK_OPTIONS[name] if options is None else options)).double()
    return layer.weights(torch.randn(1, T, 16, dtype=torch.float64)) > 0


def gradients(model, x_BT, places=slice(None), **inputs):
    """The loss of the next tokens and each parameter's gradient, in float64 (transformers' loss is in float32)."""
    model.zero_grad()
    logits_BTV, x_BT = model(x_BT, **inputs).logits[:, places], x_BT[:, places]
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), x_BT[:, 1:].flatten())
    loss.backward()
    return {"logits": logits_BTV.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected):
    for name, gradient in expected.items():
        assert_same_maths(actual[name], gradient, name)


@each
def test_logits_and_gradients_are_those_of_the_definition_as_an_explicit_mask(kind, name):
    # transformers' `eager` takes its softmax in float32; `sdpa` keeps float64.
    plain = stock(kind, attn_implementation="sdpa")
    for options in (STOCK_OPTIONS[name], *VARIANTS.get(name, ())):
        model = stock(kind, name, options=options)
        for T in (1, 3, 8, 21):  # below, at and above the segment; 21 is no multiple of any size here
            mask_BHTS, x_BT = seen(name, T, options).expand(2, -1, -1, -1), stock_tokens(2, T)
            if T == 1:
                assert_same_maths(model(x_BT).logits, plain(x_BT, attention_mask=mask_BHTS).logits)
            else:
                assert_same_gradients(gradients(model, x_BT), gradients(plain, x_BT, attention_mask=mask_BHTS))


@pytest.mark.parametrize("config", [
    transformers.GPTNeoXConfig(**SHAPE, bos_token_id=0, eos_token_id=0),
    transformers.Qwen2Config(**SHAPE, num_key_value_heads=2),
    MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None),
], ids=lambda config: config.model_type)  # fmt: skip
@torch.no_grad()
def test_other_families(config):
    torch.manual_seed(0)
    model, x_BT = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval(), stock_tokens(2, 21)
    own = model(x_BT).logits
    hf.set_attention(model, "full")
    assert_same_maths(model(x_BT).logits, own, "full attention is the model's own")
    hf.set_attention(model, "llp", segment=8)
    changed = model(x_BT).logits
    plain = model.set_attn_implementation("sdpa") or model
    mask_BHTS = seen("llp", 21).expand(2, -1, -1, -1)[:, :1]
    assert_same_maths(changed, plain(x_BT, attention_mask=mask_BHTS).logits)


@each
@torch.no_grad()
def test_left_padding_is_as_if_removed(kind, name):
    model, x_BT = stock(kind, name), stock_tokens(3, 21)
    for left in (1, 6, 20):
        mask_BT = torch.ones(3, 21, dtype=torch.int64)
        mask_BT[0, :left] = 0
        logits = model(x_BT, attention_mask=mask_BT, position_ids=positions(mask_BT)).logits
        assert_same_maths(logits[:1, left:], model(x_BT[:1, left:]).logits, f"{left} left")
        assert_same_maths(logits[1:], model(x_BT[1:]).logits, "rows without padding")


def test_gradients_with_padding_are_those_of_the_row_alone():
    model, x_BT = stock("llama", "llp"), stock_tokens(1, 13)
    padded_BT = torch.cat([stock_tokens(1, 5), x_BT, stock_tokens(1, 2)], 1)
    mask_BT = torch.ones_like(padded_BT)
    mask_BT[:, :5] = mask_BT[:, -2:] = 0
    inputs = {"attention_mask": mask_BT, "position_ids": positions(mask_BT)}
    alone = {name: tensor.clone() for name, tensor in gradients(model, x_BT).items()}
    assert_same_gradients(gradients(model, padded_BT, slice(5, -2), **inputs), alone)


@each
def test_generation_is_the_same_with_a_cache_without_and_with_a_static_one(kind, name):
    model, x_BT = stock(kind, name), stock_tokens(2, 11)
    mask_BT = torch.ones_like(x_BT)
    mask_BT[0, :3] = 0
    asked = {"attention_mask": mask_BT, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    asked |= {"eos_token_id": None, "use_cache": True}
    cached = model.generate(x_BT, **asked)
    static = model.generate(x_BT, **asked, cache_implementation="static", disable_compile=True)
    alone = model.generate(x_BT[:1, 3:], **asked | {"attention_mask": mask_BT[:1, 3:]})
    assert_exact(static, cached, "static cache")
    assert_exact(model.generate(x_BT, **asked | {"use_cache": False}), cached, "no cache")
    assert_exact(alone[:, 8:], cached[:1, 11:], "without padding")


@each
@torch.no_grad()
def test_pieces_with_a_cache_are_the_whole(kind, name):
    model, x_BT = stock(kind, name), stock_tokens(2, 23)
    mask_BT = torch.ones_like(x_BT)
    mask_BT[0, :2] = mask_BT[1, 12] = 0  # padding in the middle, as a padded prompt and a padded reply have
    for mask in (torch.ones_like(x_BT), mask_BT):
        where, cache = positions(mask), DynamicCache()
        whole = model(x_BT, attention_mask=mask, position_ids=where).logits
        for start, stop in itertools.pairwise((0, 4, 5, 14, 15, 23)):
            inputs = {"attention_mask": mask[:, :stop], "position_ids": where[:, start:stop], "past_key_values": cache}
            part, real = model(x_BT[:, start:stop], **inputs).logits, mask[:, start:stop, None].bool()
            assert_same_maths(part.where(real, 0.0), whole[:, start:stop].where(real, 0.0), f"from {start}")


def test_dropout_is_the_models_own_and_acts_in_training_only():
    model, x_BT = stock("llama", "window", attention_dropout=0.5), stock_tokens(1, 9)
    quiet = model(x_BT).logits
    assert_exact(model(x_BT).logits, quiet)
    assert not torch.equal(model.train()(x_BT).logits, quiet)


def test_checkpointing_changes_no_gradient():
    model = stock("llama", "llp").train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    x_BT = stock_tokens(2, 13)
    assert_same_gradients(gradients(model, x_BT), gradients(stock("llama", "llp"), x_BT))


@each
def test_a_saved_model_attends_the_same_again(kind, name, tmp_path):
    model, x_BT = stock(kind, name, torch.float32), stock_tokens(2, 13)
    model.save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())["subquad"]
    assert kept == {"attention": name, "options": STOCK_OPTIONS[name]}
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    interface.check_attention(again)
    assert again.config._attn_implementation == f"subquad_{name}"
    with torch.no_grad():
        assert_exact(again(x_BT).logits, model(x_BT).logits)
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["subquad"] == kept


@pytest.mark.parametrize(("kind", "name"), [
    pytest.param(kind, name, marks=[] if (kind, name) == ("llama", "llp") else pytest.mark.slow)
    for kind in STOCK_KINDS for name in STOCK_OPTIONS
])  # fmt: skip
def test_a_saved_model_passes_the_audit(kind, name, tmp_path, capsys):
    stock(kind, name, torch.float32).save_pretrained(tmp_path)
    assert main(["audit", str(tmp_path), "--tokens", "9", "--contexts", "[]", "--long", "0"]) == 0
    assert "passed: no violation" in capsys.readouterr().out


def test_the_configuration_selects_the_attention():
    config = stock_config("llama", subquad=LLP)
    assert config._attn_implementation == "subquad_llp"
    interface.check_attention(LlamaForCausalLM(config))
    config = stock_config("llama")
    assert not hasattr(config, "subquad")
    with pytest.raises(AttributeError, match="'LlamaConfig' object has no attribute 'subquad'"):
        config.subquad  # noqa: B018 the access is what is tested
    config.subquad = LLP
    del config.subquad
    assert not hasattr(config, "subquad")


def test_an_implementation_chosen_at_loading_is_stored(tmp_path):
    stock().save_pretrained(tmp_path / "plain")
    assert "subquad" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="subquad_shifted")
    model.save_pretrained(tmp_path / "ours")
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert config.subquad == {"attention": "shifted", "options": {}}
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "subquad_shifted"


def test_none_restores_the_models_own_attention():
    model, x_BT = stock(attn_implementation="eager"), stock_tokens(2, 13)
    own = model(x_BT).logits
    hf.set_attention(model, "llp", segment=4)
    hf.set_attention(model, "window", width=3)
    assert not torch.equal(model(x_BT).logits, own)
    hf.set_attention(model, None)
    assert model.config._attn_implementation == "eager"
    assert "subquad" not in model.config.to_dict()
    assert_exact(model(x_BT).logits, own)


def test_a_model_that_runs_another_attention_than_its_configuration_names(tmp_path, caplog):
    stock("llama", "llp").save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "asks for" not in caplog.text
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    message = "config.subquad asks for 'llp', but the implementation is 'sdpa': only subquad.hf.set_attention(model, ."
    assert message in caplog.text
    with pytest.raises(ValueError, match="asks for subquad attention 'llp', but the model runs 'sdpa': call"):
        interface.check_attention(model)
    model.set_attn_implementation("subquad_window")
    with pytest.raises(ValueError, match=r"the model runs subquad_window, but its config\.subquad names 'llp'"):
        model(stock_tokens(1, 3))
    model.set_attn_implementation("subquad_llp")
    interface.check_attention(model)
    assert_exact(model(stock_tokens(2, 20)).logits, stock("llama", "llp")(stock_tokens(2, 20)).logits)


# --- mistakes


@pytest.mark.parametrize(("name", "options", "message"), [
    ("llpp", {}, "unknown attention 'llpp'.*llp"),
    ("latte", {}, "'latte' has parameters, .* convert the model with .subquad convert., or choose one of bigbird, "),
    ("llp", {"width": 3}, "'llp' has no option 'width' as an attention implementation; valid: segment, shifted_heads"),
    ("full", {"width": 3}, "'full' has no option 'width' .* valid: none"),
    ("llp", {"segment": 7}, "segment must be even"),
    ("window", {"width": 10**30}, r"option 'width' of 'window' must be at most 2,147,483,647, got 1,000,"),
    ("bigbird", {"num_random": 10**9}, r"option 'num_random' of 'bigbird' must be at most 1,024, got 1,000,000,000"),
    (None, {"segment": 8}, "name=None restores the model's own attention and takes no options"),
])  # fmt: skip
def test_a_refused_attention_leaves_the_model_unchanged(name, options, message):
    model = stock("llama", "window")
    with pytest.raises(ValueError, match=message):
        hf.set_attention(model, name, **options)
    assert model.config.subquad == {"attention": "window", "options": STOCK_OPTIONS["window"]}
    assert model.config._attn_implementation == "subquad_window"


def test_models_that_are_refused(tmp_path, monkeypatch):
    t5 = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    sliding = AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=4))
    gemma = transformers.Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2)
    ours = language_model()
    ours.set_attn_implementation("eager")
    ours.save_pretrained(tmp_path)
    window = {"attn_implementation": "subquad_window"}
    named = "attn_implementation='subquad_window' is for transformers' models: SubquadForCausalLM takes its attention"
    models = (
        (torch.nn.Linear(1, 1), TypeError, "model must be a PreTrainedModel of transformers, got Linear"),
        (transformers.T5ForConditionalGeneration(t5), ValueError, "T5ForConditionalGeneration"),
        (sliding, ValueError, "layers of MistralForCausalLM have sliding_window: make all of them full"),
        (AutoModelForCausalLM.from_config(gemma), ValueError, r"attn_logit_softcapping=50\.0 of Gemma2For"),
        (stock("gpt2", add_cross_attention=True), ValueError, "but GPT2LMHeadModel attends to an encoder"),
        (ours, ValueError, "SubquadForCausalLM takes its attention from its own configuration: build or"),
    )
    assert_refused(*((lambda m=m: hf.set_attention(m, "llp"), error, message) for m, error, message in models))
    assert_refused(
        (lambda: ours.set_attn_implementation("subquad_window"), ValueError, named),
        (lambda: hf.SubquadForCausalLM.from_pretrained(tmp_path, **window), ValueError, named),
    )
    model, other = stock(), LlamaConfig()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match="LlamaForCausalLM does not attend through transformers' AttentionInterface"):
        hf.set_attention(model, "llp")
    monkeypatch.setattr(type(model.config), "get_text_config", lambda self, **_: other)
    with pytest.raises(ValueError, match="with one configuration that has num_attention_heads, got LlamaConfig"):
        hf.set_attention(model, "llp")


def test_a_damaged_entry_is_refused(tmp_path, capsys):
    for entry in (5, {}, {"attention": 3}, {"attention": "llp", "options": 3}, {**LLP, "more": 1}):
        with pytest.raises(ValueError, match=r'config\.subquad must be {"attention": name, "options": {\.\.\.}}, got '):
            stock_config("llama", subquad=entry)
    (tmp_path / "config.json").write_text(json.dumps(stock_config("llama").to_dict() | {"subquad": entry}))
    with pytest.raises(SystemExit) as exit_info:
        main(["audit", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "config.subquad must be" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["softcap", "s_aux", "sliding_window", "cu_seq_lens_q"])
def test_what_ours_does_not_compute_is_refused(asked):
    module = stock("llama", "llp").model.layers[0].self_attn
    inputs = [torch.randn(1, heads, 5, 8) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match=f"does not compute {asked}, which LlamaAttention asks for"):
        interface._attention("llp", module, *inputs, None, **{asked: 4})
    with pytest.raises(ValueError, match="is causal, but LlamaAttention is not"):
        interface._attention("llp", module, *inputs, None, is_causal=False)
