"""Images from every layout; what is wrong with files is named with its place."""

import io
import lzma

import numpy as np
import pytest

from subquad.data.images import load_images, load_pictures
from tests.data.lra.layouts import put
from tests.data.pictures import digits, idx_bytes, jpegs, keras, records, write_idx, write_png

TRAIN, TEST, LABELS = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"
ERRORS = (ValueError, FileNotFoundError)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_idx_files(tmp_path, suffix):
    sets = load_images(str(write_idx(tmp_path, suffix=suffix)), labels=True)
    pixels, labels = digits(20)
    assert (sets["train"].pixels[..., 0] == pixels).all()
    assert (sets["train"].labels == labels).all()
    assert (sets["train"].pixels.dtype, sets["train"].labels.dtype) == (np.uint8, np.int64)
    assert sets["train"].classes == sets["test"].classes == ("0", "1")
    assert (sets["test"].shape, len(sets["test"].pixels)) == ((4, 4, 1), 8)


def test_labels_are_needed_only_if_asked_for_and_wrong_paths_are_refused(tmp_path):
    write_idx(tmp_path / "a", labels=False)
    write_idx(tmp_path / "b", classes=3, test=2)
    (tmp_path / "a.txt").touch()
    assert load_images(str(tmp_path / "a"))["train"].labels is None
    load_images(str(tmp_path / "b"))
    for path, message in (
        (tmp_path / "a", "the train images have no labels; give idx label files"),
        (tmp_path / "b", r"class 2 \('2'\) has no example in test"),
        (tmp_path / "nowhere", "there is no file or folder"),
        (tmp_path / "a.txt", r"is not a set of images; give an \.npz"),
        ("hf:a:b:c", r"a dataset of images is hf:NAME\[:CONFIG\]"),
    ):
        with pytest.raises(ERRORS, match=message):
            load_images(str(path), labels=True)


