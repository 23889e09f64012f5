import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from subquad.attention import mechanism, names
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import Decoder
from subquad.testing import assert_exact, assert_same_maths

VOCABULARY = 23
every_mechanism = pytest.mark.parametrize("name", [name for name in names() if "causal" in mechanism(name).forms])


def tiny(name="llp", **fields):
    shape = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 2,
        "options": {"llp": {"segment": 6}, "window": {"width": 4}},
        "position": "rope" if mechanism(name).rotates else "sinusoidal",
        "init_std": 0.3,
    }
    torch.manual_seed(0)
    return SubquadForCausalLM(SubquadConfig(attention=name, **(shape | fields))).eval()


def some_tokens(batch=3, tokens=11):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def assert_same_model(actual, expected):
    """The same bits in the weights; logits in float64, for a product may round by where its operands lie."""
    weights = dict(actual.named_parameters())
    assert weights.keys() == dict(expected.named_parameters()).keys()
    for key, weight in expected.named_parameters():
        assert_exact(weights[key], weight, key)
    assert_same_maths(actual.double()(some_tokens()).logits, expected.double()(some_tokens()).logits)


@every_mechanism
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_saved_model_comes_back_bit_for_bit(name, tie_embeddings, tmp_path):
    model = tiny(name, tie_embeddings=tie_embeddings)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadForCausalLM)
    assert not loaded.training
    assert_same_model(loaded, model)


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    shapes = {key: tensor.shape for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert [key for key, shape in shapes.items() if VOCABULARY in shape] == ["model.embedding.tokens.weight"]
    loaded = SubquadForCausalLM.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    with torch.no_grad():
        loaded.get_input_embeddings().weight.zero_()
    assert not loaded(some_tokens()).logits.any()


def test_weights_load_in_another_dtype(tmp_path):
    tiny().save_pretrained(tmp_path)
    loaded = SubquadForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert_same_model(loaded, tiny().bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.attention.out.weight"), "missing keys: model.layers.1.attention.out.weight"),
        (lambda w: w.update(more=torch.ones(2)), "unexpected keys: more"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, change, message):
    tiny().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata=header)
    with pytest.raises(ValueError, match=message):
        SubquadForCausalLM.from_pretrained(tmp_path)


def test_loading_information_is_given_when_asked_for(tmp_path):
    tiny().save_pretrained(tmp_path)
    model, information = SubquadForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, SubquadForCausalLM)
    assert not information["missing_keys"]


def test_first_weights_are_the_decoders():
    model, decoder = (
        tiny(num_layers=8, dim=64, vocab_size=500),
        Decoder(tiny(num_layers=8, dim=64).config.decoder_config()),
    )
    assert len(list(model.parameters())) == len(list(decoder.parameters()))
    for key, weight in decoder.named_parameters():
        ours = model.model.get_parameter(key)
        assert math.isclose(ours.std(correction=0).item(), weight.std(correction=0).item(), rel_tol=0.15), key


@every_mechanism
def test_the_loss_is_that_of_the_shifted_logits(name):
    model, tokens = tiny(name).double(), some_tokens()
    labels = tokens.clone()
    labels[0, 3:5] = -100
    output = model(tokens, labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].mT, labels[:, 1:])
    assert_same_maths(output.loss, expected)
    counted = (labels[:, 1:] != -100).sum()
    assert_same_maths(model(tokens, labels=labels, num_items_in_batch=2 * counted).loss, expected / 2)


@every_mechanism
def test_padding_does_not_exist_in_logits_and_loss(name):
    model, tokens = tiny(name).double(), some_tokens(1, 11)
    real = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0]])
    kept = tokens[real.bool()][None]
    padded, alone = model(tokens, attention_mask=real, labels=tokens), model(kept, labels=kept)
    assert_same_maths(padded.logits[real.bool()], alone.logits[0])
    assert_same_maths(padded.loss, alone.loss)


def test_a_mask_of_ones_changes_no_bit():
    model, tokens = tiny(), some_tokens()
    assert_exact(model(tokens, attention_mask=torch.ones_like(tokens)).logits, model(tokens).logits)


def test_logits_are_left_out_in_training_unless_asked_for():
    model, tokens = tiny().train(), some_tokens()
    trained = model(tokens, labels=tokens)
    assert trained.logits is None
    assert trained.past_key_values is None
    assert model(tokens, labels=tokens, output_logits=True).logits.shape == (3, 11, VOCABULARY)
    assert model(tokens).logits.shape == (3, 11, VOCABULARY)
    model.eval()
    assert model(tokens, labels=tokens).logits.shape == (3, 11, VOCABULARY)
    assert model(tokens, labels=tokens, output_logits=False).logits is None


def test_the_last_logits_alone():
    model, tokens = tiny().double(), some_tokens()
    whole = model(tokens).logits
    assert_same_maths(model(tokens, logits_to_keep=2).logits, whole[:, -2:])
    places = torch.tensor([7, 0, 3])
    assert_same_maths(model(tokens, logits_to_keep=places).logits, whole[:, places])


def test_a_tuple_comes_back_when_asked_for():
    model, tokens = tiny(), some_tokens()
    loss, logits = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    assert_exact(loss, model(tokens, labels=tokens).loss)
    assert logits.shape == (3, 11, VOCABULARY)


def test_no_token_gives_a_loss_of_nothing():
    assert tiny()(some_tokens(3, 0), labels=some_tokens(3, 0)).loss.item() == 0
    assert tiny()(some_tokens(3, 1), labels=some_tokens(3, 1)).loss.item() == 0


