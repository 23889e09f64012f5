"""Images from every layout, and what is wrong with files, by name and place."""

import io
import lzma
import re
from pathlib import Path

import numpy as np
import pytest

from subquad.data.images import load_images, load_pictures
from tests.data.pictures import digits, idx_bytes, write_idx, write_png

TRAIN, TEST = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_idx_files(tmp_path, suffix):
    sets = load_images(str(write_idx(tmp_path, suffix=suffix)), labels=True)
    pixels, labels = digits(20)
    assert (sets["train"].pixels[..., 0] == pixels).all()
    assert sets["train"].pixels.dtype == np.uint8
    assert (sets["train"].labels == labels).all()
    assert sets["train"].labels.dtype == np.int64
    assert sets["train"].classes == sets["test"].classes == ("0", "1")
    assert sets["test"].shape == (4, 4, 1)
    assert len(sets["test"].pixels) == 8


def test_labels_may_be_missing_unless_they_are_asked_for(tmp_path):
    write_idx(tmp_path, labels=False)
    assert load_images(str(tmp_path))["train"].labels is None
    with pytest.raises(ValueError, match="the train images have no labels; give idx label files"):
        load_images(str(tmp_path), labels=True)


def test_a_class_without_an_example(tmp_path):
    write_idx(tmp_path, classes=3, test=2)
    with pytest.raises(ValueError, match=r"class 2 \('2'\) has no example among the 2 test images; each of the 3"):
        load_images(str(tmp_path), labels=True)
    load_images(str(tmp_path))


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: raw[:9], "ends at byte 9, within its header of 16 bytes"),
    (lambda raw: b"\1" + raw[1:], r"byte 0 is 1, not 0 \(zero\)"),
    (lambda raw: raw[:2] + b"\x0d" + raw[3:], r"byte 2 is 13, not 8 \(unsigned bytes\)"),
    (lambda raw: raw[:3] + b"\1" + raw[4:], r"byte 3 is 1, not 3 \(dimensions\)"),
    (lambda raw: raw[:4] + bytes(4) + raw[8:], "is empty: byte 4 begins a size of 0"),
    (lambda raw: raw[:-3], r"has 333 bytes, but its header \(bytes 4 to 15\) says 20 x 4 x 4: 336 bytes"),
    (lambda raw: raw + b"x", "has 337 bytes, but its header"),
])  # fmt: skip
def test_a_corrupt_idx_file_is_named_with_the_place(tmp_path, change, message):
    file = write_idx(tmp_path) / TRAIN
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        load_images(str(tmp_path))
    assert str(file) in str(error.value)


def test_a_packed_file_that_is_cut_off(tmp_path):
    file = write_idx(tmp_path, suffix=".xz") / f"{TRAIN}.xz"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged and does not unpack"):
        load_images(str(tmp_path))


def test_labels_that_are_not_as_many_as_images(tmp_path):
    (write_idx(tmp_path) / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(7)))
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte has 7 labels for the 20 images of"):
        load_images(str(tmp_path))


def test_a_part_that_is_missing(tmp_path):
    (write_idx(tmp_path) / TEST).unlink()
    with pytest.raises(FileNotFoundError, match="has no t10k-images-idx3-ubyte"):
        load_images(str(tmp_path))


def test_parts_of_two_sizes(tmp_path):
    write_idx(tmp_path)
    (tmp_path / TEST).write_bytes(idx_bytes(np.zeros((8, 5, 4))))
    with pytest.raises(ValueError, match=r"^/.*: the images differ in size: train has \[4, 4, 1\], test \[5, 4, 1\]"):
        load_images(str(tmp_path))


# --- npz


def npz(file, **arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    content = buffer.getvalue()
    file.write_bytes(lzma.compress(content) if file.suffix == ".xz" else content)
    return str(file)


def keras(**changes):
    (x, y), (x_test, y_test) = digits(20), digits(8, seed=1)
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test} | changes


@pytest.mark.parametrize("name", ["a.npz", "a.npz.xz"])
@pytest.mark.parametrize("column", [False, True])
def test_an_npz_file_as_keras_has_it(tmp_path, name, column):
    labels = digits(20)[1]
    sets = load_images(npz(tmp_path / name, **keras(y_train=labels[:, None] if column else labels)), labels=True)
    assert (sets["train"].pixels[..., 0] == digits(20)[0]).all()
    assert (sets["train"].labels == labels).all()


