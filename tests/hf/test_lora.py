"""Adapters: their layers, their files, several of them on one base, and what is refused."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from subquad.attention import mechanism, names
from subquad.hf import SubquadCache, lora
from subquad.models.stacks import STACKS
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import classifier, image_model, language_model, perceiver_ar, prompt
from tests.models.small import KINDS, assert_refused

FORMS = {name: mechanism(name).forms for name in names()} | {name: stack.forms for name, stack in STACKS.items()}
QUICK = {*((name, "causal") for name in (*KINDS, "perceiver_ar")), ("perceiver_io", "bidirectional")}
IDS = prompt(2, 12)


def filled(adapted, seed=1):
    """Factors that change the outputs, as training leaves them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted.double().eval()


def adapted_from(model, seed=1, **options):
    return filled(lora.add_adapter(model, **{"rank": 2} | options), seed)


@torch.no_grad()
def logits(model, **options):
    return model.double().eval()(IDS, **options).logits


def make(name, form):
    if form == "bidirectional":
        return classifier(name, num_layers=1).double()
    return perceiver_ar("compressed") if name == "perceiver_ar" else language_model(name)


def test_targets_are_named_by_their_ends_or_by_expressions():
    model, read = language_model(tie_embeddings=False, lookup=4), perceiver_ar("compressed")
    assert lora.targets(model, ["query"]) == [f"model.decoder.layers.{i}.attention.query" for i in range(2)]
    assert lora.targets(model, ["feedforward.up"]) == [f"model.decoder.layers.{i}.feedforward.up" for i in range(2)]
    last = [f"model.decoder.layers.1.attention.{name}" for name in ("key", "value")]
    assert lora.targets(model, [r".*layers\.1\..*(key|value)"]) == last
    every = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert every - set(lora.targets(model)) == {"lm_head", "lookup.up", "lookup.down"}
    assert lora.targets(model, ["lookup.up", "lm_head"]) == ["lookup.up", "lm_head"]
    assert lora.targets(read, ["compress"]) == ["model.decoder.compress"]
    assert lora.targets(classifier(), ["head"]) == ["model.head"]
    assert not [name for name in lora.targets(read) if "compress" in name]
    assert not [name for name in lora.targets(image_model(near=0)) if "head" in name or "embedding" in name]
    assert_refused(
        (lambda: lora.targets(model, ["attention.qeury"]), ValueError, "'; did you mean 'attention.query'"),
        (lambda: lora.targets(model, ["(query"]), ValueError, "neither a layer's name nor a regular expression"),
        # Merged factors of a tied head would change the embeddings.
        (lambda: lora.targets(language_model(), ["lm_head"]), ValueError, "lm_head is tied to the embeddings"),
    )


def idle(adapted, name):
    """Factors that change no output: those of a layer whose matrix is read without a call."""
    parts = {key: p for key, p in adapted.named_parameters() if "lora_B" in key}
    gradients = torch.autograd.grad(adapted(IDS).logits.square().sum(), list(parts.values()), allow_unused=True)
    found = [key for key, g in zip(parts, gradients, strict=True) if g is None or not g.any()]
    if name == "longformer":  # one global token: what it asks and where it looks changes nothing
        found = [key for key in found if ".global_query." not in key and ".global_key." not in key]
    return found


