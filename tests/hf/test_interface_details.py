"""What `register` and `set_attention` keep, give back, and refuse; dtypes, dropout, checkpointing, cost."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import sliding_window_causal_mask_function

from subquad import hf
from subquad.cli import main
from subquad.hf import interface
from subquad.hf.pattern_attention import Standing, attend_over, parts_of, read_standing, standing_mask
from subquad.testing import assert_exact, assert_in_budget, assert_same_maths
from subquad.testing.tools import LINEAR_GROWTH, largest_allocation
from tests.hf.stock import OPTIONS, config_of, positions, stock, tokens
from tests.hf.test_interface import gradients, seen

SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 64}
LLP = {"attention": "llp", "options": {"segment": 8}}
VARIANTS = [("llp", {"segment": 8, "shifted_heads": True}), ("strided", {"stride": 4, "kind": "fixed", "columns": 2})]


@pytest.fixture(scope="module", autouse=True)
def registered():
    hf.register()


def inputs(T, S, K=8, B=2, H=4, G=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shapes = ((B, H, T, K), (B, G, S, K), (B, G, S, K))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_options_with_two_groups_of_heads(name, options):
    model, plain, x_BT = (
        stock("llama", name, options=options),
        stock("llama", attn_implementation="sdpa"),
        tokens(2, 21),
    )
    mask_BHTS = seen(name, 21, options)
    loss, grads = gradients(model, x_BT)
    plain_loss, plain_grads = gradients(plain, x_BT, attention_mask=mask_BHTS.expand(2, -1, -1, -1))
    assert_same_maths(loss, plain_loss)
    for parameter, grad in grads.items():
        assert_same_maths(grad, plain_grads[parameter], parameter)


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(**SHAPE, bos_token_id=0, eos_token_id=0),
        Qwen2Config(**SHAPE, num_key_value_heads=2),
        MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families(config):
    torch.manual_seed(0)
    model, x_BT = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval(), tokens(2, 21)
    with torch.no_grad():
        own = model(x_BT).logits
        hf.set_attention(model, "full")
        assert_same_maths(model(x_BT).logits, own, "full attention is the model's own")
        hf.set_attention(model, "llp", segment=8)
        changed = model(x_BT).logits
        plain = model.set_attn_implementation("sdpa") or model
        mask_BHTS = seen("llp", 21).expand(2, -1, -1, -1)[:, :1]
        assert_same_maths(changed, plain(x_BT, attention_mask=mask_BHTS).logits)


def test_gradients_with_padding_are_those_of_the_rows_alone():
    model, x_BT = stock("llama", "llp"), tokens(1, 13)
    padded_BT = torch.cat([tokens(1, 5), x_BT, tokens(1, 2)], 1)
    mask_BT = torch.ones_like(padded_BT)
    mask_BT[:, :5] = mask_BT[:, -2:] = 0
    _, alone = gradients(model, x_BT)
    model.zero_grad()
    logits_BTV = model(padded_BT, attention_mask=mask_BT, position_ids=positions(mask_BT)).logits[:, 5:-2]
    F.cross_entropy(logits_BTV[0, :-1], x_BT[0, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert_same_maths(parameter.grad, alone[name], name)


@pytest.mark.parametrize("name", OPTIONS)
def test_bfloat16_is_as_near_as_the_plain_form(name):
    q, k, v = inputs(21, 21, dtype=torch.bfloat16)
    mask_BHTS = seen(name, 21)
    shared = [x.repeat_interleave(2, 1) for x in (k, v)]
    exact = F.scaled_dot_product_attention(q.double(), *(x.double() for x in shared), attn_mask=mask_BHTS, scale=0.3)
    plain = F.scaled_dot_product_attention(q, *shared, attn_mask=mask_BHTS, scale=0.3)
    ours = attend_over(q, k, v, parts_of(name, 4, OPTIONS[name]), Standing(0, None), 0.3, 0.0)
    assert ours.dtype == torch.bfloat16
    assert_in_budget(ours, plain, exact, torch.bfloat16, name)


@pytest.mark.parametrize("name", OPTIONS)
def test_dropout_acts_on_the_weights(name):
    q, k, _ = inputs(8, 8)
    v = torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8)  # the outputs are the weights
    parts = parts_of(name, 4, OPTIONS[name])
    weights = attend_over(q, k, v, parts, Standing(0, None), None, 0.0)
    torch.manual_seed(2)
    dropped = attend_over(q, k, v, parts, Standing(0, None), None, 0.25)
    kept = dropped != 0
    assert_same_maths(dropped[kept], weights[kept] / 0.75)
    assert 0 < (weights[~kept] > 0).sum() < kept.sum()


def test_dropout_is_the_model_s_and_in_training_alone():
    model, x_BT = stock("llama", "window", attention_dropout=0.5), tokens(1, 9)
    quiet = model(x_BT).logits
    assert_exact(model(x_BT).logits, quiet)
    assert not torch.equal(model.train()(x_BT).logits, quiet)


def test_activation_checkpointing_changes_no_gradient():
    x_BT = tokens(2, 13)
    _, plain = gradients(stock("llama", "llp"), x_BT)
    model = stock("llama", "llp").train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    _, again = gradients(model, x_BT)
    for name, grad in again.items():
        assert_same_maths(grad, plain[name], name)


@pytest.mark.parametrize("name", ["window", "llp", "shifted", "dilated", "longformer", "bigbird"])
@pytest.mark.parametrize("left", [0, 5])
def test_memory_of_a_prompt_grows_with_its_length(name, left):
    def largest(T):
        q, k, v = (x.requires_grad_() for x in inputs(T, T, B=1))
        mask_BT = torch.ones(1, T, dtype=torch.int64)
        mask_BT[:, :left] = 0
        parts = parts_of(name, 4, OPTIONS[name])

        def step():
            standing = read_standing(standing_mask(1, T, T, attention_mask=mask_BT), 1, T, T)
            attend_over(q, k, v, parts, standing, None, 0.0).sum().backward()

        return largest_allocation(step)

    assert largest(1024) <= LINEAR_GROWTH * largest(512)


def test_what_stands_in_the_configuration_chooses_the_attention(tmp_path):
    config = config_of("llama", subquad=LLP)
    assert config._attn_implementation == "subquad_llp"
    model = LlamaForCausalLM(config)
    interface.check_attention(model)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).subquad == LLP
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "subquad_llp"


def test_one_line_is_stored_too(tmp_path):
    stock("llama").save_pretrained(tmp_path / "plain")
    assert "subquad" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="subquad_shifted")
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.config.subquad == {"attention": "shifted", "options": {}}
    assert again.config._attn_implementation == "subquad_shifted"


def test_the_attribute_is_there_only_where_it_is_set():
    config = config_of("llama")
    assert not hasattr(config, "subquad")
    with pytest.raises(AttributeError, match="'LlamaConfig' object has no attribute 'subquad'"):
        config.subquad  # noqa: B018 the access is what is tested
    config.subquad = LLP
    del config.subquad
    assert not hasattr(config, "subquad")


def test_none_gives_the_model_s_own_attention_back(tmp_path):
    model, x_BT = stock("llama", attn_implementation="eager"), tokens(2, 13)
    own = model(x_BT).logits
    hf.set_attention(model, "llp", segment=4)
    hf.set_attention(model, "window", width=3)
    assert not torch.equal(model(x_BT).logits, own)
    hf.set_attention(model, None)
    assert model.config._attn_implementation == "eager"
    assert_exact(model(x_BT).logits, own)
    model.save_pretrained(tmp_path)
    assert "subquad" not in json.loads((tmp_path / "config.json").read_text())


def test_a_model_that_runs_another_attention_than_it_asks_for_is_found(tmp_path, capsys):
    stock("llama", "llp").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="asks for subquad attention 'llp', but the model runs 'sdpa': call"):
        interface.check_attention(model)
    model.set_attn_implementation("subquad_window")
    with pytest.raises(ValueError, match=r"the model runs subquad_window, but its config\.subquad names 'llp'"):
        model(tokens(1, 3))


def test_an_entry_that_a_model_does_not_run_is_said(tmp_path, caplog):
    model = stock("llama", attn_implementation="sdpa")
    model.config.subquad = LLP
    message = "config.subquad asks for 'llp', but the implementation is 'sdpa': only subquad.hf.set_attention(model, ."
    assert message in caplog.text
    model.set_attn_implementation("subquad_llp")
    interface.check_attention(model)
    expected = stock("llama")
    hf.set_attention(expected, "llp", **LLP["options"])
    assert_exact(model(tokens(2, 20)).logits, expected(tokens(2, 20)).logits)
    model.save_pretrained(tmp_path)
    caplog.clear()
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "asks for" not in caplog.text
    AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert message in caplog.text


def test_a_model_of_ours_has_its_attention_from_its_own_configuration(tmp_path):
    model = hf.SubquadForCausalLM(hf.SubquadConfig(vocab_size=11, dim=16, num_layers=1, num_heads=2, attention="llp"))
    with pytest.raises(ValueError, match="SubquadForCausalLM takes its attention from its own configuration: build or"):
        hf.set_attention(model, "llp")
    named = "attn_implementation='subquad_window' is for transformers' models: SubquadForCausalLM takes its attention"
    with pytest.raises(ValueError, match=named):
        model.set_attn_implementation("subquad_window")
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=named):
        hf.SubquadForCausalLM.from_pretrained(tmp_path, attn_implementation="subquad_window")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llpp", {}, "unknown attention 'llpp'.*llp"),
        ("latte", {}, "'latte' has parameters, .* with .subquad convert., or choose one of bigbird, "),
        (
            "llp",
            {"width": 3},
            "'llp' has no option 'width' as an attention implementation; valid: segment, sh",
        ),
        ("shifted", {"wrap": True}, "'shifted' has no option 'wrap' .* valid: group"),
        ("full", {"width": 3}, "'full' has no option 'width' .* valid: none"),
        ("llp", {"segment": 7}, "segment must be even"),
        ("window", {"width": 10**30}, r"option 'width' of 'window' must be at most 2,147,483,647, got 1,000,"),
        (
            "bigbird",
            {"num_random": 10**9},
            r"option 'num_random' of 'bigbird' must be at most 1,024, got 1,000,000,000",
        ),
        (None, {"segment": 8}, "name=None restores the model's own attention and takes no options"),
    ],
)
def test_what_set_attention_refuses_leaves_the_model_as_it_was(name, options, message):
    model = stock("llama", "window")
    with pytest.raises(ValueError, match=message):
        hf.set_attention(model, name, **options)
    assert model.config.subquad == {"attention": "window", "options": OPTIONS["window"]}
    assert model.config._attn_implementation == "subquad_window"


def test_options_are_whole_numbers_bools_and_words():
    model = stock("llama", "window")
    with pytest.raises(TypeError, match=r"option 'segment' of 'llp' must be an integer, a bool or a string, got 8\.5"):
        hf.set_attention(model, "llp", segment=8.5)
    parts_of("llp", 4, {"segment": 8, "shifted_heads": True})
    with pytest.raises((TypeError, ValueError), match="shifted_heads"):  # although 1 == True
        parts_of("llp", 4, {"segment": 8, "shifted_heads": 1})


def test_models_that_are_refused():
    with pytest.raises(TypeError, match="model must be a PreTrainedModel of transformers, got Linear"):
        hf.set_attention(torch.nn.Linear(1, 1), "llp")
    seq2seq = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        hf.set_attention(seq2seq, "llp")
    sliding = AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=4))
    with pytest.raises(ValueError, match="layers of MistralForCausalLM have sliding_window: make all of them full"):
        hf.set_attention(sliding, "llp")
    gemma = Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match=r"does not compute attn_logit_softcapping=50\.0 of Gemma2For"):
        hf.set_attention(AutoModelForCausalLM.from_config(gemma), "llp")
    cross = AutoModelForCausalLM.from_config(config_of("gpt2", add_cross_attention=True))
    with pytest.raises(ValueError, match="is for decoders, but GPT2LMHeadModel attends to an encoder"):
        hf.set_attention(cross, "llp")


def test_a_model_that_does_not_use_the_interface_is_refused(monkeypatch):
    model = stock("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match="LlamaForCausalLM does not attend through transformers' AttentionInterface"):
        hf.set_attention(model, "llp")


def test_a_configuration_of_several_is_refused(monkeypatch):
    model = stock("llama")
    other = LlamaConfig()
    monkeypatch.setattr(type(model.config), "get_text_config", lambda self, **_: other)
    with pytest.raises(ValueError, match="with one configuration that has num_attention_heads, got LlamaConfig"):
        hf.set_attention(model, "llp")


@pytest.mark.parametrize("entry", [5, {}, {"attention": 3}, {"attention": "llp", "options": 3}, {**LLP, "more": 1}])
def test_a_damaged_entry_is_refused(entry, tmp_path, capsys):
    with pytest.raises(ValueError, match=r'config\.subquad must be {"attention": name, "options": {\.\.\.}}, got '):
        config_of("llama", subquad=entry)
    stock("llama").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"subquad": entry}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SystemExit) as exit_info:
        main(["audit", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "config.subquad must be" in capsys.readouterr().err


def test_masks_that_are_refused():
    model, x_BT = stock("llama", "llp"), tokens(2, 9)
    with pytest.raises(
        ValueError, match=r"does not support 4-D masks: give a 2-D attention_mask of padding, got torch\.b"
    ):
        model(x_BT, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="not packed documents"):
        model(x_BT, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)
    with pytest.raises(ValueError, match=r"a sliding or chunked layer .of 4 tokens. has one of its own"):
        standing_mask(1, 5, 5, mask_function=sliding_window_causal_mask_function(4), local_size=4)
    with pytest.raises(ValueError, match="nor bidirectional attention"):
        standing_mask(1, 5, 5, mask_function=lambda *_: True)
    with pytest.raises(
        ValueError, match=r"keeps every key from the first one, got keys from 2 on, 5 of them, .* 2 to 6"
    ):
        standing_mask(1, 5, 5, q_offset=2, kv_offset=2)
    with pytest.raises(ValueError, match=r"a column for each token so far, \[1, 7\], got \[1, 5\]"):
        standing_mask(1, 5, 9, q_offset=2, attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="2 queries, 5 keys and no mask that says where they stand"):
        read_standing(None, 1, 2, 5)
    assert read_standing(None, 1, 5, 5) == Standing(0, None)


@pytest.mark.parametrize("asked", ["softcap", "s_aux", "sliding_window", "cu_seq_lens_q"])
def test_what_an_attention_function_is_asked_for_and_ours_does_not_compute(asked):
    module = stock("llama", "llp").model.layers[0].self_attn
    with pytest.raises(ValueError, match=f"does not compute {asked}, which LlamaAttention asks for"):
        interface._attention("llp", module, *inputs(5, 5), None, **{asked: 4})
    with pytest.raises(ValueError, match="is causal, but LlamaAttention is not"):
        interface._attention("llp", module, *inputs(5, 5), None, is_causal=False)


def test_register_may_be_called_again():
    names, to_dict = hf.register(), LlamaConfig.to_dict
    assert hf.register() == names
    assert LlamaConfig.to_dict is to_dict
