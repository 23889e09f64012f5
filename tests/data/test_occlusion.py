"""What is occluded, by words and by mask files."""

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
    shown = ["".join(".#"[int(cell)] for cell in row) for row in occlusion(asked, 4, 3)]
    assert shown == rows


def test_random_pixels():
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


@pytest.mark.parametrize(("asked", "message"), [
    ("botom:0.5", "unknown occlusion 'botom:0.5'; did you mean 'bottom'"),
    ("bottom", "an occlusion is bottom, top, left, right, center or random with a fraction"),
    ("bottom:half", "an occlusion is bottom"),
    ("bottom:0", "must be above 0 and at most 1, got 'bottom:0'"),
    ("bottom:1.5", "must be above 0 and at most 1"),
    ("bottom:0.01", "occludes nothing of an image of 4 x 3: the fraction is too small"),
])  # fmt: skip
def test_wrong_words(asked, message):
    with pytest.raises(ValueError, match=message):
        occlusion(asked, 4, 3)


def test_wrong_mask_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no mask file"):
        occlusion(str(tmp_path / "m.png"), 4, 3)
    write_png(tmp_path / "m.png", np.zeros((4, 3), np.uint8))
    with pytest.raises(ValueError, match="occludes nothing: no pixel is white or True"):
        occlusion(str(tmp_path / "m.png"), 4, 3)
    with pytest.raises(ValueError, match="is a mask of 4 x 3, but the images are 5 x 3"):
        occlusion(str(tmp_path / "m.png"), 5, 3)
    np.save(tmp_path / "m.npy", np.full((4, 3), 7))
    with pytest.raises(ValueError, match="must hold booleans or zeros and ones, got int64"):
        occlusion(str(tmp_path / "m.npy"), 4, 3)
    np.save(tmp_path / "m.npy", np.full((4, 3), "a"))
    with pytest.raises(ValueError, match=r"must hold booleans or zeros and ones, got <U1"):
        occlusion(str(tmp_path / "m.npy"), 4, 3)
    np.savez(tmp_path / "m.npz", a=np.ones((4, 3)))
    (tmp_path / "m.npz").rename(tmp_path / "m.npy")
    with pytest.raises(ValueError, match="it is an archive of several arrays"):
        occlusion(str(tmp_path / "m.npy"), 4, 3)
    (tmp_path / "x.npy").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is no readable npy file"):
        occlusion(str(tmp_path / "x.npy"), 4, 3)
