"""Models as transformers models: saving and vocabulary of every kind; of language models loss, logits, positions."""

import json
import math
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, DynamicCache

from subquad.hf import SubquadEncoderForSequenceClassification, SubquadForCausalLM, SubquadForImages
from subquad.hf.encoders import SubquadForPreTraining
from subquad.models import Decoder
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import LOOPED, PIXELS, classifier, every_form, image_model, language_model, pretraining, prompt
from tests.models.small import VOCABULARY, assert_refused, mechanisms


def assert_same_model(actual, expected):
    """The same bits in the weights; outputs in float64, since products may round by where their operands lie."""
    assert type(actual) is type(expected)
    assert type(actual.model) is type(expected.model)
    assert not actual.training
    found, wanted = (dict(model.named_parameters()) | dict(model.named_buffers()) for model in (actual, expected))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert_exact(found[key], tensor, key)
    for config in (actual.config, AutoConfig.from_pretrained(actual.name_or_path)):
        assert type(config) is type(expected.config)
        for field in config.own_fields:
            assert getattr(config, field) == getattr(expected.config, field), field
    ours, theirs = (getattr(model, "decoder", model.model) for model in (actual, expected))
    assert ours.config == theirs.config
    assert getattr(ours, "config_hash", None) == getattr(theirs, "config_hash", None)
    inputs = PIXELS if isinstance(expected, SubquadForImages) else prompt()
    assert_same_maths(actual.double()(inputs)[0], expected.double()(inputs)[0])


AUTO = {
    SubquadForCausalLM: transformers.AutoModelForCausalLM, SubquadForImages: transformers.AutoModel,
    SubquadForPreTraining: transformers.AutoModelForPreTraining,
    SubquadEncoderForSequenceClassification: transformers.AutoModelForSequenceClassification,
}  # fmt: skip
logistic = partial(image_model, output="logistic", axes=True)
concatenated = partial(image_model, position="learned", position_channels=6)


@pytest.mark.parametrize("make", [
    *every_form.args[1],
    *(pytest.param(partial(classifier, p.id), id=f"classifier {p.id}", marks=p.marks)
      for p in mechanisms("bidirectional", quick=["full", "luna"])),
    *(pytest.param(partial(logistic, p.id), id=f"images {p.id}", marks=p.marks) for p in mechanisms(quick=["latte"])),
    partial(classifier, "perceiver"), partial(classifier, "perceiver_io"), pretraining, concatenated,
    partial(pretraining, "perceiver_io"),
])  # fmt: skip
def test_a_saved_model_comes_back_bit_for_bit(make, tmp_path):
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1  # unlike any first weight
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["subquad_version"] == 1
    assert_same_model(AUTO[type(model)].from_pretrained(tmp_path), model)


