"""Modules are called, never read: what is attached to the call of any module has its effect in every model."""

import copy
import logging
import re
import tempfile
import warnings
from functools import partial

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, prune

from subquad.attention import mechanism, names
from subquad.generation import BatchDecoder, SamplingConfig, generate
from subquad.generation.static_step import log_not_recorded
from subquad.hf import SubquadForCausalLM
from subquad.hf.lora import put_adapter
from subquad.layers.attached import attached
from subquad.layers.criterion import IGNORED, CrossEntropy, log_called
from subquad.ops.padding import Lengths
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import PIXELS, classifier, image_model, language_model, perceiver_ar, pretraining, prompt
from tests.models.small import HISTORIES, KINDS, VOCABULARY

CAUSAL = [name for name in names() if "causal" in mechanism(name).forms]
LANGUAGE = {name: partial(language_model, name, num_layers=2) for name in CAUSAL}
LANGUAGE |= {f"perceiver_ar {history}": partial(perceiver_ar, history) for history in HISTORIES}
LANGUAGE |= {
    "untied": partial(language_model, "latte", tie_embeddings=False, head_bias=True),
    "looped": partial(language_model, "gla", loops=2, lookup=31, feedforward="bilinear"),
    "post": partial(language_model, "luna", norm_position="post"),
    "mixed": partial(language_model, ["luna", "window"], num_layers=4),
}
OTHER = {
    "classifier": classifier, "class token": partial(classifier, pooling="class"),
    "pair": partial(classifier, "luna"), "perceiver": partial(classifier, "perceiver"),
    "pretraining": pretraining, "perceiver_io": partial(pretraining, "perceiver_io"),
    "images": image_model, "images apart": partial(image_model, output="logistic"),
}  # fmt: skip
FEW = (*KINDS, "mamba2", "elita", "perceiver_ar self", "untied")
SOME = [pytest.param(LANGUAGE[name], id=name) for name in FEW]
ALL = [
    pytest.param(make, id=name, marks=[] if name in FEW or name in OTHER else pytest.mark.slow)
    for name, make in (LANGUAGE | OTHER).items()
]


def inputs_of(model):
    return PIXELS if "images" in type(model).__name__.lower() else prompt()


def with_parameters(model):
    return {
        path: module
        for path, module in model.named_modules()
        if [*module.parameters()] and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    }


def called(model, run):
    """Paths of the modules that a run calls."""
    fired, hooks = set(), []
    for path, module in with_parameters(model).items():
        hooks.append(module.register_forward_hook(lambda *_, path=path: fired.add(path)))
    run()
    for hook in hooks:
        hook.remove()
    return fired


@torch.no_grad()
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in OTHER.items()])
def test_every_module_with_weights_is_called(make):
    model = make().eval()
    assert called(model, lambda: model(inputs_of(model))) == set(with_parameters(model))


@torch.no_grad()
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in LANGUAGE.items()])
def test_every_module_is_called_with_labels_and_in_each_decoding_step(make):
    model, tokens = make(), prompt()
    every = set(with_parameters(model))
    assert called(model, lambda: model(tokens, labels=tokens, use_cache=False)) == every
    cache = model(tokens).past_key_values
    fired = called(model, lambda: model(tokens[:, :1], past_key_values=cache))
    # What only a history, a first half segment or a global token needs is not called for a later token.
    spared = {path for path in every if re.search("history|compress|first_|global_", path)}
    assert every - spared <= fired


@torch.no_grad()
@pytest.mark.parametrize("make", ALL)
def test_offloaded_weights_give_the_same_bits(make):
    model = make().eval()
    inputs = inputs_of(model)
    expected = model(inputs)[0]
    assert_exact(cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))(inputs)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("make", SOME)