def test_checkpointing_is_switched_as_transformers_does():
    model, tokens = tiny().train(), some_tokens()
    assert not model.model.gradient_checkpointing
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch()
    assert model.model.gradient_checkpointing
    model(tokens, labels=tokens).loss.backward()
    checkpointed = [p.grad for p in model.parameters()]
    plain = tiny().train()
    plain(tokens, labels=tokens).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(checkpointed, plain.parameters(), strict=True))


@pytest.mark.parametrize("tie", [True, False])
def test_the_vocabulary_can_grow(tie, tmp_path):
    model, tokens = tiny(tie_embeddings=tie).double(), some_tokens()
    before = model(tokens).logits
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    assert_same_maths(model(tokens).logits[..., :VOCABULARY], before)
    assert model.model.config.vocab_size == model.config.vocab_size == VOCABULARY + 5
    assert model(tokens + 5).logits.shape[-1] == VOCABULARY + 5
    model.save_pretrained(tmp_path)
    loaded = SubquadForCausalLM.from_pretrained(tmp_path)
    assert_same_model(loaded, model)
    assert loaded.model.config_hash == model.model.config_hash


def test_what_it_does_not_take_is_named():
    model, tokens = tiny(), some_tokens()
    with pytest.raises(ValueError, match="input_ids is needed"):
        model()
    with pytest.raises(ValueError, match="inputs_embeds is not supported"):
        model(inputs_embeds=torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="output_hidden_states is not supported"):
        model(tokens, output_hidden_states=True)
    with pytest.raises(ValueError, match=r"labels must have the shape of input_ids, \[3, 11\], got \[3, 10\]"):
        model(tokens, labels=tokens[:, 1:])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[3, 11\].* got \[3, 4\]"):
        model(tokens, attention_mask=torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[3, 11\].* got \[3, 1, 11, 11\]"):
        model(tokens, attention_mask=torch.ones(3, 1, 11, 11))
    with pytest.raises(TypeError, match=r"must be a subquad.hf.SubquadCache, got DynamicCache"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"position_ids must have shape \[3, 11\], got \[3, 4\]"):
        model(tokens, position_ids=tokens[:, :4])
    with pytest.raises(ValueError, match=r"logits_to_keep must be at least 0 .*, got -1"):
        model(tokens, logits_to_keep=-1)
    with pytest.raises(TypeError, match=r"logits_to_keep must be .* got a tensor \[2\] of torch.float32"):
        model(tokens, logits_to_keep=torch.ones(2))


def test_positions_are_counted_and_may_only_be_repeated():
    model, tokens = tiny(), some_tokens()
    mask = torch.ones_like(tokens)
    mask[1, :4] = mask[2, 5] = 0
    counted = mask.cumsum(1) - 1
    expected = model(tokens, attention_mask=mask).logits
    assert_exact(model(tokens, attention_mask=mask, position_ids=counted).logits, expected)
    assert_exact(model(tokens, position_ids=torch.arange(11)[None]).logits, model(tokens).logits)
    cache = model(tokens[:, :6], attention_mask=mask[:, :6]).past_key_values
    model(tokens[:, 6:], attention_mask=mask, position_ids=counted[:, 6:], past_key_values=cache, use_cache=False)
    for wrong in (counted + 1, counted.flip(1), torch.arange(11)[None]):
        with pytest.raises(ValueError, match="position_ids must count the row's real tokens"):
            model(tokens, attention_mask=mask, position_ids=wrong)
    with pytest.raises(ValueError, match="position_ids must count"):
        model(tokens[:, 6:], attention_mask=mask, position_ids=counted[:, 6:] - 6, past_key_values=cache)


def test_the_trainers_count_and_the_loss_leave_out_the_same():
    """A mean over two batches by the count of both is the mean over all labels; a count of padding is refused.

    A row that begins with padding counts one label more than has a real token before it.
    """
    model, tokens = tiny().double(), some_tokens()
    mask = torch.ones_like(tokens)
    mask[0, 8:] = mask[1, 3:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    items = (labels[:, 1:] != -100).sum()
    parts = [
        model(tokens[part], attention_mask=mask[part], labels=labels[part], num_items_in_batch=items).loss
        for part in (slice(0, 1), slice(1, 3))
    ]
    left = {"attention_mask": mask.flip(1), "labels": labels.flip(1)}
    counted = (left["labels"][:, 1:] != -100).sum()
    assert counted == items + 2
    expected = model(tokens.flip(1), **left).loss * items / counted
    assert_same_maths(model(tokens.flip(1), **left, num_items_in_batch=counted).loss, expected)
    whole = model(tokens, attention_mask=mask, labels=labels).loss
    assert_same_maths(sum(parts), whole)
    assert_same_maths(model(tokens, attention_mask=mask, labels=tokens).loss, whole)
    with pytest.raises(ValueError, match=r"num_items_in_batch counts labels at padding, .* set labels to -100 where"):
        model(tokens, attention_mask=mask, labels=tokens, num_items_in_batch=items)


# peft 0.21 reads a name that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_lora_trains_the_adapter_alone():
    peft = pytest.importorskip("peft")
    model, tokens = tiny(), some_tokens()
    before = {key: p.clone() for key, p in model.named_parameters()}
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["query", "value", "out"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(8):
        loss = adapted(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    merged = adapted.merge_and_unload()
    changed = {key for key, p in merged.named_parameters() if not torch.equal(p, before[key])}
    assert changed == {
        f"model.layers.{i}.attention.{name}.weight" for i in (0, 1) for name in ("query", "value", "out")
    }
