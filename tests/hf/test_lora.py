"""Adapters: their layers, their files, several of them on one base, and what is refused."""

import builtins
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from subquad.hf import SubquadForImages, lora
from subquad.hf.image import SubquadImageConfig
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.adapted import classifier, filled, language_model, logits


def test_targets_are_named_by_their_ends_or_by_expressions():
    model = language_model()
    assert lora.targets(model, ["query"]) == [f"model.layers.{i}.attention.query" for i in range(2)]
    assert lora.targets(model, ["feedforward.up"]) == [f"model.layers.{i}.feedforward.up" for i in range(2)]
    assert lora.targets(model, [r".*layers\.1\..*(key|value)"]) == [
        "model.layers.1.attention.key",
        "model.layers.1.attention.value",
    ]
    with pytest.raises(ValueError, match=r"no linear layer is called 'qeury'; did you mean|valid: attention.key"):
        lora.targets(model, ["qeury"])
    with pytest.raises(ValueError, match="neither a layer's name nor a regular expression"):
        lora.targets(model, ["(query"])
    perceiver = language_model("perceiver_ar")
    assert not [name for name in lora.targets(perceiver) if "compress" in name]
    with pytest.raises(ValueError, match=r"model.compress cannot have factors: its matrix is read"):
        lora.targets(perceiver, ["compress"])


def test_heads_and_look_ups_get_factors_only_when_they_are_named():
    model = language_model(tie_embeddings=False, lookup=4)
    left_out = {"model.head", "model.lookup.up", "model.lookup.down"}
    every = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert every - set(lora.targets(model)) == left_out
    assert lora.targets(model, ["lookup.up"]) == ["model.lookup.up"]
    with pytest.raises(ValueError, match=r"model.head cannot have factors: its matrix is read"):  # they'd do nothing
        lora.targets(model, ["head"])
    assert lora.targets(classifier(), ["head"]) == ["model.head"]


@pytest.mark.parametrize("kind", [{}, {"dora": True}, {"rslora": True}, {"alpha": 3, "wanted": ["query", "out"]}])
def test_an_adapter_is_written_and_read_back(kind, tmp_path):
    language_model().save_pretrained(tmp_path / "base")
    model = lora.load_base(tmp_path / "base").double().eval()
    adapted = filled(lora.add_adapter(model, rank=3, base=lora.Base.of(tmp_path / "base"), **kind))
    lora.save_adapter(adapted, tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "base.json",
    ]  # fmt: skip
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert (config["use_dora"], config["use_rslora"]) == (kind.get("dora", False), kind.get("rslora", False))
    assert config["lora_alpha"] == kind.get("alpha", 6)
    again = lora.open_adapter(tmp_path / "one").double().eval()
    assert_exact(logits(again), logits(adapted))


def test_peft_reads_the_folder_itself(tmp_path):
    from peft import PeftModel

    adapted = filled(lora.add_adapter(language_model(), rank=2))
    lora.save_adapter(adapted, tmp_path)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # PEFT's own question to transformers
        again = PeftModel.from_pretrained(language_model(), tmp_path)
    assert_exact(logits(again.double().eval()), logits(adapted))


def test_several_adapters_on_one_base_are_switched_by_peft(tmp_path):
    base = logits(language_model())
    alone = []
    for seed in (1, 2):
        adapted = filled(lora.add_adapter(language_model(), rank=seed), seed)
        lora.save_adapter(adapted, tmp_path / str(seed))
        alone.append(logits(adapted))
    model = lora.load_adapter(language_model(), tmp_path / "1").double().eval()
    model.load_adapter(tmp_path / "2", adapter_name="second")
    model.double()
    assert_exact(logits(model), alone[0])
    model.set_adapter("second")
    assert_exact(logits(model), alone[1])
    with model.disable_adapter():
        assert_exact(logits(model), base)
    model.set_adapter("default")
    assert_exact(logits(model), alone[0])


def test_other_classes_get_a_head_that_goes_with_the_adapter(tmp_path):
    classifier().save_pretrained(tmp_path / "base")
    classes = ["a", "b", "c", "d", "e"]
    model = lora.load_base(tmp_path / "base", classes).double().eval()
    assert model.config.id2label == dict(enumerate(classes))
    base = load_file(tmp_path / "base" / "model.safetensors")
    for name, weight in model.state_dict().items():
        if not name.startswith("model.head."):
            assert_exact(weight, base[name], name)
    record = lora.Base.of(tmp_path / "base", classes)
    adapted = filled(lora.add_adapter(model, rank=2, train_head=True, base=record))
    lora.save_adapter(adapted, tmp_path / "adapter")
    assert logits(adapted).shape == (2, 5)
    assert_exact(logits(lora.open_adapter(tmp_path / "adapter").double().eval()), logits(adapted))
    merged = lora.merge(lora.open_adapter(tmp_path / "adapter").double().eval())
    assert_same_maths(logits(merged), logits(adapted))