@pytest.mark.parametrize(("name", "form"), [
    pytest.param(name, form, marks=[] if (name, form) in QUICK else pytest.mark.slow)
    for name, forms in FORMS.items() for form in forms
])  # fmt: skip
def test_an_adapter_changes_the_model_by_its_factors_alone(name, form):
    model = make(name, form)
    before, parameters = logits(model), list(model.parameters())
    weights, named = [p.detach().clone() for p in parameters], lora.targets(model)
    adapted = lora.add_adapter(model, rank=2)
    assert_same_maths(logits(adapted), before, "a fresh adapter changes nothing")
    assert idle(adapted, name) == []
    assert sum("lora_B" in key for key, _ in adapted.named_parameters()) == len(named)
    changed = logits(filled(adapted))
    assert not torch.equal(changed, before)
    with adapted.disable_adapter():
        assert_same_maths(logits(model), before, "the base without its adapter")
    for parameter, weight in zip(parameters, weights, strict=True):
        assert_exact(parameter, weight, "the base's weights")
        assert not parameter.requires_grad
    if form == "causal":
        cache = SubquadCache()
        parts = torch.cat([adapted(input_ids=token, past_key_values=cache).logits for token in IDS.split(1, 1)], 1)
        exact = 1 if name == "perceiver_ar" else 12  # its last token alone sees all latents
        assert_same_maths(parts[:, -exact:].detach(), changed[:, -exact:], "token by token")
    assert_same_maths(logits(lora.merge(adapted)), changed, "merged")


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"rslora": True}, {"alpha": 3, "wanted": ["out"]}], ids=str)
def test_an_adapter_is_written_and_read_back(kind, tmp_path):
    from peft import PeftModel

    language_model().save_pretrained(tmp_path / "base")
    adapted = adapted_from(lora.load_base(tmp_path / "base"), rank=3, base=lora.Base.of(tmp_path / "base"), **kind)
    lora.save_adapter(adapted, tmp_path / "one")
    written = {path.name for path in (tmp_path / "one").iterdir()}
    assert written == {"adapter_config.json", "adapter_model.safetensors", "base.json"}
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert (config["use_dora"], config["use_rslora"]) == (kind.get("dora", False), kind.get("rslora", False))
    assert config["lora_alpha"] == kind.get("alpha", 6)
    assert_exact(logits(lora.open_adapter(tmp_path / "one")), logits(adapted))
    if not kind:
        with warnings.catch_warnings():
            # PEFT's own question to transformers, which only newer versions mind.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            assert_exact(logits(PeftModel.from_pretrained(language_model(), tmp_path / "one")), logits(adapted))


def test_several_adapters_on_one_base_are_switched_by_peft(tmp_path):
    base, alone = logits(language_model()), {}
    for seed, name in ((1, "default"), (2, "second")):
        adapted = adapted_from(language_model(), seed, rank=seed)
        lora.save_adapter(adapted, tmp_path / name)
        alone[name] = logits(adapted)
    model = lora.load_adapter(language_model(), tmp_path / "default")
    model.load_adapter(tmp_path / "second", adapter_name="second")
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        assert_exact(logits(model), alone[name])
        with model.disable_adapter():
            assert_exact(logits(model), base)


def test_other_classes_get_a_head_that_goes_with_the_adapter(tmp_path):
    classifier().save_pretrained(tmp_path / "base")
    classes = ["a", "b", "c", "d", "e"]
    model = lora.load_base(tmp_path / "base", classes)
    assert model.config.id2label == dict(enumerate(classes))
    base = load_file(tmp_path / "base" / "model.safetensors")
    for name, weight in model.state_dict().items():
        if not name.startswith("model.head."):
            assert_exact(weight, base[name], name)
    adapted = adapted_from(model, train_head=True, base=lora.Base.of(tmp_path / "base", classes))
    lora.save_adapter(adapted, tmp_path / "adapter")
    assert logits(adapted).shape == (2, 5)
    again = lora.open_adapter(tmp_path / "adapter")
    assert_exact(logits(again), logits(adapted))
    assert_same_maths(logits(lora.merge(again)), logits(adapted))


