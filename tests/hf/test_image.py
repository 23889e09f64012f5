"""The image model as a transformers model."""

import pytest
import torch
from transformers import AutoConfig, AutoModel

from subquad.hf import SubquadForImages
from subquad.hf.image import SubquadImageConfig
from subquad.models import ImageModelConfig
from subquad.testing import assert_exact
from tests.models.small import assert_refused, mechanisms

PIXELS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))


def image_model(name="linear", **fields):
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "position": "none", "height": 4, "width": 4, "near": 1}
    torch.manual_seed(0)
    return SubquadForImages(SubquadImageConfig.from_image(ImageModelConfig(attention=name, **(shape | fields)))).eval()


@pytest.mark.parametrize("name", mechanisms(quick=["latte"]))
def test_a_saved_model_comes_back_bit_for_bit(name, tmp_path):
    model = image_model(name, output="logistic", axes=True)
    with torch.no_grad():
        model.model.bias += 0.1
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadForImages)
    assert_exact(loaded(PIXELS).parameters, model(PIXELS).parameters)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, SubquadImageConfig)
    assert (config.height, config.near, config.output) == (4, 1, "logistic")
    assert config.image_config() == loaded.config.image_config() == model.config.image_config()


def test_loss_and_first_weights_are_the_models():
    model = image_model(output="logistic", mixtures=2)
    assert_exact(model.model.bias.detach(), model.model.output.first_biases())
    output = model(PIXELS, labels=PIXELS)
    assert_exact(output.loss, model.model.loss(PIXELS))
    some = PIXELS.where(torch.arange(16) < 5, -100)
    assert_exact(model(PIXELS, labels=some).loss, model.model.loss(PIXELS, some))
    assert not torch.equal(model.model.loss(PIXELS, some), output.loss)
    assert output.parameters is None
    assert_exact(model(PIXELS, labels=PIXELS, return_dict=False)[0], output.loss)
    assert model(PIXELS).parameters.shape == (2, 16, 6)
    assert model.get_input_embeddings().num_embeddings == 257


def test_mistakes():
    fields = {"attention": "linear", "position": "none"}
    assert_refused(
        (image_model(), ValueError, "input_ids is needed: the bytes of images"),
        (lambda: SubquadImageConfig(heigth=3, **fields), ValueError, "no field 'heigth'; did you mean 'height'"),
        (lambda: SubquadImageConfig(output="gaussian", **fields), ValueError, "one of its choices, got 'gaussian'"),
    )
