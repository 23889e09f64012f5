"""The model of images as a transformers model."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from subquad.attention import mechanism, names
from subquad.hf import SubquadForImages
from subquad.hf.image import SubquadImageConfig
from subquad.models import ImageModelConfig
from subquad.testing import assert_exact

CAUSAL = [name for name in names() if "causal" in mechanism(name).forms]


def tiny(name="linear", **fields):
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "position": "none", "height": 4, "width": 4, "near": 1}
    torch.manual_seed(0)
    return SubquadForImages(SubquadImageConfig.from_image(ImageModelConfig(attention=name, **(shape | fields)))).eval()


PIXELS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_saved_model_comes_back_bit_for_bit(name, tmp_path):
    model = tiny(name, output="logistic", axes=True)
    with torch.no_grad():
        model.model.bias += 0.1
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadForImages)
    assert_exact(loaded(PIXELS).parameters, model(PIXELS).parameters)
    assert loaded.config.image_config() == model.config.image_config()


def test_the_configuration_is_found_by_its_type(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, SubquadImageConfig)
    assert (config.height, config.near, config.output) == (4, 1, "categorical")


def test_first_weights_are_the_model_s_own():
    model = tiny(output="logistic", mixtures=2).model
    assert_exact(model.bias.detach(), model.output.first_biases())


def test_the_loss_is_the_model_s():
    model = tiny()
    output = model(PIXELS, labels=PIXELS)
    assert_exact(output.loss, model.model.loss(PIXELS))
    assert output.parameters is None
    assert_exact(model(PIXELS, labels=PIXELS, return_dict=False)[0], output.loss)
    assert model(PIXELS).parameters.shape == (2, 16, 256)
    assert model.get_input_embeddings().num_embeddings == 257


def test_training_may_compute_twice():
    model = tiny().train()
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch()
    model(PIXELS, labels=PIXELS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_that_do_not_fit_are_refused(tmp_path):
    tiny().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "model.bias"}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: model\.bias"):
        SubquadForImages.from_pretrained(tmp_path)


def test_mistakes():
    with pytest.raises(ValueError, match="input_ids is needed: the bytes of images"):
        tiny()()
    with pytest.raises(ValueError, match="has no field 'heigth'; did you mean 'height'"):
        SubquadImageConfig(attention="linear", position="none", heigth=3)
    with pytest.raises(ValueError, match="output must be one of its choices, got 'gaussian'"):
        SubquadImageConfig(attention="linear", position="none", output="gaussian")
