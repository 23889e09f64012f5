"""Bits per dimension, and the classifier that reads completions."""

import math

import numpy as np
import pytest
import torch

from subquad.data.images import ImageSet
from subquad.evaluation import evaluate_images
from subquad.evaluation.images import train_reader
from subquad.testing import assert_same_maths
from tests.data.pictures import digits
from tests.models.test_image import image_model

PIXELS = torch.randint(0, 256, (5, 12), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
HALF = torch.arange(12) >= 6


def test_bits_are_the_loss_of_all_pixels_and_of_the_occluded_ones():
    model, seen = image_model(near=1).train(), []
    found = evaluate_images(model, PIXELS, occluded_T=HALF, batch_size=2, progress=lambda *counts: seen.append(counts))
    assert model.training
    assert seen[-1] == (5, 5)
    bits = -model.log_prob(PIXELS.long()).detach() / math.log(2)
    for value, expected in (
        (found.bits_per_dim, bits.mean()),
        (found.occluded_bits_per_dim, bits[:, 6:].mean()),
        (found.error, bits.mean(1).std() / math.sqrt(5)),
    ):
        assert_same_maths(torch.tensor(value, dtype=torch.float64), expected)
    assert (found.images, found.dimensions, found.occluded) == (5, 12, 6)
    assert set(found.to_dict()) > {"bits_per_dim", "constant", "seconds"}
    assert evaluate_images(model, PIXELS).occluded_bits_per_dim is None


def test_the_constant_is_the_entropy_of_the_levels():
    pixels = torch.tensor([[0] * 6 + [9] * 3 + [200] * 3], dtype=torch.uint8)
    found = evaluate_images(image_model(), pixels)
    assert_same_maths(torch.tensor(found.constant, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64))
    assert found.error is None  # one image has no spread


@pytest.mark.parametrize(("pixels", "options", "match"), [
    (PIXELS[:0], {}, "the number of images must be at least 1, got 0"),
    (PIXELS[:, 1:], {"occluded_T": HALF}, r"predicts images of 12 bytes, got \[5, 11\] and a mask \[12\]"),
    (PIXELS, {"occluded_T": ~HALF & HALF}, r"the mask must be bool and somewhere True, got torch\.bool, sum 0"),
    (PIXELS, {"occluded_T": HALF.long()}, r"the mask must be bool and somewhere True, got torch\.int64, sum 6"),
])  # fmt: skip
def test_images_and_masks_that_do_not_fit_are_refused(pixels, options, match):
    with pytest.raises(ValueError, match=match):
        evaluate_images(image_model(), pixels, **options)


def test_the_reader_learns_and_is_always_the_same():
    pixels, labels = digits(2000, classes=4)
    images = ImageSet(pixels[..., None], labels.astype(np.int64), ("0", "1", "2", "3"))
    before = torch.random.get_rng_state()
    reader = train_reader(images)
    assert (torch.random.get_rng_state() == before).all()
    pixels, labels = digits(200, classes=4, seed=1)
    test_NT, labels_N = torch.from_numpy(pixels.reshape(200, -1)), torch.from_numpy(labels)
    assert reader.accuracy(test_NT, labels_N) > 0.9
    assert reader.accuracy(test_NT, (labels_N + 1) % 4) < 0.1
    again = train_reader(images)
    assert all((a == b).all() for a, b in zip(reader.model.parameters(), again.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="a classifier needs labelled images"):
        train_reader(ImageSet(digits()[0][..., None], None, ()))