def npz(file, arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    file.write_bytes(lzma.compress(buffer.getvalue()) if file.suffix == ".xz" else buffer.getvalue())
    return str(file)


@pytest.mark.parametrize("name", ["a.npz", "a.npz.xz"])
def test_an_npz_file_in_kerass_layout_alone_or_in_a_folder(tmp_path, name):
    pixels, labels = digits(20)
    sets = load_images(npz(tmp_path / name, keras(y_train=labels[:, None])), labels=True)
    assert (sets["train"].pixels[..., 0] == pixels).all()
    assert (sets["train"].labels == labels).all()
    (tmp_path / "SOURCE.txt").write_text("where it is from")
    assert load_images(str(tmp_path))["train"].fingerprint() == sets["train"].fingerprint()
    npz(tmp_path / "b.npz", keras())
    with pytest.raises(ValueError, match=rf"holds 2 npz files; name one: .*{name}, .*b.npz"):
        load_images(str(tmp_path))


def test_jpeg_files_in_an_npz_file(tmp_path):
    sets = load_images(npz(tmp_path / "a.npz", jpegs()), labels=True)
    assert sets["train"].shape == (4, 4, 3)
    assert sets["train"].classes == ("cat", "dog")
    assert (len(sets["train"].pixels), len(sets["test"].pixels)) == (4, 2)
    assert abs(int(sets["test"].pixels[1].mean()) - 200) < 3  # JPEG is lossy


@pytest.mark.parametrize(("layout", "changes", "message"), [
    (dict, {"other": np.zeros(2)}, "has no array x_train; it has other"),
    (keras, {"x_train": np.zeros((20, 4, 4), np.float32)}, "x_train must hold bytes"),
    (keras, {"x_train": np.zeros((20, 16), np.uint8)}, r"x_train must be \[N, H, W\] or .* got \[20, 16\]"),
    (keras, {"x_train": np.array([{}], object)}, "is not a readable npz file"),
    (keras, {"y_train": np.zeros(3, int)}, "y_train has 3 labels for the 20 images of x_train"),
    (keras, {"y_train": np.zeros(20)}, "y_train must be integers"),
    (keras, {"y_train": np.full(20, -1)}, "y_train row 0 is the label -1; labels start at 0"),
    (keras, {"y_train": np.full(20, 2**40)}, "y_train row 0 is the label 1099511627776, above 65535"),
    (keras, {"classes": np.array(["a"])}, "train row 1 is the label 1; valid: 0 to 0"),
    (keras, {"classes": np.array([["a"]])}, r"classes must be names \[classes\], got shape \[1, 1\]"),
    (jpegs, {"offset": np.array([0, 5, 5, 9])}, "offset row 1 is not valid for the"),
    (jpegs, {"offset": np.array([3, 5, 7, 9])}, "offset row 0 is not valid for the"),
    (jpegs, {"offset": np.array([0, 5, 7, 9])}, "offset row 3 is not valid for the"),
    (jpegs, {"offset": np.zeros((2, 2), int)}, "blob must be uint8"),
    (jpegs, {"n_train": np.array([4, 4])}, "n_train one integer"),
    (jpegs, {"n_train": 6}, "n_train must be from 1 to 5, got 6"),
    (jpegs, {"label": np.zeros(3, int)}, "label has 3 rows for 6 images"),
    (jpegs, {"blob": np.full(6, 7, np.uint8), "offset": np.arange(7)}, "image 0 is damaged or not an image"),
])  # fmt: skip
def test_a_wrong_npz_file_is_named_with_the_place(tmp_path, layout, changes, message):
    with pytest.raises(ValueError, match=f"a.npz.* {message}"):
        load_images(npz(tmp_path / "a.npz", layout(**changes)))


def test_cifar_batches(tmp_path):
    one = bytearray(records(0))
    one[1 + 1024 + 32 * 5 + 7] = 99  # green, row 5, column 7
    for name, raw in (("data_batch_1", records(3, 1)), ("data_batch_2", records(9)), ("test_batch", one)):
        (tmp_path / f"{name}.bin").write_bytes(raw)
    sets = load_images(str(tmp_path))
    assert sets["train"].labels.tolist() == [3, 1, 9]
    assert sets["train"].classes[9] == "truck"
    assert sets["test"].pixels[0, 5, 7].tolist() == [10, 99, 30]


def shade(value, size=4):
    return np.full((size, size), value, np.uint8)


def test_folders_with_and_without_classes(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        write_png(tmp_path / "b" / part / "a.png", np.zeros((4, 4, 3), np.uint8))
        for k, name in enumerate(("10", "9")):
            for number in range(count):
                write_png(tmp_path / "a" / part / name / f"{number}.png", shade(10 * number + k))
    sets = load_images(str(tmp_path / "a"), labels=True)
    assert sets["train"].classes == ("9", "10")  # by number
    assert sets["train"].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert sets["train"].pixels[:, 0, 0, 0].tolist() == [1, 11, 21, 0, 10, 20]
    assert len(sets["test"].pixels) == 4
    images = load_images(str(tmp_path / "b"))["train"]
    assert (images.labels, images.shape) == (None, (4, 4, 3))


def test_one_folder_is_split_by_name_and_one_image_read(tmp_path):
    for number in range(21):
        write_png(tmp_path / f"{number}.png", shade(number))
    sets = load_images(str(tmp_path))
    assert sets["test"].pixels[:, 0, 0, 0].tolist() == [9, 19]
    assert len(sets["train"].pixels) == 19
    assert len(load_pictures(str(tmp_path)).pixels) == 21
    write_png(tmp_path / "one_bit.png", shade(255), "1")
    assert load_pictures(str(tmp_path / "3.png")).pixels[0, 0, 0, 0] == 3
    assert (load_pictures(str(tmp_path / "one_bit.png")).pixels == np.full((1, 4, 4, 1), 255)).all()


IDX = {TRAIN: idx_bytes(digits(20)[0]), LABELS: idx_bytes(digits(20)[1]), TEST: idx_bytes(digits(8)[0])}
CIFAR = {"data_batch_1.bin": records(0), "test_batch.bin": records(0)}


@pytest.mark.parametrize(("files", "message"), [
    (IDX | {TRAIN: IDX[TRAIN][:9]}, f"{TRAIN} ends at byte 9, within its header of 16 bytes"),
    (IDX | {TRAIN: b"\1" + IDX[TRAIN][1:]}, r"byte 0 is 1, not 0 \(zero\)"),
    (IDX | {TRAIN: IDX[TRAIN][:4] + bytes(4) + IDX[TRAIN][8:]}, "is empty: the size at byte 4 is 0"),
    (IDX | {TRAIN: IDX[TRAIN][:-3]}, "has 333 bytes, not the 336 of the size in its header, 20 x 4 x 4"),
    ({TRAIN + ".xz": lzma.compress(IDX[TRAIN])[:-9]}, f"{TRAIN}.xz is damaged and does not unpack"),
    (IDX | {LABELS: idx_bytes(np.zeros(7))}, f"{LABELS} has 7 labels for the 20 images of"),
    ({TRAIN: IDX[TRAIN]}, "has no t10k-images-idx3-ubyte"),
    (IDX | {TEST: idx_bytes(np.zeros((8, 5, 4)))}, r"images must have one size, but train has \(4, 4, 1\) and test"),
    (CIFAR | {"data_batch_1.bin": records(3, 1)[:-1]}, "cut short: its 6145 bytes are not a multiple of .* 3073"),
    (CIFAR | {"data_batch_1.bin": records(3, 11)}, "data_batch_1.bin: byte 3073 is the label 11; valid: 0 to 9"),
    ({"data_batch_1.bin": records(0)}, r"has no test_batch\.bin"),
    (CIFAR | {"data_batch_1": b"x"}, "holds pickles, which can run code and are not read"),
    ({"train/a.png": 4, "train/x/b.png": 4, "test/a.png": 4}, r"images without a label \(a.png\) and folders"),
    ({"train/x/b.png": 4, "test/a.png": 4}, "has no folders of classes, as train has: x"),
    ({"train/a.png": 4, "test/y/a.png": 4}, "is a class without an example in train; train has no classes"),
    ({"train/x/b.txt": b"", "test/x/a.png": 4}, "x is a class without an example: it holds no PNG"),
    ({"train/b.txt": b"", "test/a.png": 4}, "train holds no PNG or JPEG file"),
    ({"train/a.png": 4}, "has no folder test"),
    ({"train/a.png": 4, "train/b.png": 5, "test/a.png": 4}, r"b.png is 5 x 5 x 1 .* but .*a.png is 4 x 4"),
    ({"train/a.png": b"\x89PNG and no more", "test/a.png": 4}, r"a\.png is damaged or not an image"),
    ({"train/a.png": "RGBA", "test/a.png": 4}, r"a\.png has pixels of mode RGBA; valid: 8-bit grey"),
    ({"a.png": 4}, "holds one image; at least two are needed"),
    ({"x.txt": b""}, "holds no images: no idx files"),
])  # fmt: skip
def test_wrong_files_are_named_with_the_place(tmp_path, files, message):
    for name, content in files.items():
        if isinstance(content, bytes):
            put(tmp_path, name, content)
        else:
            write_png(tmp_path / name, *((shade(9), content) if content == "RGBA" else (shade(9, content),)))
    with pytest.raises(ERRORS, match=message) as error:
        load_images(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def dataset(rows=2, **columns):
    import datasets

    values = {"image": [shade(20 * i) for i in range(rows)], "label": [i % 2 for i in range(rows)]} | columns
    values = {name: value for name, value in values.items() if value is not None}
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    features = {name: kinds.get(name, datasets.Value("string")) for name in values}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def test_a_dataset_of_the_hub(monkeypatch):
    splits = {"train": dataset(4), "test": dataset(2)}
    monkeypatch.setattr("datasets.load_dataset", lambda name, *rest: splits)
    sets = load_images("hf:made/up", labels=True)
    assert sets["train"].classes == ("cat", "dog")
    assert sets["train"].labels.tolist() == [0, 1, 0, 1]
    assert sets["train"].pixels[:, 0, 0, 0].tolist() == [0, 20, 40, 60]
    splits["validation"], splits["train"] = splits.pop("test"), dataset(4, label=None)
    sets = load_images("hf:made/up")
    assert sets["train"].labels is None
    assert len(sets["test"].pixels) == 2
    for splits["train"], message in (
        (dataset(image=None, text=["a", "b"]), "has no column of images; its columns are label, text"),
        (dataset(label=[0, None]), "train row 1 has no label"),
        (dataset(image=[shade(1), None]), "train row 1 has no image"),
        (dataset(rows=0), "has no row in train"),
    ):
        with pytest.raises(ValueError, match=message):
            load_images("hf:made/up")
    del splits["validation"]
    with pytest.raises(ValueError, match="needs the splits train and test"):
        load_images("hf:made/up")


def test_the_fingerprint_tells_images_and_labels_apart(tmp_path):
    images = load_images(str(write_idx(tmp_path)))["train"]
    prints = {images.fingerprint()}
    for array in (images.pixels, images.labels):
        array.flat[5] ^= 1
        prints.add(images.fingerprint())
    assert len(prints) == 3