def test_damaged_adapters_are_refused(tmp_path):
    language_model().save_pretrained(tmp_path / "base")
    good, damaged = tmp_path / "good", tmp_path / "damaged"
    lora.save_adapter(adapted_from(language_model(), base=lora.Base.of(tmp_path / "base")), good)
    shutil.copytree(good, damaged)
    weights = load_file(good / "adapter_model.safetensors")
    first, shallow = next(iter(weights)), language_model()
    shallow.model.decoder.layers = shallow.model.decoder.layers[:1]

    def load(folder=damaged):
        return lora.load_adapter(language_model(), folder)

    for changed, message in (
        ({key: w for key, w in weights.items() if key != first}, "does not fit the model: missing: base_model.model"),
        (weights | {"other": torch.zeros(1)}, "does not fit the model: left over: other"),
        (weights | {first: torch.zeros(1, 1)}, r"has shape \[1, 1\], the model's is"),
    ):
        save_file(changed, damaged / "adapter_model.safetensors")
        assert_refused((load, ValueError, message))
    (damaged / "adapter_model.safetensors").write_bytes(b"x")
    assert_refused((load, ValueError, r"damaged/adapter_model.safetensors is damaged"))
    (damaged / "adapter_model.safetensors").unlink()
    assert_refused((load, FileNotFoundError, "holds no adapter_model.safetensors"))
    for text in ("{", '{"peft_type": "NOPE"}', '{"peft_type": "LORA", "r": 0}', '{"peft_type": "IA3"}'):
        (damaged / "adapter_config.json").write_text(text)
        assert_refused((load, ValueError, "damaged/adapter_config.json is no configuration of a LoRA adapter"))
    assert_refused(
        (lambda: load(tmp_path / "base"), FileNotFoundError, "holds no adapter_config.json, so no adapter"),
        (
            lambda: lora.load_adapter(shallow, good),
            ValueError,
            "the model, which has no layer model.decoder.lay",
        ),
        (lambda: lora.add_adapter(shallow, rank=2, train_head=True), ValueError, "train_head is for classifiers, and "),
    )


def test_a_base_that_is_missing_or_another_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    language_model().save_pretrained("runs/base")
    record = lora.Base.of("runs/base")
    lora.save_adapter(lora.add_adapter(language_model(), rank=2, base=record), "runs/adapter")
    assert lora.Base.read("runs/adapter") == record
    elsewhere, moved, project = tmp_path / "elsewhere", tmp_path / "moved", tmp_path / "project" / "runs"
    elsewhere.mkdir()
    shutil.move(tmp_path / "runs", moved)
    shutil.copytree(moved, project)
    monkeypatch.chdir(elsewhere)
    assert record.find(project / "adapter") == project / "base"
    (elsewhere / "runs").mkdir()
    language_model(seed=1).save_pretrained("runs/base")  # another model at the same relative path
    assert record.find(project / "adapter") == project / "base"
    shutil.rmtree("runs")
    language_model(seed=1).save_pretrained(project / "base")
    (moved / "adapter" / "base.json").write_text('{"path": 3}')
    assert_refused(
        (lambda: record.find(moved / "adapter"), FileNotFoundError, "of the model in runs/base, which is not there"),
        (lambda: record.find(project / "adapter"), ValueError, "was trained on other weights than those in"),
        (lambda: lora.weights_digest(elsewhere), FileNotFoundError, "holds no weights"),
        (lambda: lora.Base.read(elsewhere), FileNotFoundError, "holds no base.json, which names the model"),
        (lambda: lora.Base.read(moved / "adapter"), ValueError, "base.json is damaged: 'path' must be a str, got 3"),
    )
    shutil.copytree(moved, "runs")
    assert record.find(project / "adapter") == Path("runs/base"), "the changed base above the adapter is passed over"


def test_folders_without_a_base_are_named_by_what_they_hold(tmp_path):
    for name in ("adapter", "gpt2"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    classifier().save_pretrained(tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    weights.pop(next(name for name in weights if "query" in name))
    save_file(weights, tmp_path / "damaged" / "model.safetensors")
    assert_refused(
        (lambda: lora.base_config(tmp_path / "none"), FileNotFoundError, "no folder .*none; lora.base is the folder"),
        (lambda: lora.base_config(tmp_path), FileNotFoundError, "holds no config.json, so no trained model"),
        (lambda: lora.base_config(tmp_path / "adapter"), ValueError, "holds an adapter, no model of its own: merge it"),
        (lambda: lora.base_config(tmp_path / "gpt2"), ValueError, "type 'gpt2'; lora.base must be a model of subquad"),
        (lambda: lora.load_base(tmp_path / "damaged", ["a", "b"]), ValueError, "do not fit its configuration: model.e"),
    )


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ImportError, match=r"LoRA needs peft, which is not installed: .* -m pip install 'subquad\[peft\]'"
    ):
        lora.add_adapter(language_model(), rank=2)
