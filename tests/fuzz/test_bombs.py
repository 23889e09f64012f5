"""Malicious files: bombs that unpack to much, headers that promise too much, names that lead outside."""

import gzip
import hashlib
import io
import json
import os
import struct
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from subquad import parsing
from subquad.cli.train import run as train_command
from subquad.config import read_mapping
from subquad.data import packed
from subquad.data.sources import TarBytes, open_source
from subquad.state import CHECKSUM_DIGITS, FORMAT, FORMAT_VERSION
from subquad.training import TrainConfig
from subquad.training.errors import CheckpointError, reading
from subquad.training.progress import metrics_line
from subquad.training.saving import rng_file
from tests.data.pictures import PACK
from tests.fuzz import mutate, targets
from tests.fuzz.run import Tried
from tests.fuzz.targets import SCALE, tarred, zipped

BIG, TAR = 1 << 20, tarred({"a.txt": b"one"})
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
)
MERGES = "a0: &a0 {k0: x, l0: x}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], k{i}: x}}\n" for i in range(1, 30)
)


def npy(descr, shape, rest=b"xxxx"):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + rest


def picture(kind="PNG", size=None):
    """Return a small image; `size` changes the size in a PNG's header."""
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, kind)
    raw = out.getvalue()
    if size is None:
        return raw
    return raw[:8] + mutate.png_piece(b"IHDR", struct.pack(">II", *size) + raw[24:29]) + raw[33:]


def state(tensors, **meta):
    """Return a state's file whose checksum is right, whatever else its header says."""
    blank = "0" * CHECKSUM_DIGITS
    header = {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "checksum": blank,
        "numbers": "{}",
        "hashes": '{"": "x"}',
    }
    data = save(tensors, metadata={**header, "numbers": "{}", "hashes": '{"": "x"}', **meta})
    return data.replace(blank.encode(), hashlib.sha256(data).hexdigest().encode(), 1)


def shard(ids, documents, /, **changes):
    body = np.array(ids, "<u2").tobytes() + np.array(documents, "<i8").tobytes()
    head = {"tokens": len(ids), "documents": len(documents) - 1, "dtype": "<u2", "vocab_size": 9, "words": 1}
    return mutate.sealed_shard({**head, "tokenizer_hash": "x", "text_bytes": 1, "sha256": "", **changes}, body)


def other_state(file):
    targets.decoder()(torch.arange(6)[None])[1].map(lambda tensor: tensor[..., :1].detach()).save(file)


