"""Drawing images and completing them."""

import pytest
import torch

from subquad.generation import complete_images, generate_images
from subquad.testing import assert_exact
from tests.generation.models import MECHANISMS, with_models
from tests.models.test_image import image_model

HALF = torch.arange(12) >= 6


@with_models(("full", "latte", "linear", "llp", "window"), MECHANISMS)
def test_a_carried_state_draws_the_same_pixels_as_the_whole_prefix(name):
    model = image_model(name, near=1, output="logistic")
    carried = generate_images(model, 3, seed=5)
    whole = generate_images(model, 3, seed=5, cache=False)
    assert_exact(carried.pixels_NT, whole.pixels_NT)
    assert (carried.pixels_NT.shape, carried.pixels_NT.dtype) == ((3, 12), torch.uint8)
    assert carried.state_bytes > whole.state_bytes == 0
    assert len(carried.pixels_NT.unique()) > 5


def test_each_image_has_its_own_random_numbers():
    model = image_model()
    together = generate_images(model, 5, seed=3)
    apart = generate_images(model, 5, seed=3, batch_size=2)
    assert_exact(together.pixels_NT, apart.pixels_NT)
    assert (together.batch_size, apart.batch_size) == (5, 2)
    assert_exact(generate_images(model, 1, seed=5).pixels_NT[0], together.pixels_NT[2])
    assert len(together.pixels_NT.unique(dim=0)) == 5
    drawn = [generate_images(model, 2, seed=seed).pixels_NT for seed in (2**64 - 1, -1, 0)]
    assert_exact(drawn[0], drawn[1])
    assert_exact(drawn[0][1], drawn[2][0])


def test_given_pixels_stay_and_drawn_ones_depend_on_them():
    model = image_model(near=1)
    pixels = generate_images(model, 2, seed=1).pixels_NT
    assert_exact(complete_images(model, pixels, HALF, seed=1).pixels_NT, pixels)  # the same random numbers
    other = complete_images(model, pixels, HALF, seed=9).pixels_NT
    assert_exact(other[:, :6], pixels[:, :6])
    assert (other[:, 6:] != pixels[:, 6:]).any()
    nothing = complete_images(model, pixels, torch.zeros(12, dtype=torch.bool))
    assert_exact(nothing.pixels_NT, pixels)
    assert nothing.state_bytes == 0


def test_drawn_pixels_depend_only_on_pixels_before_them():
    model = image_model(near=1)
    hole = (torch.arange(12) >= 4) & (torch.arange(12) < 7)
    pixels = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    drawn = complete_images(model, pixels, hole).pixels_NT
    later = pixels.clone()
    later[:, 7:] += 50
    assert_exact(complete_images(model, later, hole).pixels_NT[:, :7], drawn[:, :7])
    assert_exact(drawn[:, ~hole], pixels[:, ~hole])
    hidden = pixels.clone()
    hidden[:, hole] += 50  # what was there is not looked at
    assert_exact(complete_images(model, hidden, hole).pixels_NT, drawn)
    assert_exact(complete_images(model, hidden, hole, cache=False).pixels_NT, drawn)


def test_the_likeliest_image_does_not_depend_on_the_seed():
    model = image_model()
    first, second = (generate_images(model, 1, temperature=0, seed=seed).pixels_NT for seed in (1, 2))
    assert_exact(first, second)
    level = model.output.log_probs(model(model.inputs(first.long()))[0][0])
    assert_exact(level.argmax(-1), first[0].long())


def test_progress_counts_pixels_and_the_mode_is_kept():
    model, seen = image_model().train(), []
    generate_images(model, 3, batch_size=2, progress=lambda *counts: seen.append(counts))
    assert (seen[-1], seen) == ((36, 36), sorted(seen))
    complete_images(model, torch.zeros(2, 12).byte(), ~HALF, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (24, 24), "given pixels after the last drawn one count too"
    assert model.training


@pytest.mark.parametrize(("pixels", "mask", "options", "match"), [
    (torch.zeros(1, 12).byte(), HALF, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (torch.zeros(1, 12).byte(), HALF, {"temperature": -1}, "temperature must be at least 0, got -1"),
    (torch.zeros(0, 12).byte(), HALF, {}, "the number of images must be at least 1, got 0"),
    (torch.zeros(1, 11).byte(), HALF, {}, r"images of 12 bytes, got pixels \[1, 11\] of torch\.uint8 and a mask \[12\] "
     r"of torch\.bool; valid: uint8 and bool"),
    (torch.zeros(1, 12), HALF.long(), {}, r"\[1, 12\] of torch\.float32 and a mask \[12\] of torch\.int64"),
])  # fmt: skip
def test_wrong_images_masks_and_numbers_are_refused(pixels, mask, options, match):
    with pytest.raises(ValueError, match=match):
        complete_images(image_model(), pixels, mask, **options)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        generate_images(image_model(), 0)
