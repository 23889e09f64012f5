"""Files made to harm: small ones that stand for much, headers that promise too much, names that lead outside."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from subquad import State, parsing
from subquad.config import Config, read_mapping
from subquad.data import image_files, packed
from subquad.data.image_files import decode
from subquad.data.packed import load_array, load_arrays
from subquad.data.sources import BadTextError, TarBytes, open_source

PACKERS = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
)
MERGES = "a0: &a0 {k0: x, l0: x}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], k{i}: x}}\n" for i in range(1, 30)
)


@pytest.fixture
def little(monkeypatch):
    """A bound that a test reaches in no time."""
    monkeypatch.setattr(packed, "LEAST", 1 << 16)


# --- JSON and YAML


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, r"a\.yaml nests more than 100 deep"),
        ("- " * 100_000 + "x", r"a\.yaml nests more than 100 deep"),
        ("? " * 100_000 + "x", r"a\.yaml nests more than 100 deep"),
        ("a: &a [*a]", r"a\.yaml: the alias \*a stands for itself"),
        ("a: &a {b: [*a]}", r"a\.yaml: the alias \*a stands for itself"),
        (LAUGHS, r"a\.yaml stands for more than 200,000 values"),
        (MERGES, r"a\.yaml stands for more than 200,000 values"),
        ("a: !!python/object/apply:os.system [exit]", r"a\.yaml is not valid YAML: could not determine a constructor"),
        ("a: !!float ''", r"a\.yaml is not valid YAML: IndexError"),
        ("a: " + "1" * 5_000, r"a\.yaml is not valid YAML: Exceeds the limit"),
    ],
    ids=["flow", "block", "keys", "itself", "deeper itself", "laughs", "merges", "code", "empty number", "digits"],
)
def test_yaml_that_stands_for_too_much(text, message, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_mapping(tmp_path / "a.yaml")


def test_aliases_that_stand_for_little_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {b: [1, 2]}\nc: {<<: *a, d: *a}\n")
    assert read_mapping(tmp_path / "a.yaml") == {"a": {"b": [1, 2]}, "c": {"b": [1, 2], "d": {"b": [1, 2]}}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[" * 100_000, r"a\.json nests more than 100 deep"),
        (b"[" * 101 + b"]" * 101, r"a\.json nests more than 100 deep"),
        (b'{"a": "\\ud800"}', r"a\.json spells half a surrogate pair: '\\ud800'"),
        (b'{"a": "\xff"}', r"a\.json is not UTF-8 text: byte 7 is 0xff"),
        (b"1" * 5_000, r"a\.json is not JSON: Exceeds the limit"),
        (b"[1]", r"a\.json must hold a mapping, got list"),
    ],
)
def test_json_out_of_bounds(raw, message, tmp_path):
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        parsing.read_json_mapping(tmp_path / "a.json")


def test_a_text_without_an_end_is_not_read(tmp_path, monkeypatch):
    assert parsing.parse_json("[" * 100 + "]" * 100, "a") is not None
    monkeypatch.setattr(parsing, "BYTES", 100)
    (tmp_path / "a.json").write_bytes(b" " * 101)
    with pytest.raises(ValueError, match=r"a\.json is larger than 100 bytes"):
        parsing.read_json(tmp_path / "a.json")
    with pytest.raises(ValueError, match="/dev/zero is larger than 100 bytes"):
        parsing.read_json("/dev/zero")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "a is damaged: it must hold a mapping, got list"),
        ({}, "a is damaged: it has no 'n'"),
        ({"n": "1"}, "a is damaged: 'n' must be a int, got '1'"),
        ({"n": True}, "a is damaged: 'n' must be a int, got True"),
    ],
)
def test_keys_that_are_missing_or_wrong(values, message):
    with pytest.raises(ValueError, match=message):
        parsing.check_keys(values, {"n": int}, "a")


def numbers(**values):
    from dataclasses import field, make_dataclass

    fields = [("n", int, field(default=0)), ("x", float, field(default=0.0))]
    made = make_dataclass("Numbers", fields, bases=(Config,), frozen=True, kw_only=True)
    return made.from_dict(values)


def test_numbers_that_no_computer_word_holds():
    assert numbers(n=-(2**63)).n == -(2**63)
    assert numbers(n=2**64 - 1, x=10**300).x == 1e300
    with pytest.raises(ValueError, match=r"n must lie between -2\^63 and 2\^64 - 1, got a whole number of 65 bits"):
        numbers(n=2**64)
    with pytest.raises(TypeError, match="x must be float, got 1000"):
        numbers(x=10**400)
    with pytest.raises(ValueError, match="x must be a number, got nan"):
        numbers(x=float("nan"))


@pytest.mark.parametrize("content", ["run: " + "[" * 100_000, f"run: {{steps: '{'[' * 100_000}'}}", LAUGHS])
def test_the_command_line_survives_a_file(content, tmp_path, capsys):
    from subquad.cli.train import run

    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        run(["--config", str(tmp_path / "a.yaml")])
    assert stopped.value.code == 2
    assert "a.yaml" in capsys.readouterr().err


def test_the_command_line_survives_a_file_that_a_file_names(tmp_path, capsys):
    from subquad.cli.train import run

    (tmp_path / "b.yaml").write_text("[" * 100_000)
    (tmp_path / "a.yaml").write_text(f"run: {tmp_path / 'b.yaml'}")
    with pytest.raises(SystemExit) as stopped:
        run(["--config", str(tmp_path / "a.yaml")])
    assert stopped.value.code == 2
    assert "nests more than 100 deep" in capsys.readouterr().err


# --- archives


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_bomb_does_not_go_off(suffix, tmp_path, little):
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(PACKERS[suffix](b"x" * (1 << 16)))
    assert len(packed.read_packed(file)) == 1 << 16
    file.write_bytes(PACKERS[suffix](b"x" * (1 << 20)))
    with pytest.raises(
        ValueError, match=rf"a\.txt\{suffix} is damaged .* unpack to more than [0-9,]+: unpack it yourself"
    ):
        packed.read_packed(file)
    with pytest.raises(BadTextError, match="unpack to more than"):
        list(open_source(str(file)).documents())


def test_much_text_that_packs_well_is_read(tmp_path, little):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(os.urandom(3_000) * 30, 9))
    assert len(packed.read_packed(tmp_path / "a.txt.gz")) == 90_000


def test_a_line_without_an_end_is_not_read(tmp_path, little):
    from subquad.data.lra.read_text import lines

    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"x" * (1 << 20)))
    with pytest.raises(ValueError, match=r"a\.tsv\.gz is damaged .* unpack to more than 105,100"):
        list(lines(tmp_path / "a.tsv.gz"))


def test_a_zip_that_holds_too_much(tmp_path, little):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a", "b"):
            archive.writestr(name, "x" * 40_000)
    with pytest.raises(BadTextError, match="unpack to more than 65,536"):
        list(open_source(str(tmp_path / "a.zip")).documents())


def test_arrays_that_hold_too_much(tmp_path, little):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 20, np.uint8))
    with pytest.raises(ValueError, match=r"a\.npz is no readable npz file: .*unpack to more than 124,600"):
        load_arrays((tmp_path / "a.npz").read_bytes(), tmp_path / "a.npz")


def tar_of(**fields):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"one"))
        for name, kind in fields.items():
            other = tarfile.TarInfo(name)
            other.type, other.linkname = kind
            archive.addfile(other)
    return out.getvalue()


def test_a_tar_whose_file_has_more_than_the_archive(tmp_path, little):
    raw = bytearray(tar_of())
    raw[124:136] = b"77777777777\0"
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    (tmp_path / "a.tar").write_bytes(raw)
    with pytest.raises(BadTextError, match=r"a\.tar is damaged and does not unpack"):
        list(open_source(str(tmp_path / "a.tar")).documents())


@pytest.mark.parametrize("size", [-1, None])
def test_a_tar_that_leads_backwards(size):
    with pytest.raises(OSError, match="its headers lead in a circle or backwards"):
        TarBytes(b"x").read(size)


def test_a_tar_that_leads_in_a_circle():
    stream = TarBytes(b"x" * 512)

    def circle():
        while True:
            stream.seek(0)
            stream.read(512)

    with pytest.raises(OSError, match="its headers lead in a circle"):
        circle()


def test_an_archive_writes_nothing_outside(tmp_path):
    from experiments.harness.data import unpack_archive

    (tmp_path / "a.tar").write_bytes(tar_of(link=(tarfile.SYMTYPE, "/etc")))
    with pytest.raises(
        ValueError, match=r"a\.tar is damaged and does not unpack: 'link' is a link to an absolute path"
    ):
        unpack_archive(tmp_path / "a.tar", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "a.tar").write_bytes(tar_of())
    unpack_archive(tmp_path / "a.tar", tmp_path / "out")
    assert (tmp_path / "out" / "a.txt").read_text() == "one"


def test_an_archive_that_fills_the_disk(tmp_path, little):
    from experiments.harness.data import unpack_archive

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 1 << 20
        archive.addfile(info, io.BytesIO(bytes(1 << 20)))
    (tmp_path / "a.tar.xz").write_bytes(out.getvalue())
    with pytest.raises(ValueError, match=r"a\.tar\.xz is damaged and does not unpack: .* unpack to more than 65,536"):
        unpack_archive(tmp_path / "a.tar.xz", tmp_path / "out")


# --- files and names


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(BadTextError, match=r"b\.txt is no regular file but a pipe, a socket or a device"):
        open_source(str(tmp_path)).fingerprint()


def test_a_name_that_is_no_text_is_written_out(tmp_path):
    (tmp_path / os.fsdecode(b"a\xff.txt")).write_text("one")
    source = open_source(str(tmp_path))
    assert source.names == ["a\\xff.txt"]
    assert len(source.fingerprint()) == 64
    assert [document.name for document in source.documents()] == ["a\\xff.txt"]


@pytest.mark.parametrize("place", ["../x sample.png", "/etc passwd"])
def test_pathfinder_names_images_inside(place, tmp_path):
    from subquad.data.lra.read_images import _rows

    (tmp_path / "0.npy").write_text(f"{place} 0 1\n")
    with pytest.raises(ValueError, match=r"0\.npy, line 1 names .*, which is outside of"):
        list(_rows(tmp_path, tmp_path / "0.npy"))


# --- arrays and images


def npy(header):
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"xxxx"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1152921504606846976,)}\n"), "is no readable npy file"),
        (
            npy("{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,)}\n"),
            "holds 1,000,000,000,000 values",
        ),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"), r"Object arrays cannot be loaded.*nothing"),
        (
            npy("{'descr': '<M8[s]', 'fortran_order': False, 'shape': ()}\n") + b"xxxx",
            "must hold numbers, booleans or texts",
        ),
        (npy("{'descr': '<U1', 'fortran_order': False, 'shape': (1,)}\n"), "codes that are no Unicode characters"),
        (npy("(" * 500), "is no readable npy file"),
        (b"\x80\x04K\x01.", "does not begin as one"),
        (b"PK\x03\x04", "it is an archive of several arrays"),
    ],
    ids=["much", "nothing", "pickled", "times", "codes", "nested", "a pickle", "zip"],
)
def test_an_array_that_is_none(raw, message, tmp_path):
    with pytest.raises(ValueError, match=rf"a\.npy.*{message}"):
        load_array(raw, tmp_path / "a.npy")


def test_an_archive_of_other_files_than_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.txt", "one")
    with pytest.raises(ValueError, match=r"a\.npz is no readable npz file: x\.txt is no array"):
        load_arrays((tmp_path / "a.npz").read_bytes(), tmp_path / "a.npz")


def test_a_label_that_asks_for_too_many_classes(tmp_path):
    from subquad.data.images import load_images

    pixels = np.zeros((2, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, x_test=pixels, y_train=[0, 2**40], y_test=[0, 1])
    with pytest.raises(ValueError, match=r"a\.npz: y_train row 1 is the label 1099511627776, above 65535"):
        load_images(str(tmp_path / "a.npz"))


def test_an_image_of_too_many_pixels(tmp_path, monkeypatch):
    Image.new("L", (30, 20)).save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", "a.png").shape == (20, 30, 1)
    monkeypatch.setattr(image_files, "MOST_PIXELS", 599)
    with pytest.raises(ValueError, match=r"a\.png is damaged or no image: 30 x 20 pixels are more than 599"):
        decode(tmp_path / "a.png", "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 250)  # Pillow's own bound
    with pytest.raises(ValueError, match=r"a\.png is damaged or no image: .*exceeds limit"):
        decode(tmp_path / "a.png", "a.png")


@pytest.mark.parametrize("kind", ["EPS", "GIF", "TIFF", "BMP", "PPM"])
def test_pillow_reads_two_kinds_of_images(kind, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", kind)
    with pytest.raises(ValueError, match=r"a\.png is damaged or no image: cannot identify image file"):
        decode(tmp_path / "a.png", "a.png")


# --- tensors, models, adapters


def test_a_state_whose_entries_do_not_fit(tmp_path):
    header = {"format": "subquad-state", "version": "1", "numbers": "{}", "hashes": '{"": "x"}'}
    cases = [
        ({"a": torch.tensor(1.0)}, {}, "tensors have the batch first, and a has no dimension"),
        ({"a": torch.zeros(1)}, {"numbers": '{"seen": 1.5}'}, "numbers must be whole numbers and hashes texts"),
        ({"a": torch.zeros(1)}, {"hashes": '{"": 1}'}, "numbers must be whole numbers and hashes texts"),
        ({"a": torch.zeros(1)}, {"numbers": '{"a": 1}'}, "two entries have one name"),
        ({"a": torch.zeros(1)}, {"numbers": "[" * 200 + "]" * 200}, "nests more than 100 deep"),
    ]
    for tensors, changes, message in cases:
        (tmp_path / "a.safetensors").write_bytes(save(tensors, metadata={**header, **changes}))
        with pytest.raises(ValueError, match=rf"a\.safetensors has a damaged header: .*{message}"):
            State.load(tmp_path / "a.safetensors")


def test_a_state_of_other_shapes_is_refused_before_it_is_used(tmp_path):
    from subquad.cli.generate import read_state
    from subquad.models import Decoder, DecoderConfig

    shape = {"vocab_size": 9, "dim": 8, "num_layers": 1, "num_heads": 2, "attention": "linear", "position": "none"}
    decoder = Decoder(DecoderConfig(**shape))
    with torch.no_grad():
        state = decoder(torch.zeros(1, 3, dtype=torch.long))[1]
    state.map(lambda tensor: tensor[..., :1]).save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors does not fit the model: "):
        read_state(decoder, str(tmp_path / "a.safetensors"))
    state.save(tmp_path / "a.safetensors")
    assert read_state(decoder, str(tmp_path / "a.safetensors")).seen == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    home = tmp_path_factory.mktemp("model")
    shape = {"vocab_size": 16, "dim": 8, "num_layers": 1, "num_heads": 2, "attention": "linear", "position": "none"}
    SubquadForCausalLM(SubquadConfig(**shape)).save_pretrained(home)
    return home


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**6}, "num_layers=1000000 is more than its weights have place for"),
        ({"loops": 10**9}, "loops=1000000000 is more than its weights have place for"),
        ({"num_labels": 10**9}, "num_labels=1000000000 is more than its weights have place for"),
        ({"vocab_size": 10**9}, r"has shape \[16, 8\], the configuration asks for \[1000000000, 8\]"),
        ({"lookup": 10**9}, r"would have .* numbers, all weights have"),
        ({"dim": 10**15}, "cannot be read as a model"),
        ({"dtype": 5}, "cannot be read as a model"),
        ({"options": {"a": [[]]}}, "cannot be read as a model"),
        ({"subquad_version": 99}, "has subquad_version 99; this release reads version 1"),
    ],
)
def test_a_configuration_that_asks_for_more_than_the_weights(changes, message, folder, tmp_path):
    from subquad.hf import SubquadForCausalLM

    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message) as error:
        SubquadForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert str(tmp_path) in str(error.value)


def test_weights_are_safetensors_alone(folder, tmp_path):
    from subquad.hf import SubquadForCausalLM

    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        SubquadForCausalLM.from_pretrained(tmp_path, local_files_only=True)


def test_a_folder_that_brings_code_is_not_asked_about(folder, tmp_path, monkeypatch):
    from subquad.adaptation.extended import load_causal

    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    values = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="cannot be read as a model: its configuration names code of its own"):
        load_causal(str(tmp_path))


ADAPTER = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["query"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config=.* is not read; leave it out"),
        ({"layer_replication": [[0, 10**6]]}, "layer_replication=.* is not read; leave it out"),
        ({"auto_mapping": {"base_model_class": "x"}}, "auto_mapping=.* is not read; leave it out"),
        ({"r": 10**9}, r"rank 1000000000: it must lie between 1 and \d+, the model's widest layer"),
        ({"r": 0}, "rank 0: it must lie between 1 and"),
        ({"target_modules": "(a+)+$"}, "'target_modules' must be a list"),
        ({"modules_to_save": [1]}, r"modules_to_save must be names of layers, got \[1\]"),
    ],
)
def test_an_adapter_that_asks_for_more_than_factors(changes, message, folder, tmp_path):
    from subquad.hf import SubquadForCausalLM, lora

    pytest.importorskip("peft")
    (tmp_path / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))
    model = SubquadForCausalLM.from_pretrained(folder, local_files_only=True)
    with pytest.raises(ValueError, match=rf"adapter_config\.json is no configuration of a LoRA adapter: .*{message}"):
        lora.load_adapter(model, tmp_path)


def test_a_record_of_a_base_with_other_keys(tmp_path):
    from subquad.hf import lora

    values = {"path": "a", "absolute": "b", "weights": "c", "more": 1}
    (tmp_path / "base.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"base\.json is damaged: it has the keys path, absolute, weights, more"):
        lora.Base.read(tmp_path)


# --- what has checksums that fit


def sealed_shard(file, tokens, documents, changes):
    from subquad.data.shards import _PREFIX, FORMAT_VERSION, HEAD_BYTES, MAGIC

    body = np.array(tokens, "<u2").tobytes() + np.array(documents, "<i8").tobytes()
    head = {
        "tokens": len(tokens), "documents": len(documents) - 1, "dtype": "<u2", "vocab_size": 9, "tokenizer_hash": "x",
        "text_bytes": 1, "words": 1, "sha256": hashlib.sha256(body).hexdigest(), **changes,
    }  # fmt: skip
    text = json.dumps(head).encode()
    start = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), hashlib.sha256(text).digest()) + text
    file.write_bytes(start.ljust(HEAD_BYTES, b"\0") + body)
    return file


@pytest.mark.parametrize(
    ("tokens", "documents", "changes", "message"),
    [
        ([1, 2], [0, 3], {}, "its documents do not divide its 2 tokens"),
        ([1, 2], [1, 2], {}, "its documents do not divide its 2 tokens"),
        ([1, 2, 3], [0, 2, 1, 3], {}, "its documents do not divide its 3 tokens"),
        ([1, 9], [0, 2], {}, "it holds the token 9, of 9"),
        ([1, 2], [0, 2], {"dtype": "|O"}, r"its head has the dtype '\|O'"),
        ([1, 2], [0, 2], {"tokens": -1}, "its head has the dtype '<u2', -1 tokens"),
        ([1, 2], [0, 2], {"tokens": "2"}, "'tokens' must be a int, got '2'"),
        ([1, 2], [0, 2], {"more": 1}, "its head has the keys"),
    ],
)
def test_a_shard_that_contradicts_itself(tokens, documents, changes, message, tmp_path):
    from subquad.data import TokenShard

    with pytest.raises(ValueError, match=rf"a\.tokens is damaged: {message}"):
        TokenShard(sealed_shard(tmp_path / "a.tokens", tokens, documents, changes))


def test_a_store_that_contradicts_itself(tmp_path):
    from subquad.data.lra.store import Store
    from tests.fuzz.targets import make_store, seal_store

    make_store(tmp_path)
    labels, pairs = tmp_path / "test.labels", tmp_path / "test.pairs"
    good = labels.read_bytes(), pairs.read_bytes()
    Store(tmp_path)
    for raw, which, message in (
        (
            np.array([0, 7], "<u2"),
            np.array([0, 1, 1, 0], "<i8"),
            "test names .* classes up to 7 of 2",
        ),
        (np.array([0, 1], "<u2"), np.array([0, 1, 1, 5], "<i8"), "test names documents up to 5 of 2"),
        (np.array([0, 1], "<u2"), np.array([0, 1, -1, 0], "<i8"), "test names documents up to 1 of 2"),
        (np.array([0], "<u2"), np.array([0, 1, 1, 0], "<i8"), "test has 1 labels for 4 documents"),
        (np.array([0, 1, 1], "u1"), np.array([0, 1, 1, 0], "<i8"), "3 bytes are no whole number of values"),
    ):
        labels.write_bytes(raw.tobytes())
        pairs.write_bytes(which.tobytes())
        seal_store(tmp_path)
        with pytest.raises(ValueError, match=f"is damaged: {message}"):
            Store(tmp_path)
    labels.write_bytes(good[0])
    pairs.write_bytes(good[1])
    seal_store(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "vocab_size": 10}))
    with pytest.raises(ValueError, match="train has a vocabulary of 9, not of 10"):
        Store(tmp_path)


def test_a_corpus_whose_manifest_leaves_files_out(tmp_path):
    from subquad.data.corpus import _open
    from tests.fuzz.targets import make_corpus

    make_corpus(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for changes, message in (
        ({"sha256": {}}, r"tokenizer\.json is damaged: its checksum is wrong"),
        ({"contents": []}, "contents and names must be texts"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        with pytest.raises(ValueError, match=message):
            _open(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": [1.5], "lengths": [1], "labels": [0]}, "must be rows of whole numbers"),
        ({"tokens": [1, 2], "lengths": [1], "labels": [0]}, "1 lengths, 1 labels and 2 tokens do not fit"),
        ({"tokens": [1, 2], "lengths": [2]}, "must be rows of whole numbers"),
    ],
)
def test_a_block_that_contradicts_itself_is_made_again(arrays, message, tmp_path, caplog):
    from subquad.data.lra.made import read_block

    np.savez(tmp_path / "0.npz", **arrays)
    assert read_block(tmp_path, 0) is None
    assert message in caplog.text


# --- the rest


def test_a_vocabulary_that_no_model_has_rows_for(tmp_path):
    from subquad.data import load_tokenizer

    values = json.loads(load_tokenizer("bytes").to_str())
    values["model"]["vocab"]["!"] = 1 << 30
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a tokenizer\.json: it must have .* none above 16,777,216"
    ):
        load_tokenizer(tmp_path)


def test_a_character_of_several_letters_is_no_character():
    from tokenizers import Tokenizer, models

    from subquad.data.vocabularies import _single_characters, character_ids, characters

    assert character_ids(characters(["ab"])) == {"a": 0, "b": 1}
    other = Tokenizer(models.WordLevel({"a": 0, "bc": 1}, unk_token="a"))
    other.pre_tokenizer = _single_characters()
    assert character_ids(other) is None


def test_metrics_that_are_no_numbers(tmp_path):
    from subquad.training.progress import read_metrics

    for line, message in (
        ('{"step": 1, "loss": "x"}', r"metrics\.jsonl, line 2 must hold numbers"),
        ('{"loss": 1}', r"metrics\.jsonl, line 2 is damaged: it has no 'step'"),
        ("{", r"metrics\.jsonl, line 2 is not JSON"),
    ):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{line}\n')
        with pytest.raises(ValueError, match=message):
            read_metrics(tmp_path)


def test_a_case_of_an_audit_that_takes_all_memory():
    from subquad.evaluation.audit.case import Case

    case = {"kind": "padding", "tokens": [[1]], "side": "left", "columns": 2**31 - 1, "fills": [0]}
    with pytest.raises(ValueError, match="columns must be at most 1048576, got 2147483647"):
        Case.from_dict(case)
    with pytest.raises(ValueError, match="this is no failing input of an audit: cannot convert float infinity"):
        Case.from_dict({**case, "fills": [float("inf")]})


def test_a_report_of_an_audit_without_its_parts(tmp_path):
    from subquad.evaluation.audit import AuditReport
    from tests.fuzz.targets import make_audit

    make_audit(tmp_path)
    values = json.loads((tmp_path / "a.json").read_text())
    for changes, message in (
        ({"checks": 1}, "the report is damaged: 'checks' must be a list"),
        (
            {"arithmetic": {"weights": 1, "narrowest": "x"}},
            "the report's arithmetic is damaged: 'weights' must be a str",
        ),
        (
            {"checks": [{**values["checks"][0], "failing": 1}]},
            "the report is damaged: the failing input of 'padding left'",
        ),
    ):
        (tmp_path / "a.json").write_text(json.dumps({**values, **changes}))
        with pytest.raises(ValueError, match=rf"a\.json: {message}"):
            AuditReport.load(tmp_path / "a.json")


def test_a_report_of_a_benchmark_with_more(tmp_path):
    from benchmarks.report import Report

    values = {"what": "ops", "settings": {"device": "cpu"}, "rows": [], "more": 1}
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"a\.json is no report of a benchmark: .*'more'"):
        Report.load(tmp_path / "a.json")


def test_a_special_token_that_is_no_text(tmp_path):
    from subquad.serving.texts import read_template

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x", "eos_token": {"text": 1}}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: eos_token must be a text, got None"):
        read_template(tmp_path)


def test_rows_of_a_result_that_do_not_fit(tmp_path):
    from experiments.harness.claims import read_expected
    from experiments.harness.recipe import read_recipe
    from experiments.harness.result import written
    from tests.fuzz.targets import make_experiment

    make_experiment(tmp_path)
    recipe, expected = read_recipe(tmp_path), read_expected(tmp_path)
    values = json.loads((tmp_path / "result.json").read_text())
    scale = values["scales"]["cpu"]
    row = scale["rows"][0]
    for changes, message in (
        ({"rows": [{"arm": "a"}]}, r"result\.json, a row is damaged: it has no 'seed'"),
        ({"rows": [{"arm": name, "seed": 0} for name in "ab"]}, "do not fit claim 'a': KeyError"),
        ({"rows": [{**row, "arm": "a"}], "dates": []}, r"result\.json has rows that make no table: IndexError"),
        ({"dates": [1]}, r"result\.json is damaged: dates and commits must be texts"),
        ({"machines": [1]}, r"result\.json is damaged: each machine must be a mapping"),
    ):
        (tmp_path / "result.json").write_text(json.dumps({"scales": {"cpu": {**scale, **changes}}}))
        with pytest.raises(ValueError, match=message):
            written(tmp_path, recipe, expected)


def test_a_checkpoint_whose_manifest_is_half_there(tmp_path):
    from subquad.training import checkpoint
    from subquad.training.errors import CheckpointError, reading
    from subquad.training.saving import load_rng
    from tests.fuzz.targets import make_checkpoint

    make_checkpoint(tmp_path)
    file = tmp_path / "checkpoint-3" / "manifest.json"
    values = json.loads(file.read_text())
    for changes, message in (
        ({"files": []}, "'files' must be a dict"),
        ({"files": {"a": {}}}, r"manifest\.json, a is damaged: it has no 'bytes'"),
        ({"step": "3"}, "'step' must be a int"),
    ):
        file.write_text(json.dumps({**values, **changes}))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.newest_complete(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(save({"python": torch.zeros(1)}, metadata={"numbers": '{"python": 1}'}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged: TypeError"):
        load_rng(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"here cannot be read: KeyError\('x'\)"), reading("here"):
        raise KeyError("x")
    with pytest.raises(FileNotFoundError, match="x"), reading("here"):
        raise FileNotFoundError("x")