def code(file):
    (file.parent / "evil.py").write_text("raise SystemExit('it ran')\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    file.write_text(json.dumps({"model_type": "evil", "auto_map": names}))


@cache
def made(name, home):
    """Return a target with its valid folder, which is made once."""
    return Tried(name, home / name)


CONFIG, ADAPTER, RNG = "config.json", "adapter/adapter_config.json", str(rng_file(Path("checkpoint-3"), 0))
RESULT, MANIFEST, HALF = "result.json", "checkpoint-3/manifest.json", [{"arm": name, "seed": 0} for name in "ab"]


@pytest.mark.parametrize(("name", "file", "content", "message"), [
    ("config", "a.yaml", "[" * 100_000, "nests more than 100 deep"),
    ("config", "a.yaml", "? " * 100_000 + "x", "nests more than 100 deep"),
    ("config", "a.yaml", "a: &a [*a]", r"the alias \*a stands for itself"),
    ("config", "a.yaml", "a: &a {b: [*a]}", r"the alias \*a stands for itself"),
    ("config", "a.yaml", LAUGHS, "stands for more than 200,000 values"),
    ("config", "a.yaml", MERGES, "stands for more than 200,000 values"),
    ("config", "a.yaml", "a: !!python/object/apply:os.system [exit]", "could not determine a constructor"),
    ("config", "a.yaml", "a: !!float ''", "is not valid YAML: IndexError"),
    ("config", "a.yaml", "a: " + "1" * 5_000, "is not valid YAML: Exceeds the limit"),
    ("config", "a.json", "[" * 100_000, "nests more than 100 deep"),
    ("config", "a.json", "[" * 101 + "]" * 101, "nests more than 100 deep"),
    ("config", "a.json", '{"a": "\\ud800"}', r"spells half a surrogate pair: '\\ud800'"),
    ("config", "a.json", b'{"a": "\xff"}', "is not UTF-8 text: byte 7 is 0xff"),
    ("config", "a.json", "1" * 5_000, "is not JSON: Exceeds the limit"),
    ("config", "a.json", "[1]", "must hold a mapping of keys to values, got list"),
    ("bench_report", "a.json", "[1]", "must hold a mapping, got list"),
    ("config", "a.json", {"run.seed": 2**64}, r"seed must lie between -2\^63 and 2\^64 - 1, got .* 65 bits"),
    ("config", "a.json", {"optimizer.lr": 10**400}, "lr must be float, got 1000"),
    ("config", "a.json", {"optimizer.lr": float("nan")}, "lr must be a number, got nan"),
    # archives
    *(("source", f"b.txt{suffix}", PACK[suffix](b"x" * BIG), "unpack to more than [0-9,]+: unpack it yourself if")
      for suffix in mutate.PACKERS),
    ("source", "c.zip", zipped({"a": b"x" * 40_000, "b": b"x" * 40_000}), "unpack to more than 65,536"),
    ("source", "d.tar", mutate.sealed_tar(bytearray(TAR).replace(b"00000000003\0", b"77777777777\0")), "damaged"),
    ("source", "pipe", os.mkfifo, "is not a regular file but a pipe, a socket or a device"),
    ("archive", "d.tar", tarred({}, link="/etc"), "does not unpack: 'link' is a link to an absolute path"),
    ("archive", "d.tgz", tarred({"a": bytes(BIG)}, "w:gz"), "is damaged and does not unpack: .* unpack to more than"),
    ("lra_tables", "x_train.tsv.gz", gzip.compress(b"x" * BIG), "is damaged .* unpack to more than 105,100"),
    ("npz", "a.npz", zipped({"x.npy": npy("|u1", f"({BIG},)", bytes(BIG))}), "unpack to more than"),
    # arrays and images
    ("npz", "a.npz", zipped({"x": b"one"}), "is not a readable npz file: x is not an array"),
    ("npz", "a.npz", b"PK nonsense", "is not a readable npz file: it is not a zip archive"),
    ("mask", "a.npy", npy("|u1", "(1152921504606846976,)"), "is not a readable npy file"),
    ("mask", "a.npy", npy("|V0", "(1000000000000,)"), "holds 1,000,000,000,000 values"),
    ("mask", "a.npy", npy("|O", "(1,)"), "Object arrays cannot be loaded.*nothing pickled"),
    ("mask", "a.npy", npy("<M8[s]", "()", b"x" * 8), "must hold numbers, booleans or strings"),
    ("mask", "a.npy", npy("<U1", "(1,)"), "strings with invalid Unicode code points"),
    ("mask", "a.npy", npy("(" * 500, "()"), "is not a readable npy file"),
    ("mask", "a.npy", b"\x80\x04K\x01.", "does not begin with npy's magic bytes"),
    ("mask", "a.npy", b"PK\x03\x04", "it is an archive of several arrays"),
    ("mask", "b.png", picture(size=(8193, 8192)), "8193 x 8192 pixels are more than 67,108,864"),
    ("mask", "b.png", picture(size=(20_000, 20_000)), "is damaged or not an image: .*exceeds limit"),
    *(("mask", "b.png", picture(kind), "cannot identify image file") for kind in ("EPS", "GIF", "TIFF", "BMP", "PPM")),
    # tensors, models, adapters
    ("state", "a.safetensors", state({"a": torch.tensor(1.0)}), "the batch first, and a has no dimension"),
    ("state", "a.safetensors", state({"a": torch.zeros(1)}, numbers='{"seen": 1.5}'), "numbers must be whole numbers"),
    ("state", "a.safetensors", state({"a": torch.zeros(1)}, hashes='{"": 1}'), "and hashes texts"),
    ("state", "a.safetensors", state({"a": torch.zeros(1)}, numbers='{"a": 1}'), "two entries have one name"),
    ("state", "a.safetensors", state({"a": torch.zeros(1)}, numbers="[" * 200 + "]" * 200), "nests more than 100 deep"),
    ("state", "a.safetensors", other_state, "does not fit the model: "),
    ("model", CONFIG, {"num_layers": 10**6}, "num_layers=1000000 is more than its weights have place for"),
    ("model", CONFIG, {"num_labels": 10**9}, "num_labels=1000000000 is more than its weights have place for"),
    ("model", CONFIG, {"vocab_size": 10**9}, r"has shape \[256, 8\], the configuration asks for \[1000000000, 8\]"),
    ("model", CONFIG, {"lookup": 10**9}, "would have .* numbers, all weights have"),
    ("model", CONFIG, {"dim": 10**15}, "cannot be read as a model"),
    ("model", CONFIG, {"subquad_version": 99}, "has subquad_version 99; this release reads version 1"),
    ("model", "model.safetensors", lambda file: file.rename(file.parent / "pytorch_model.bin"), r"model\.safetensors"),
    ("audited", CONFIG, code, "cannot be read as a model: its configuration names code of its own"),
    ("adapter", ADAPTER, {"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config=.* is not read"),
    ("adapter", ADAPTER, {"r": 10**9}, r"rank 1000000000: it must lie between 1 and \d+, the model's widest layer"),
    ("adapter", ADAPTER, {"r": 0}, "rank 0: it must lie between 1 and"),
    ("adapter", ADAPTER, {"target_modules": "(a+)+$"}, "'target_modules' must be a list"),
    ("adapter", ADAPTER, {"modules_to_save": [1]}, r"modules_to_save must be names of layers, got \[1\]"),
    ("adapter", "adapter/base.json", {"more": 1}, "is damaged: it has the keys path, .*, more"),
    # checksums that fit
    ("shard", "a.tokens", shard([1, 2], [0, 3]), "its documents do not divide its 2 tokens"),
    ("shard", "a.tokens", shard([1, 2], [1, 2]), "its documents do not divide its 2 tokens"),
    ("shard", "a.tokens", shard([1, 2, 3], [0, 2, 1, 3]), "its documents do not divide its 3 tokens"),
    ("shard", "a.tokens", shard([1, 9], [0, 2]), "token 9 is outside the vocabulary of 9"),
    ("shard", "a.tokens", shard([1, 2], [0, 2], dtype="|O"), r"its head has the dtype '\|O'"),
    ("shard", "a.tokens", shard([1, 2], [0, 2], tokens=-1), "its head has the dtype '<u2', -1 tokens"),
    ("shard", "a.tokens", shard([1, 2], [0, 2], tokens="2"), "'tokens' must be an? int, got '2'"),
    ("shard", "a.tokens", shard([1, 2], [0, 2], tokens=True), "'tokens' must be an? int, got True"),
    ("shard", "a.tokens", shard([1, 2], [0, 2], more=1), "its head has the keys"),
    ("shard", "a.tokens", mutate.sealed_shard([], b"x" * 99), "it must hold a mapping, got list"),
    ("shard", "a.tokens", mutate.sealed_shard({}, b"x" * 99), "is damaged: it has no 'documents'"),
    ("store", "test.labels", np.array([0, 7], "<u2").tobytes(), "test names .* classes up to 7 of 2"),
    ("store", "test.labels", np.array([0], "<u2").tobytes(), "test has 1 labels for 4 documents"),
    ("store", "test.labels", b"\0\1\1", "its 3 bytes are not a multiple of the size of a value"),
    ("store", "test.pairs", np.array([0, 1, 1, 5], "<i8").tobytes(), "test names documents up to 5 of 2"),
    ("store", "test.pairs", np.array([0, 1, -1, 0], "<i8").tobytes(), "test names documents up to 1 of 2"),
    ("store", "manifest.json", {"version": 99}, "has format version 99, this release reads version 1"),
    ("store", "manifest.json", {"vocab_size": 10}, "train does not have the vocabulary of 10 tokens"),
    ("corpus", "manifest.json", {"sha256": {}}, r"tokenizer\.json is damaged: its checksum is wrong"),
    ("corpus", "manifest.json", {"contents": []}, "contents and names must be strings"),
    ("tokenizer", "bytes.json", {"model.vocab.!": 1 << 30}, "it must have .* none above 16,777,216"),
    # runs and reports
    ("metrics", "metrics.jsonl", metrics_line({"step": 1, "loss": "x"}), "line 1 must hold numbers"),
    ("metrics", "metrics.jsonl", metrics_line({"step": 0}) + metrics_line({"loss": 1}), "line 2 .* no 'step'"),
    ("metrics", "metrics.jsonl", '{"step": 0}\n', "line 1 is damaged: it has no 'crc32'"),
    ("metrics", "metrics.jsonl", "{\n", "line 1 is not JSON"),
    ("checkpoint", MANIFEST, {"files": []}, "'files' must be a dict"),
    ("checkpoint", MANIFEST, {"files": {"a": {}}}, r"manifest\.json, a is damaged: it has no 'bytes'"),
    ("checkpoint", MANIFEST, {"step": "3"}, "'step' must be an? int"),
    ("audit_report", "a.json", {"checks": 1}, "the report is damaged: 'checks' must be a list"),
    ("audit_report", "a.json", {"arithmetic.weights": 1}, "arithmetic is damaged: 'weights' must be a str"),
    ("checkpoint", RNG, state({"python": torch.zeros(1)}, numbers='{"python": 1}'), "is damaged: TypeError"),
    ("audit_report", "a.json", {"checks.0.failing.columns": 2**31 - 1}, "columns must be at most 1048576, got 21474"),
    ("audit_report", "a.json", {"checks.0.failing.fills": [1e999]}, "not a failing input of an audit: cannot convert"),
    ("audit_report", "a.json", {"checks.0.failing": 1}, "report is damaged: the failing input of 'padding left'"),
    ("bench_report", "a.json", {"more": 1}, "is not a benchmark report: .*'more'"),
    ("template", "tokenizer_config.json", {"eos_token": {"text": 1}}, "eos_token must be a text, got None"),
    ("experiment", RESULT, {"scales.cpu.rows": [{"arm": "a"}]}, "a row is damaged: it has no 'seed'"),
    ("experiment", RESULT, {"scales.cpu.rows": HALF}, "do not fit claim 'a': KeyError"),
    ("experiment", RESULT, {"scales.cpu.rows": SCALE["rows"][:1], "scales.cpu.dates": []}, "the table: IndexError"),
    ("experiment", RESULT, {"scales.cpu.dates": [1]}, "is damaged: dates and commits must be strings"),
    ("experiment", RESULT, {"scales.cpu.machines": [1]}, "is damaged: each machine must be a mapping"),
])  # fmt: skip
def test_a_malicious_file_is_refused(name, file, content, message, tmp_path_factory, monkeypatch):
    """`content`: the file's content, JSON values to change by their path, or a function that makes the file."""
    home = tmp_path_factory.getbasetemp() / "bombs"
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # answers prompts that ask whether to run code
    monkeypatch.setattr(packed, "LEAST", 1 << 16)
    monkeypatch.setenv("SUBQUAD_CACHE", str(home / "cache"))
    tried = made(name, home).restored()
    place = tried.folder / file
    if callable(content):
        content(place)
    elif isinstance(content, dict):
        with targets.edited(place) as values:
            for path, value in content.items():
                *holders, key = (int(part) if part.isdecimal() else part for part in path.split("."))
                holder = values
                for part in holders:
                    holder = holder[part]
                holder[key] = value
    else:
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    if tried.target.seal is not None and file != MANIFEST:
        tried.target.seal(tried.folder)
    with pytest.raises(tried.target.raises, match=message) as error:
        tried.target.read(tried.folder)
    assert tried.fault(error.value, file) is None, "it names the file or the folder"


def test_files_within_the_limits_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "LEAST", 1 << 16)
    (tmp_path / "a.yaml").write_text("a: &a {b: [1, 2]}\nc: {<<: *a, d: *a}\n")
    assert TrainConfig.from_dict({"run": {"seed": 2**64 - 1}}).run.seed == 2**64 - 1
    assert read_mapping(tmp_path / "a.yaml") == {"a": {"b": [1, 2]}, "c": {"b": [1, 2], "d": {"b": [1, 2]}}}
    for suffix in mutate.PACKERS:
        (tmp_path / f"a{suffix}").write_bytes(PACK[suffix](b"x" * (1 << 16)))
        assert len(packed.read_packed(tmp_path / f"a{suffix}")) == 1 << 16
    (tmp_path / "a.gz").write_bytes(gzip.compress(os.urandom(3_000) * 30, 9))
    assert len(packed.read_packed(tmp_path / "a.gz")) == 90_000, "much text that packs well"


def test_an_endless_text_is_refused(tmp_path, monkeypatch):
    assert parsing.parse_json("[" * 100 + "]" * 100, "a") is not None
    monkeypatch.setattr(parsing, "BYTES", 100)
    (tmp_path / "a.json").write_bytes(b" " * 101)
    for file in (tmp_path / "a.json", "/dev/zero"):
        with pytest.raises(ValueError, match=f"{file} is larger than 100 bytes"):
            parsing.read_json(file)


@pytest.mark.parametrize("content", [
    "run: " + "[" * 100_000, f"run: {{steps: '{'[' * 100_000}'}}", LAUGHS, "run: b.yaml"
], ids=["deep", "deep text", "laughs", "another file"])  # fmt: skip
def test_the_command_line_survives_a_file(content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.yaml").write_text("[" * 100_000)
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        train_command(["--config", "a.yaml"])
    assert stopped.value.code == 2
    assert ("nests more than 100 deep" if content.endswith("b.yaml") else "a.yaml") in capsys.readouterr().err


@pytest.mark.parametrize("size", [-1, None, 512])
def test_a_tar_that_leads_backwards_or_in_a_circle_is_refused(size):
    stream = TarBytes(b"x" * 512)

    def read_on():
        while True:
            stream.seek(0)
            stream.read(size)

    with pytest.raises(OSError, match="its headers lead in a circle or backwards"):
        read_on()


def test_a_name_that_is_not_text_is_escaped(tmp_path):
    (tmp_path / os.fsdecode(b"a\xff.txt")).write_text("one")
    source = open_source(str(tmp_path))
    assert source.names == ["a\\xff.txt"] == [document.name for document in source.documents()]
    assert len(source.fingerprint()) == 64


def test_any_damage_of_a_checkpoint_is_named():
    with pytest.raises(CheckpointError, match=r"here cannot be read: KeyError\('x'\)"), reading("here"):
        raise KeyError("x")
    with pytest.raises(FileNotFoundError, match="x"), reading("here"):
        raise FileNotFoundError("x")