def test_tied_weights_are_saved_once_and_stay_tied_in_another_dtype_too(tmp_path):
    model = language_model().float()
    model.save_pretrained(tmp_path)
    shapes = {key: tensor.shape for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert [key for key, shape in shapes.items() if VOCABULARY in shape] == ["model.decoder.embedding.tokens.weight"]
    loaded, info = SubquadForCausalLM.from_pretrained(tmp_path, dtype="bfloat16", output_loading_info=True)
    assert not info["missing_keys"]
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert_same_model(loaded, model.bfloat16())
    with torch.no_grad():
        loaded.get_input_embeddings().weight.zero_()
    assert not loaded(prompt()).logits.any()


@pytest.mark.parametrize("make", [language_model, classifier, pretraining, image_model])
def test_weights_that_do_not_fit_are_refused(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    last = sorted(weights)[-1]
    for changed, message in (
        ({key: weight for key, weight in weights.items() if key != last}, f"missing keys: {last}"),
        (weights | {"more": torch.ones(2)}, "unexpected keys: more"),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            type(model).from_pretrained(tmp_path)


def test_first_weights_are_the_decoders():
    shape = {"num_layers": 8, "dim": 64, "vocab_size": 500, "init_std": 0.02}
    model = language_model(**shape)
    decoder = Decoder(model.config.decoder_config())
    assert len(list(model.parameters())) == len(list(decoder.parameters()))
    for key, weight in decoder.named_parameters():
        ours = model.decoder.get_parameter(key)
        assert math.isclose(ours.std(correction=0).item(), weight.std(correction=0).item(), rel_tol=0.15), key
    model = classifier(dim=64, num_layers=8, init_std=0.02).model
    attention = model.encoder.layers[0].attention
    for weight, std in ((attention.query, 0.02), (attention.out, 0.005), (model.head, 0.02)):
        assert 0.7 * std < weight.weight.std().item() < 1.3 * std


@pytest.mark.parametrize("make", [
    language_model, partial(language_model, tie_embeddings=False), partial(language_model, head_bias=True), classifier,
    partial(pretraining, objective="causal"),
])  # fmt: skip
def test_the_vocabulary_can_grow(make, tmp_path):
    model, tokens = make().eval(), prompt()
    before, owner = model(tokens).logits, getattr(model.model, "encoder", getattr(model, "decoder", model.model))
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    same = assert_same_maths if isinstance(model, SubquadForCausalLM) else assert_exact
    same(model(tokens).logits[..., : before.shape[-1]], before)
    owner = getattr(model, "decoder", owner)
    for config in (model.config, getattr(model, "decoder", model.model).config, owner.config):
        assert config.vocab_size == VOCABULARY + 5
    assert model.get_input_embeddings() is owner.embedding.tokens
    assert model(tokens + 5).logits.shape[-1] == (3 if make is classifier else VOCABULARY + 5)
    model.save_pretrained(tmp_path)
    assert_same_model(type(model).from_pretrained(tmp_path), model)
    with pytest.raises(ValueError, match=r"a look-up over the logits \(lookup=31\) .* cannot change"):
        language_model(lookup=31).resize_token_embeddings(VOCABULARY + 1)


@pytest.mark.parametrize("fields", [{}, LOOPED | {"loop_loss": "all"}, {"loops": 3, "loop_loss": "all"}], ids=str)
def test_the_loss_is_that_of_the_shifted_logits_of_each_pass_in_training(fields):
    model, tokens = language_model(**fields), prompt(3, 11)
    labels = tokens.clone()
    labels[0, 3:5] = -100
    decoder = model.train().decoder
    losses = [F.cross_entropy(decoder.logits(h)[:, :-1].mT, labels[:, 1:]) for h in decoder.passes(tokens)]
    assert len(losses) == fields.get("loops", 1)
    trained, counted = torch.stack(losses).mean(), (labels[:, 1:] != -100).sum()
    output = model(tokens, labels=labels, return_logits=True)
    assert_same_maths(output.loss, trained)
    assert_same_maths(output.logits, decoder(tokens)[0])
    assert_same_maths(model(tokens, labels=labels, num_items_in_batch=2 * counted).loss, trained / 2)
    for use_cache in (True, False):
        assert_same_maths(model.eval()(tokens, labels=labels, use_cache=use_cache).loss, losses[-1])
    for length in (0, 1):
        assert model(tokens[:, :length], labels=labels[:, :length]).loss.item() == 0


@every_form
def test_padding_is_as_if_removed_in_logits_and_loss(make):
    model, tokens = make(), prompt(1, 11)
    real = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0]])
    kept = tokens[real.bool()][None]
    padded, alone = model(tokens, attention_mask=real, labels=tokens), model(kept, labels=kept)
    here = real.bool() if padded.logits.shape[1] == 11 else torch.ones(1, padded.logits.shape[1], dtype=torch.bool)
    assert_same_maths(padded.logits[here], alone.logits[0])
    assert_same_maths(padded.loss, alone.loss)


def test_outputs_are_those_that_are_asked_for():
    model, tokens = language_model().train(), prompt()
    trained = model(tokens, labels=tokens)
    assert trained.logits.shape == (2, 8, VOCABULARY)
    assert trained.past_key_values is None
    whole = model(tokens).logits
    model.eval()
    assert model(tokens, labels=tokens).logits.shape == (2, 8, VOCABULARY)
    assert model(tokens, labels=tokens, return_logits=False).logits is None
    assert_exact(model(tokens, attention_mask=torch.ones_like(tokens)).logits, whole)
    assert_same_maths(model(tokens, logits_to_keep=2).logits, whole[:, -2:])
    places = torch.tensor([7, 0, 3])
    assert_same_maths(model(tokens, logits_to_keep=places).logits, whole[:, places])
    loss, logits = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    assert_exact(loss, model(tokens, labels=tokens).loss)
    assert logits.shape == (2, 8, VOCABULARY)