@pytest.mark.parametrize(("changes", "message"), [
    ({"x_train": np.zeros((20, 4, 4), np.float32)}, "x_train must hold bytes"),
    ({"x_train": np.zeros((20, 16), np.uint8)}, r"x_train must be \[N, H, W\] or .* got \[20, 16\]"),
    ({"y_train": np.zeros(3, int)}, "y_train has 3 labels for the 20 images of x_train"),
    ({"y_train": np.zeros(20)}, "y_train must be whole numbers"),
    ({"y_train": np.full(20, -1)}, "y_train row 0 is the label -1; labels begin with 0"),
    ({"classes": np.array(["a"])}, "train row 1 is the label 1, of the classes 0 to 0"),
    ({"x_train": np.array([{}], object)}, "is no readable npz file"),
])  # fmt: skip
def test_a_wrong_npz_file(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_images(npz(tmp_path / "a.npz", **keras(**changes)))


def test_a_folder_with_one_npz_file_is_that_file(tmp_path):
    npz(tmp_path / "a.npz.xz", **keras())
    (tmp_path / "SOURCE.txt").write_text("where it is from")
    assert (
        load_images(str(tmp_path))["train"].fingerprint()
        == load_images(str(tmp_path / "a.npz.xz"))["train"].fingerprint()
    )
    npz(tmp_path / "b.npz", **keras())
    with pytest.raises(ValueError, match=r"holds 2 npz files; name one: .*a.npz.xz, .*b.npz"):
        load_images(str(tmp_path))


def test_an_npz_file_without_images(tmp_path):
    with pytest.raises(ValueError, match="has no array x_train; it has other"):
        load_images(npz(tmp_path / "a.npz", other=np.zeros(2)))
    (tmp_path / "b.npz").write_bytes(b"PK nonsense")
    np.save(tmp_path / "c.npy", np.zeros(3))
    (tmp_path / "c.npy").rename(tmp_path / "c.npz")
    for name in "bc":
        with pytest.raises(ValueError, match=rf"{name}\.npz is no readable npz file: it is no zip archive"):
            load_images(str(tmp_path / f"{name}.npz"))


@pytest.mark.parametrize(("flags", "method", "message"), [
    (0, 99, "compression method is not supported"),
    (1, 0, "is encrypted, password required"),
])  # fmt: skip
def test_an_npz_file_that_cannot_be_unpacked(tmp_path, flags, method, message):
    file = Path(npz(tmp_path / "a.npz", **keras()))
    raw = bytearray(file.read_bytes())
    for head, first in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # each array's head, and its entry in the directory
        for found in re.finditer(re.escape(head), bytes(raw)):
            raw[found.start() + first] |= flags
            raw[found.start() + first + 2] = method
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"a\.npz is no readable npz file: .*{message}"):
        load_images(str(file))


def blob(count=6, n_train=4, **changes):
    from PIL import Image

    parts = []
    for shade in range(count):
        buffer = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), shade * 40, np.uint8)).save(buffer, "JPEG")
        parts.append(np.frombuffer(buffer.getvalue(), np.uint8))
    offset = np.cumsum([0, *map(len, parts)])
    arrays = {"blob": np.concatenate(parts), "offset": offset, "label": np.arange(count) % 2, "n_train": n_train}
    return arrays | {"classes": np.array(["cat", "dog"])} | changes


def test_jpeg_files_in_an_npz_file(tmp_path):
    sets = load_images(npz(tmp_path / "a.npz", **blob()), labels=True)
    assert sets["train"].shape == (4, 4, 3)
    assert sets["train"].classes == ("cat", "dog")
    assert (len(sets["train"].pixels), len(sets["test"].pixels)) == (4, 2)
    assert abs(int(sets["test"].pixels[1].mean()) - 200) < 3  # JPEG is lossy


@pytest.mark.parametrize(("changes", "message"), [
    ({"offset": np.array([0, 5, 5, 9])}, "offset row 1 does not cut the"),
    ({"offset": np.array([3, 5, 7, 9])}, "offset row 0 does not cut the"),
    ({"offset": np.array([0, 5, 7, 9])}, "offset row 3 does not cut the"),
    ({"offset": np.array([0.0, 5, 7, 9])}, "offset whole numbers"),
    ({"n_train": np.array([4, 4])}, "n_train one whole number"),
    ({"label": np.array([0, 1, -1, 0, 1, 0])}, "label row 2 is the label -1; labels begin with 0"),
    ({"offset": np.zeros((2, 2), int)}, "blob must be bytes"),
    ({"n_train": 6}, "n_train must be from 1 to 5, got 6"),
    ({"label": np.zeros(3, int)}, "label has 3 rows for 6 images"),
    ({"label": np.full(6, 2)}, "label row 0 is the label 2, of the classes 0 to 1"),
])  # fmt: skip
def test_wrong_jpeg_files_in_an_npz_file(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_images(npz(tmp_path / "a.npz", **blob(**changes)))


def test_a_damaged_jpeg_file_is_named_by_its_row(tmp_path):
    arrays = blob()
    arrays["blob"][arrays["offset"][2] : arrays["offset"][3]] = 7
    with pytest.raises(ValueError, match=r"a\.npz: image 2 is damaged or no image"):
        load_images(npz(tmp_path / "a.npz", **arrays))


# --- CIFAR-10


def records(labels):
    return b"".join(bytes([label]) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024) for label in labels)