def test_weights_on_disk_give_the_same_bits_and_texts(make, tmp_path):
    model, tokens, cpu = make(), prompt(), torch.device("cpu")
    away = disk_offload(copy.deepcopy(model), str(tmp_path / "all"), execution_device=cpu)
    assert_exact(away(tokens).logits, model(tokens).logits)
    text = list(generate(model.decoder, [1, 2, 3], max_new_tokens=4, temperature=0))
    assert list(generate(away.decoder, [1, 2, 3], max_new_tokens=4, temperature=0)) == text
    if not model.config.tie_embeddings:  # transformers' own models can't place a tied head apart either
        model.save_pretrained(tmp_path)
        places = {"model": "cpu", "lm_head": "disk"}
        with tempfile.TemporaryDirectory() as folder:
            split = SubquadForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=folder)
            assert split.lm_head.weight.device.type == "meta"
            assert_exact(split.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("make", SOME)
def test_factors_on_the_head_and_in_the_layers_train_and_merge(make):
    torch.manual_seed(0)
    model, tokens = make().train(), prompt()
    words = ["value"] if model.config.tie_embeddings else ["value", "lm_head"]
    adapted = put_adapter(model, LoraConfig(r=2, target_modules=words, init_lora_weights=False))
    adapted(input_ids=tokens, labels=tokens, return_logits=False).loss.backward()
    missing = [name for name, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert not [name for name in missing if "history" not in name]
    adapted.eval()
    before = adapted(input_ids=tokens).logits
    with adapted.disable_adapter():
        assert not torch.equal(adapted(input_ids=tokens).logits, before)
    assert_same_maths(adapted.merge_and_unload()(input_ids=tokens).logits, before)


@pytest.mark.parametrize("change", [
    lambda linear: prune.l1_unstructured(linear, "weight", 0.3), parametrizations.weight_norm,
    parametrizations.spectral_norm,
], ids=["pruning", "weight norm", "spectral norm"])  # fmt: skip
def test_a_changed_weight_counts_in_logits_and_loss(change):
    for make in (LANGUAGE["untied"], LANGUAGE["mamba2"], LANGUAGE["perceiver_ar self"]):
        model, tokens = make(tie_embeddings=False) if make is LANGUAGE["mamba2"] else make(), prompt()
        linear = [model.lm_head] if make is LANGUAGE["untied"] else []
        linear.append(model.model.decoder.layers[0].attention.value)
        for each in linear:
            change(each)
        model.train()
        for _ in range(2):  # hooks that compute the weight do so for each forward pass
            output = model(tokens, labels=tokens)
            output.loss.backward()
        assert all(p.grad is not None for p in linear[0].parameters())
        if make is not LANGUAGE["perceiver_ar self"]:
            output = model.eval()(tokens, labels=tokens)
            shifted = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            assert_same_maths(output.loss, shifted)


@torch.no_grad()
def test_dynamic_quantisation_replaces_all_linear_layers():
    model, tokens = LANGUAGE["untied"]().float(), prompt()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao says that it will move
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not [module for module in small.modules() if type(module) is nn.Linear]
    assert small(tokens, labels=tokens).loss.isfinite()
    assert list(generate(small.decoder, [1, 2, 3], max_new_tokens=3, temperature=0))


def test_a_hook_on_the_head_reaches_the_loss_on_every_chunk(monkeypatch, caplog):
    """Halving the logits by a hook halves them in the loss too, and the log says why the weights are not read."""
    torch.manual_seed(0)
    head, h, labels = nn.Linear(8, 11).double(), torch.randn(1, 40, 8).double(), torch.randint(0, 11, (1, 40))
    labels[0, 5] = IGNORED
    plain = CrossEntropy()([h], labels, head, None, 11)
    assert_same_maths(plain, nn.functional.cross_entropy(head(h)[0], labels[0]))
    halved = nn.functional.cross_entropy(head(h)[0] / 2, labels[0], ignore_index=IGNORED)
    head.register_forward_hook(lambda module, inputs, output: output / 2)
    monkeypatch.setattr("subquad.ops.loss.CHUNK_ENTRIES", 8 * 11)
    log_called.cache_clear()
    with caplog.at_level(logging.INFO):
        assert_same_maths(CrossEntropy()([h], labels, head, None, 11), halved)
    assert (
        "the loss calls the head on chunks of tokens, and does not read its weights: the model has a hook"
        in caplog.text
    )


def test_what_is_attached_is_named():
    cases = {
        "1 has a hook": lambda m: m[1].register_forward_pre_hook(lambda *_: None),
        "0 has another forward": lambda m: setattr(m[0], "forward", m[0].forward),
        "0 is parametrised": lambda m: parametrizations.weight_norm(m[0]),
    }
    for message, change in cases.items():
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        assert attached(model) is None
        change(model)
        assert attached(model) == message
    adapted = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    assert attached(adapted) == "base_model.model.0 has an adapter"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert attached(nn.Linear(2, 2)) == "all modules have a hook"
    handle.remove()
    assert attached(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", ["latte", "window", "gated_delta_net"])
def test_a_decoding_step_is_recorded_only_where_nothing_is_attached(name, caplog):
    model = language_model(name, position="none").decoder
    sampling = SamplingConfig(max_tokens=6, temperature=0)

    def texts():
        caplog.clear()
        decoder = BatchDecoder(model, slots=2, max_context=32)
        requests = [decoder.add(tokens, sampling) for tokens in ([1, 2, 3], [4, 5])]
        decoder.run()
        return [request.tokens for request in requests], caplog.text

    with caplog.at_level(logging.INFO):
        recorded, said = texts()
        assert "the decoding step is recorded: " in said
        calls = []
        log_not_recorded.cache_clear()
        handle = model.layers[0].attention.value.register_forward_hook(lambda *_: calls.append(1))
        called, said = texts()
        assert "are not recorded: layers.0.attention.value has a hook" in said
        assert called == recorded
        assert len(calls) >= 6
        handle.remove()


def test_layers_take_the_layouts_that_a_model_makes():
    for name in ("latte", "window", "luna"):
        layer = mechanism(name).from_config(mechanism(name).config_of(dim=8, num_heads=2)).double()
        x, lengths = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([5, 3])
        y, state = layer(x, mask=torch.arange(5) < lengths[:, None])
        z, after = layer(x, mask=Lengths(lengths))
        assert_exact(z[1, :3], y[1, :3])
        assert_exact(after.seen, state.seen)
    assert VOCABULARY > 5


DEVICE_MAPS = [{"model": "disk"}, {"model": "cpu"}, {"model.decoder": "cpu"}]


@pytest.mark.parametrize("device_map", DEVICE_MAPS, ids=str)
def test_a_device_map_with_the_head_on_disk_gives_the_same_bits_and_texts(device_map, tmp_path):
    model = language_model("llp", tie_embeddings=False)
    logits, text = model(prompt()).logits, list(generate(model.decoder, [1, 2], max_new_tokens=4, temperature=0.0))
    dispatch_model(model, device_map | {"lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert_exact(model(prompt()).logits, logits)
    assert_exact(model.decoder(prompt())[0], logits)
    assert list(generate(model.decoder, [1, 2], max_new_tokens=4, temperature=0.0)) == text


def test_generation_restores_the_mode_of_each_module():
    model = language_model("llp", dropout=0.5).train()
    decoder = model.decoder
    model.eval()
    list(generate(decoder, [1, 2, 3], max_new_tokens=2))
    assert not any(module.training for module in model.modules())


def test_a_conversion_keeps_a_tied_head_tied_and_another_head_apart():
    model = language_model("llp")
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    before = model(prompt()).logits
    model.decoder.float()
    assert_exact(model.double()(prompt()).logits, before)
    model = language_model("llp")
    model.set_output_embeddings(nn.Linear(16, model.config.vocab_size, bias=False))
    assert model.double().lm_head.weight is not model.get_input_embeddings().weight
    model = language_model("llp")
    assert model.to_empty(device="cpu").lm_head.weight is model.get_input_embeddings().weight