@pytest.mark.parametrize("make", [language_model, classifier, pretraining, image_model])
def test_checkpointing_is_switched_as_transformers_does(make):
    model = make().train()
    owner = getattr(model.model, "encoder", getattr(model.model, "decoder", model.model))
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    assert not owner.gradient_checkpointing
    switch()
    assert owner.gradient_checkpointing


def test_the_trainers_count_and_the_loss_leave_out_the_same():
    """A mean over two batches by the count of both is the mean over all labels; a count of padding is refused."""
    model, tokens = language_model(), prompt(3, 11)
    mask = torch.ones_like(tokens)
    mask[0, 8:] = mask[1, 3:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    items = (labels[:, 1:] != -100).sum()
    parts = (slice(0, 1), slice(1, 3))
    losses = [model(tokens[p], mask[p], labels=labels[p], num_items_in_batch=items).loss for p in parts]
    whole = model(tokens, attention_mask=mask, labels=labels).loss
    assert_same_maths(sum(losses), whole)
    assert_same_maths(model(tokens, attention_mask=mask, labels=tokens).loss, whole)
    left = {"attention_mask": mask.flip(1), "labels": labels.flip(1)}
    counted = (left["labels"][:, 1:] != -100).sum()
    assert counted == items + 2  # a row that begins with padding counts a label that no real token predicts
    expected = model(tokens.flip(1), **left).loss * items / counted
    assert_same_maths(model(tokens.flip(1), **left, num_items_in_batch=counted).loss, expected)
    with pytest.raises(ValueError, match=r"num_items_in_batch counts labels at padding, .* set labels to -100 where"):
        model(tokens, attention_mask=mask, labels=tokens, num_items_in_batch=items)
    assert model.accepts_loss_kwargs
    assert not language_model("perceiver_ar").accepts_loss_kwargs


def test_positions_are_counted_and_may_only_be_repeated():
    model, tokens = language_model(), prompt(3, 11)
    mask = torch.ones_like(tokens)
    mask[1, :4] = mask[2, 5] = 0
    counted = mask.cumsum(1) - 1
    expected = model(tokens, attention_mask=mask).logits
    assert_exact(model(tokens, attention_mask=mask, position_ids=counted).logits, expected)
    assert_exact(model(tokens, position_ids=torch.arange(11)[None]).logits, model(tokens).logits)
    cache = model(tokens[:, :6], attention_mask=mask[:, :6]).past_key_values
    rest = {"attention_mask": mask, "past_key_values": cache, "use_cache": False}
    model(tokens[:, 6:], position_ids=counted[:, 6:], **rest)
    for wrong in (counted + 1, counted.flip(1), torch.arange(11)[None]):
        with pytest.raises(ValueError, match="position_ids must count the row's real tokens"):
            model(tokens, attention_mask=mask, position_ids=wrong)
    with pytest.raises(ValueError, match="position_ids must count"):
        model(tokens[:, 6:], position_ids=counted[:, 6:] - 6, **rest)


def test_what_it_does_not_take_is_named():
    model, tokens = language_model(), prompt(3, 11)
    looped = language_model(loops=3, loop_loss="all").train()
    assert looped(tokens, use_cache=True).past_key_values is not None
    assert_refused(
        (lambda: model(), ValueError, "input_ids is needed"),
        (lambda: model(tokens, inputs_embeds=torch.zeros(3, 11, 16)), ValueError, "two forms of one input"),
        (lambda: model(tokens, output_attentions=True), ValueError, "output_attentions is not supported"),
        (lambda: model(tokens, labels=tokens[:, 1:]), ValueError, r"shape of the tokens, \[3, 11\], got \[3, 10\]"),
        (lambda: model(tokens, torch.ones(3, 4)), ValueError, r"must have shape \[3, 11\].* got \[3, 4\]"),
        (lambda: model(tokens, past_key_values=DynamicCache()), TypeError, "hf.SubquadCache, got DynamicCache"),
        (lambda: model(tokens, position_ids=tokens[:, :4]), ValueError, r"must have shape \[3, 11\], got \[3, 4\]"),
        (lambda: model(tokens, logits_to_keep=-1), ValueError, "logits_to_keep must be at least 0 .*, got -1"),
        (lambda: model(tokens, logits_to_keep=torch.ones(2)), TypeError, r"got a tensor \[2\] of torch.float32"),
        (lambda: looped(tokens, labels=tokens, use_cache=True), ValueError, "loop_loss='all' trains on every pass"),
    )