def test_cifar_batches(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(records([3, 1]))
    (tmp_path / "data_batch_2.bin").write_bytes(records([9]))
    one = bytearray(records([0]))
    one[1 + 1024 + 32 * 5 + 7] = 99  # green, row 5, column 7
    (tmp_path / "test_batch.bin").write_bytes(one)
    sets = load_images(str(tmp_path))
    assert sets["train"].labels.tolist() == [3, 1, 9]
    assert sets["train"].classes[9] == "truck"
    assert sets["test"].pixels[0, 5, 7].tolist() == [10, 99, 30]


@pytest.mark.parametrize(("content", "message"), [
    (records([3, 1])[:-1], "has 6145 bytes, which is no whole number of records of 3073: record 1 is cut off"),
    (records([3, 11]), "byte 3073 is the label 11, of the classes 0 to 9"),
])  # fmt: skip
def test_wrong_cifar_batches(tmp_path, content, message):
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    (tmp_path / "test_batch.bin").write_bytes(records([0]))
    with pytest.raises(ValueError, match=message):
        load_images(str(tmp_path))


def test_cifar_without_a_part_or_pickled(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(records([3]))
    with pytest.raises(FileNotFoundError, match=r"has no test_batch\.bin"):
        load_images(str(tmp_path))
    (tmp_path / "data_batch_1").write_bytes(b"x")
    with pytest.raises(ValueError, match="holds pickles, which can run any code and are not read"):
        load_images(str(tmp_path))


# --- PNG


def shade(value, size=4):
    return np.full((size, size), value, np.uint8)


def test_folders_of_classes(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        for k, name in enumerate(("10", "9")):
            for number in range(count):
                write_png(tmp_path / part / name / f"{number}.png", shade(10 * number + k))
    sets = load_images(str(tmp_path), labels=True)
    assert sets["train"].classes == ("9", "10")  # by number
    assert sets["train"].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert sets["train"].pixels[:, 0, 0, 0].tolist() == [1, 11, 21, 0, 10, 20]
    assert len(sets["test"].pixels) == 4


def test_folders_without_classes(tmp_path):
    for part in ("train", "test"):
        write_png(tmp_path / part / "a.png", np.zeros((4, 4, 3), np.uint8))
    sets = load_images(str(tmp_path))
    assert sets["train"].labels is None
    assert sets["train"].shape == (4, 4, 3)


def test_one_folder_is_split_by_name(tmp_path):
    for number in range(21):
        write_png(tmp_path / f"{number}.png", shade(number))
    sets = load_images(str(tmp_path))
    assert sets["test"].pixels[:, 0, 0, 0].tolist() == [9, 19]
    assert len(sets["train"].pixels) == 19
    assert len(load_pictures(str(tmp_path)).pixels) == 21
    assert load_pictures(str(tmp_path / "3.png")).pixels[0, 0, 0, 0] == 3


def test_a_folder_with_one_image(tmp_path):
    write_png(tmp_path / "a.png", shade(1))
    with pytest.raises(ValueError, match="holds one image; at least two are needed"):
        load_images(str(tmp_path))


@pytest.mark.parametrize(("files", "error", "message"), [
    ({"train/a.png": 4, "train/x/b.png": 4, "test/a.png": 4}, ValueError, r"images without a label \(a.png\) and"),
    ({"train/x/b.png": 4, "test/a.png": 4}, ValueError, "has no folders of classes, as train has: x"),
    ({"train/x/b.png": 4, "test/y/a.png": 4}, ValueError, "is a class that has no example in train; valid: x"),
    ({"train/a.png": 4, "test/y/a.png": 4}, ValueError, "that has no example in train; train has no classes"),
    ({"train/x/b.txt": 0, "test/x/a.png": 4}, ValueError, "x is a class without an example: it holds no PNG"),
    ({"train/b.txt": 0, "test/a.png": 4}, ValueError, "train holds no PNG or JPEG file"),
    ({"train/a.png": 4}, FileNotFoundError, "has no folder test"),
    ({"train/a.png": 4, "train/b.png": 5, "test/a.png": 4}, ValueError, r"b.png is 5 x 5 x 1 .* but .*a.png is 4"),
    ({"x.txt": 0}, ValueError, "holds no images: no idx files"),
])  # fmt: skip
def test_wrong_folders(tmp_path, files, error, message):
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_png(tmp_path / name, shade(9, size)) if size else (tmp_path / name).write_text("no image")
    with pytest.raises(error, match=message):
        load_images(str(tmp_path))


def test_a_file_that_is_no_image_and_one_with_transparency(tmp_path):
    write_png(tmp_path / "train" / "a.png", shade(1), "RGBA")
    write_png(tmp_path / "test" / "a.png", shade(1))
    with pytest.raises(ValueError, match=r"a\.png has the pixels RGBA; valid: 8 bits of grey"):
        load_images(str(tmp_path))
    (tmp_path / "train" / "a.png").write_bytes(b"\x89PNG and no more")
    with pytest.raises(ValueError, match=r"a\.png is damaged or no image"):
        load_images(str(tmp_path))


def test_palettes_and_one_bit_are_read(tmp_path):
    write_png(tmp_path / "train" / "a.png", shade(255), "1")
    write_png(tmp_path / "test" / "a.png", shade(255))
    assert load_images(str(tmp_path))["train"].pixels.max() == 255
    assert load_images(str(tmp_path))["train"].shape == (4, 4, 1)


# --- paths and Hugging Face


def test_paths_that_hold_no_images(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        load_images(str(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"is not a set of images; a file must be \.npz"):
        load_images(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match=r"a dataset of images is hf:NAME\[:CONFIG\]"):
        load_images("hf:a:b:c")


def dataset(rows=2, **columns):
    import datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    values = {"image": [shade(20 * i) for i in range(rows)], "label": [i % 2 for i in range(rows)]} | columns
    features = {name: features.get(name, datasets.Value("string")) for name in values if values[name] is not None}
    values = {name: value for name, value in values.items() if value is not None}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


@pytest.fixture
def hub(monkeypatch):
    import datasets

    splits = {"train": dataset(4), "test": dataset(2)}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *rest: splits)
    return splits


def test_a_dataset_of_the_hub(hub):
    sets = load_images("hf:made/up", labels=True)
    assert sets["train"].classes == ("cat", "dog")
    assert sets["train"].labels.tolist() == [0, 1, 0, 1]
    assert sets["train"].pixels[:, 0, 0, 0].tolist() == [0, 20, 40, 60]
    hub["validation"] = hub.pop("test")
    assert len(load_images("hf:made/up")["test"].pixels) == 2
    hub["train"] = dataset(4, label=None)
    assert load_images("hf:made/up")["train"].labels is None


@pytest.mark.parametrize(("change", "message"), [
    (lambda: {"train": dataset()}, "needs the splits train and test"),
    (lambda: {"train": dataset(image=None, text=["a", "b"])}, "has no column of images; its columns are label, text"),
    (lambda: {"train": dataset(label=[0, None])}, "train row 1 has no label"),
    (lambda: {"train": dataset(image=[shade(1), None])}, "train row 1 has no image"),
    (lambda: {"train": dataset(0)}, "has no row in train"),
])  # fmt: skip
def test_wrong_datasets(hub, change, message):
    hub.update(change())
    if "needs" in message:
        del hub["test"]
    with pytest.raises(ValueError, match=message):
        load_images("hf:made/up")


def test_a_dataset_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs the package datasets.*pip install 'subquad\[datasets\]'"):
        load_images("hf:made/up")


def test_the_fingerprint_tells_images_and_labels_apart(tmp_path):
    first = load_images(str(write_idx(tmp_path)))["train"]
    assert first.fingerprint() == load_images(str(tmp_path))["train"].fingerprint()
    first.pixels[3, 1, 1, 0] ^= 1
    changed = first.fingerprint()
    assert changed != load_images(str(tmp_path))["train"].fingerprint()
    first.labels[0] ^= 1
    assert first.fingerprint() != changed


# --- real data


def test_mnist(data_folder):
    sets = load_images(str(data_folder / "mnist"), labels=True)
    assert sets["train"].pixels.shape == (60000, 28, 28, 1)
    assert np.bincount(sets["test"].labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.slow
def test_cifar(data_folder):
    sets = load_images(str(data_folder / "cifar10" / "cifar10_jpeg_q75.npz.xz"), labels=True)
    assert sets["train"].pixels.shape == (50000, 32, 32, 3)
    assert set(np.bincount(sets["test"].labels).tolist()) == {1000}
