"""Occlusions, by words and by mask files."""

from pathlib import Path

import numpy as np
import pytest

from subquad.data.occlusion import occlusion
from tests.data.pictures import write_png


@pytest.mark.parametrize(("asked", "rows"), [
    ("top:0.5", ["###", "###", "...", "..."]),
    ("bottom:0.25", ["...", "...", "...", "###"]),
    ("left:0.34", ["#..", "#..", "#..", "#.."]),
    ("right:0.67", [".##", ".##", ".##", ".##"]),
    ("center:0.5", ["...", "##.", "##.", "..."]),
    ("bottom:1", ["###", "###", "###", "###"]),
])  # fmt: skip
def test_sides_and_the_middle(asked, rows):
    assert ["".join(".#"[int(cell)] for cell in row) for row in occlusion(asked, 4, 3)] == rows


def test_random_pixels_are_drawn_by_seed():
    mask = occlusion("random:0.25", 8, 8, seed=3)
    assert mask.sum() == 16
    assert (mask == occlusion("random:0.25", 8, 8, seed=3)).all()
    assert (mask != occlusion("random:0.25", 8, 8, seed=4)).any()


def test_mask_files(tmp_path):
    mask = np.zeros((4, 3), bool)
    mask[1, 2] = True
    np.save(tmp_path / "m.npy", mask)
    np.save(tmp_path / "n.npy", mask.astype(int))
    write_png(tmp_path / "m.png", mask.astype(np.uint8) * 255)
    for name in ("m.npy", "n.npy", "m.png"):
        assert (occlusion(str(tmp_path / name), 4, 3) == mask).all()


@pytest.mark.parametrize(("asked", "mask", "message"), [
    ("botom:0.5", None, "unknown occlusion 'botom:0.5'; did you mean 'bottom'"),
    ("bottom", None, "an occlusion is bottom, top, left, right, center or random with a fraction"),
    ("bottom:half", None, "an occlusion is bottom"),
    ("bottom:0", None, "must be above 0 and at most 1, got 'bottom:0'"),
    ("bottom:1.5", None, "must be above 0 and at most 1"),
    ("bottom:0.01", None, "'bottom:0.01' occludes no pixel of 4 x 3: the fraction is too small"),
    ("m.png", None, "there is no mask file"),
    ("m.png", np.zeros((4, 3), np.uint8), "occludes nothing: no pixel is white or True"),
    ("m.png", np.zeros((5, 3), np.uint8), "is a mask of 5 x 3, but the images are 4 x 3"),
    ("m.npy", np.full((4, 3), 7), "must hold booleans or zeros and ones, got int64"),
    ("m.npy", np.full((4, 3), "a"), "must hold booleans or zeros and ones, got <U1"),
])  # fmt: skip
def test_wrong_words_and_masks_are_refused(asked, mask, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if mask is not None:
        write_png(Path(asked), mask) if asked == "m.png" else np.save(asked, mask)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        occlusion(asked, 4, 3)
