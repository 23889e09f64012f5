"""The image model as a transformers model."""

import torch

from subquad.hf.image import SubquadImageConfig
from subquad.models import ImageModelConfig
from subquad.testing import assert_exact
from tests.hf.small import PIXELS, image_model
from tests.models.small import assert_refused


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
    odd = ImageModelConfig(attention="linear", position="learned", width=5, mixtures=3, near=2, position_channels=8)
    assert SubquadImageConfig.from_image(odd).image_config() == odd


def test_mistakes():
    fields = {"attention": "linear", "position": "none"}
    assert_refused(
        (image_model(), ValueError, "input_ids is needed: the bytes of images"),
        (lambda: SubquadImageConfig(heigth=3, **fields), ValueError, "no field 'heigth'; did you mean 'height'"),
        (lambda: SubquadImageConfig(output="gaussian", **fields), ValueError, "one of its choices, got 'gaussian'"),
    )