def test_a_model_of_images_takes_an_adapter(tmp_path):
    torch.manual_seed(0)
    config = SubquadImageConfig(
        dim=16,
        num_layers=1,
        num_heads=2,
        attention="linear",
        position="none",
        height=4,
        width=4,
        channels=1,
        init_std=0.3,
    )
    model = SubquadForImages(config).double().eval()
    pixels = torch.arange(32).view(2, 16)
    model.save_pretrained(tmp_path / "base")
    adapted = filled(lora.add_adapter(model, rank=2, base=lora.Base.of(tmp_path / "base")))
    assert not [name for name in lora.targets(SubquadForImages(config)) if "head" in name or "embedding" in name]
    lora.save_adapter(adapted, tmp_path / "adapter")
    again = lora.open_adapter(tmp_path / "adapter").double().eval()
    with torch.no_grad():
        assert_exact(again(input_ids=pixels, labels=pixels).loss, adapted(input_ids=pixels, labels=pixels).loss)


def test_what_does_not_fit_is_refused(tmp_path):
    language_model().save_pretrained(tmp_path / "base")
    base = lora.Base.of(tmp_path / "base")
    lora.save_adapter(filled(lora.add_adapter(language_model(), rank=2, base=base)), tmp_path / "good")
    with pytest.raises(ValueError, match="train_head is for classifiers, and this is a SubquadForCausalLM"):
        lora.add_adapter(language_model(), rank=2, train_head=True)
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_config.json, so no adapter"):
        lora.load_adapter(language_model(), tmp_path / "base")
    shallow = language_model()
    shallow.model.layers = shallow.model.layers[:1]
    with pytest.raises(ValueError, match=r"does not fit the model, which has no layer model.layers.1"):
        lora.load_adapter(shallow, tmp_path / "good")

    def changed(name, change):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        weights = load_file(folder / "adapter_model.safetensors")
        change(weights)
        save_file(weights, folder / "adapter_model.safetensors")
        return folder

    first = next(iter(load_file(tmp_path / "good" / "adapter_model.safetensors")))
    for name, change, message in (
        ("missing", lambda w: w.pop(first), "does not fit the model: missing: base_model.model.model.layers"),
        ("left over", lambda w: w.update(other=torch.zeros(1)), "does not fit the model: left over: other"),
        ("shape", lambda w: w.update({first: torch.zeros(1, 1)}), r"has shape \[1, 1\], the model's is"),
    ):
        with pytest.raises(ValueError, match=message):
            lora.load_adapter(language_model(), changed(name, change))
    (tmp_path / "shape" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"shape/adapter_model.safetensors is damaged"):
        lora.load_adapter(language_model(), tmp_path / "shape")
    for text in ("{", '{"peft_type": "NOPE"}', '{"peft_type": "LORA", "r": 0}', '{"peft_type": "IA3"}'):
        (tmp_path / "shape" / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"shape/adapter_config.json is no configuration of a LoRA adapter"):
            lora.load_adapter(language_model(), tmp_path / "shape")
    (tmp_path / "good" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_model.safetensors"):
        lora.load_adapter(language_model(), tmp_path / "good")


def test_a_base_that_is_not_there_or_not_the_same_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    language_model().save_pretrained("runs/base")
    record = lora.Base.of("runs/base")
    lora.save_adapter(lora.add_adapter(language_model(), rank=2, base=record), "runs/adapter")
    assert lora.Base.read("runs/adapter") == record
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "project" / "runs")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert record.find(tmp_path / "project" / "runs" / "adapter") == tmp_path / "project" / "runs" / "base"
    (tmp_path / "elsewhere" / "runs").mkdir()
    language_model(seed=1).save_pretrained("runs/base")  # another model at the same relative path
    assert record.find(tmp_path / "project" / "runs" / "adapter") == tmp_path / "project" / "runs" / "base"
    shutil.rmtree("runs")
    with pytest.raises(FileNotFoundError, match="is an adapter of the model in runs/base, which is not there"):
        record.find(tmp_path / "moved" / "adapter")
    language_model(seed=1).save_pretrained(tmp_path / "project" / "runs" / "base")
    with pytest.raises(ValueError, match="was trained on other weights than those in"):
        record.find(tmp_path / "project" / "runs" / "adapter")
    with pytest.raises(FileNotFoundError, match=r"holds no weights"):
        lora.weights_digest(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"holds no base.json, which names the model"):
        lora.Base.read(tmp_path / "elsewhere")
    (tmp_path / "moved" / "adapter" / "base.json").write_text('{"path": 3}')
    with pytest.raises(ValueError, match=r"base.json is damaged: 'path' must be a str, got 3"):
        lora.Base.read(tmp_path / "moved" / "adapter")


def test_what_is_no_base_is_answered_with_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none; lora.base is the folder of a run"):
        lora.base_config(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds no config.json, so no trained model"):
        lora.base_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter, no model of its own: merge it first"):
        lora.base_config(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"holds a model of type 'gpt2'; lora.base must be a model of subquad"):
        lora.base_config(tmp_path / "other")
    classifier().save_pretrained(tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    weights.pop(next(name for name in weights if "query" in name))
    save_file(weights, tmp_path / "damaged" / "model.safetensors")
    with pytest.raises(ValueError, match=r"do not fit its configuration: model.encoder"):
        lora.load_base(tmp_path / "damaged", ["a", "b"])


def test_without_peft_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "peft":
            raise ImportError("no peft")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"LoRA needs PEFT: pip install 'subquad\[peft\]'"):
        lora.add_adapter(language_model(), rank=2)
