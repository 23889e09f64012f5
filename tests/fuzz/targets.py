"""Every reader of bytes that somebody hands to the product: how a valid input is made, and what reads it.

A reader takes what is valid and refuses the rest: by `ValueError`, for a configuration also `TypeError`, by `OSError`
for what is not there. The message names the folder or a file in it. Everything else is a fault.
"""

import hashlib
import io
import json
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.data.pictures import write_idx
from tests.fuzz.mutate import PACKERS
from tests.training.lra_files import write_release


@dataclass(frozen=True)
class Target:
    """A reader."""

    make: Callable[[Path], None]
    """Fills an empty folder with what is valid."""
    read: Callable[[Path], object]
    """Reads the folder, and uses what it found."""
    seal: Callable[[Path], None] | None = None
    """Writes the checksums anew that a folder keeps of its files."""
    files: str = "**/*"
    """Which files are changed."""
    quick: int = 60
    """Inputs that `make test` tries; 0 for a reader that takes seconds to set up."""
    raises: tuple[type[Exception], ...] = (ValueError, OSError)
    named: bool = True
    """Whether an error names the folder or a file: what a server is sent has no name."""


TARGETS: dict[str, Target] = {}


def target(make, **options):
    """Enter the reader of a target in the table, under its name."""

    def enter(read):
        TARGETS[read.__name__] = Target(make, read, **options)
        return read

    return enter


TINY = {"vocab_size": 256, "dim": 8, "num_layers": 1, "num_heads": 2}
TEXT = "def f(a):\n    return a + 1  # é\n" * 20


# --- configurations


def settings() -> dict:
    from subquad.config import read_mapping
    from subquad.recipes import recipe_path

    return {**read_mapping(recipe_path("stdlib-llp")), "lora": {"rank": 2, "base": "runs/a", "targets": ["query"]}}


def make_config(folder):
    import yaml

    (folder / "a.yaml").write_text(yaml.safe_dump(settings()))
    (folder / "a.json").write_text(json.dumps(settings()))


@target(make_config, quick=30, raises=(ValueError, TypeError, OSError))
def config(folder):
    from subquad.training import TrainConfig

    for name in ("a.yaml", "a.json"):
        TrainConfig.from_file(folder / name).digest()


@target(make_config, files="a.yaml", quick=3, raises=(SystemExit,), named=False)
def command(folder):
    from subquad.cli.arguments import Parser, files_first
    from subquad.training import TrainConfig

    parser = Parser("train", "")
    parser.add_files()
    parser.add_config(TrainConfig)
    parser.parse_args(files_first(["--config", str(folder / "a.yaml")]))


RECIPE = """
settings: {run: {steps: 3}, data: &data {path: '@little'}}
arms:
  a: {labels: {kind: x}, settings: {data: *data}}
  b: {}
scales:
  smoke: {arms: [a], seeds: [0, 1], minutes: 0.5}
  cpu: {arm_settings: {b: {run: {steps: 2}}}}
group: [arm]
table: [loss]
panels:
- {y: loss, x: arm, log: xy}
"""


def make_experiment(folder):
    (folder / "recipe.yaml").write_text(RECIPE)
    claim = {"id": "a", "says": "x", "theirs": "1", "kind": "lower", "pairs": [[{"arm": "a"}, {"arm": "b"}]]}
    expected = {"paper": "p", "title": "t", "source": "s", "comparable": "yes", "figures": [{"arm": "a", "loss": 1.5}]}
    (folder / "expected.json").write_text(json.dumps({**expected, "claims": [claim]}))
    scale = {
        "identity": "0", "units": 2, "done": 2, "processes": 1, "seconds": 1.5, "dates": ["2026-01-01"],
        "commits": ["0"], "machines": [{"cpu": "x", "cores": 2}], "versions": {"torch": "2"},
        "rows": [{"arm": arm, "seed": seed, "loss": 1.0 + seed} for arm in "ab" for seed in (0, 1)],
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps({"experiment": "e", "scales": {"cpu": scale}}))


@target(make_experiment, quick=40, raises=(ValueError, TypeError, OSError))
def experiment(folder):
    from experiments.harness.claims import read_expected
    from experiments.harness.recipe import read_recipe
    from experiments.harness.result import read_result, written

    recipe, expected = read_recipe(folder), read_expected(folder)
    for scale in recipe.scales:
        recipe.arms_of(scale)
    read_result(folder)
    written(folder, recipe, expected)


# --- tokenizers


def make_tokenizers(folder):
    from subquad.data import load_tokenizer
    from subquad.data.vocabularies import SEPARATOR, characters, train_bpe, train_unigram

    for name, made in (
        ("bytes", load_tokenizer("bytes")),
        ("bpe", train_bpe([TEXT], 270)),
        ("unigram", train_unigram([TEXT], 270)),
        ("characters", characters([TEXT])),
    ):
        text = made.to_str()
        if name == "bytes":
            made.add_special_tokens([SEPARATOR])
            text = made.to_str()
        (folder / f"{name}.json").write_text(text)


@target(make_tokenizers, quick=20)
def tokenizer(folder):
    from subquad.data.tokenizers import Encoder, encode_text, load_tokenizer, separator_id, tokenizer_hash, vocab_size

    for file in sorted(folder.glob("*.json")):
        loaded = load_tokenizer(file)
        assert tokenizer_hash(loaded)
        assert separator_id(loaded) is None or separator_id(loaded) < vocab_size(loaded)
        try:
            encode_text(loaded, TEXT)
            list(Encoder(loaded).encode([TEXT.encode()]))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error  # of a text, which the caller names


def make_gpt2(folder):
    from tokenizers import pre_tokenizers

    ids = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ids |= {"ab": 256, "abc": 257, "<|endoftext|>": 258}
    (folder / "encoder.json").write_text(json.dumps(ids))
    (folder / "vocab.bpe").write_text("#version: 0.2\na b\nab c\n")


@target(make_gpt2, quick=20)
def gpt2(folder):
    from subquad.data.tokenizers import encode_text, load_tokenizer

    encode_text(load_tokenizer(folder), TEXT)


# --- llama2.c's files


def write_llama2c(file, vocab=20):
    """A checkpoint of one layer, its weights drawn."""
    dim, hidden, heads, kv, positions = 8, 12, 2, 1, 6
    count = 2 * dim + 2 * dim * dim + 2 * dim * kv * dim // heads + 3 * dim * hidden + dim
    count += abs(vocab) * dim * (1 if vocab > 0 else 2) + positions * dim // heads
    header = np.array([dim, hidden, 1, heads, kv, vocab, positions], dtype="<i4")
    weights = np.random.default_rng(0).standard_normal(count).astype("<f4")
    file.write_bytes(header.tobytes() + weights.tobytes())


@target(lambda folder: write_llama2c(folder / "a.bin"), quick=40)
def llama2c(folder):
    from subquad.hf.llama2c import read_llama2c

    model = read_llama2c(folder / "a.bin")
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, model.config.vocab_size)


def make_transformers(folder):
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**small, num_attention_heads=2, rope_parameters={"rope_type": "linear"} | ROPE)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


ROPE = {"rope_theta": 100.0, "factor": 2.0}


@target(make_transformers, files="*.*", quick=20)
def imported(folder):
    from subquad.hf import from_transformers

    model = from_transformers(folder)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, model.config.vocab_size)


LLAMA2C_PIECES = [" ", "a", "b", "c", "é", "ab", " a", " ab", "abc", " abc", "bc", "ca"]


def write_llama2c_tokenizer(file, pieces=LLAMA2C_PIECES, scores=None):
    """Token by token; the pieces' scores fall from 0 where none are given."""
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [float(-i) for i in range(len(pieces))] if scores is None else scores
    raw = struct.pack("<i", max(len(token.encode()) for token in tokens))
    for token, score in zip(tokens, scores, strict=True):
        raw += struct.pack("<fi", score, len(token.encode())) + token.encode()
    file.write_bytes(raw)


@target(lambda folder: write_llama2c_tokenizer(folder / "tok.bin"), quick=40)
def llama2c_tokenizer(folder):
    from subquad.data.llama2c import read_llama2c_tokenizer
    from subquad.data.tokenizers import encode_prompt

    found = read_llama2c_tokenizer(folder / "tok.bin")
    assert found.decode(encode_prompt(found, TEXT)) == TEXT


# --- shards, stores and what they are made of


def write_shard(file, tokens=(1, 2, 3, 4, 5), vocab_size=300):
    from subquad.data.shards import ShardWriter

    with ShardWriter(file, vocab_size=vocab_size, tokenizer_hash="0" * 64) as writer:
        for piece in (tokens[:2], tokens[2:]):
            writer.add(np.array(piece))
            writer.end_document(text_bytes=3, words=1)


@target(lambda folder: write_shard(folder / "a.tokens"), quick=50)
def shard(folder):
    from subquad.data import TokenShard

    found = TokenShard(folder / "a.tokens")
    for start, end in zip(found.documents[:-1], found.documents[1:], strict=True):
        assert len(found.tokens[start:end]) == end - start
    assert 0 <= int(found.tokens.max()) < found.vocab_size


def make_corpus(folder):
    from subquad.data import DataConfig, prepare

    text = folder / "text"
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text(f"{TEXT}{i}")
    made = prepare(DataConfig(path=str(text), tokenizer="bytes", cache=str(folder / "cache")))
    for file in made.folder.iterdir():
        file.rename(folder / file.name)
    for left in (*text.iterdir(), *(folder / "cache").rglob("*")):
        if left.is_file():
            left.unlink()


def seal_manifest(folder):
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    file.write_text(json.dumps(manifest))


@target(make_corpus, files="*.*", seal=seal_manifest, quick=20)
def corpus(folder):
    from subquad.data.corpus import _open

    found = _open(folder)
    assert len(found.train)
    assert found.held_out_text() is not None
    "\n".join(found.files).encode()


def make_store(folder):
    from subquad.data.lra.store import Labelled, Pairs, write_store

    some = Labelled(np.array([1, 2, 3]), np.array([2, 1]), np.array([0, 1]))
    parts = {
        part: Pairs([some], np.array([[0, 1], [1, 0]]), np.array([0, 1])) for part in ("train", "held_out", "test")
    }
    write_store(folder, parts, classes=["a", "b"], vocab_size=9, source="x")


def seal_store(folder):
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    for part, sums in manifest["sha256"].items():
        for i, kind in ((1, "labels"), (2, "pairs")):
            sums[i] = hashlib.sha256((folder / f"{part}.{kind}").read_bytes()).hexdigest()
    file.write_text(json.dumps(manifest))


@target(make_store, seal=seal_store, quick=20)
def store(folder):
    from subquad.data.lra.store import PARTS, Sequences, Store

    found = Store(folder)
    for part in PARTS:
        items = Sequences(found, part, 4, np.arange(len(found.labels[part])))
        for i in range(len(items)):
            item = items[i]
            assert int(item["labels"]) < len(found.classes)
            assert int(item["input_ids"].max()) < found.vocab_size


@target(
    lambda folder: np.savez(folder / "0.npz", tokens=[1, 2, 3], lengths=[2, 1], labels=[0, 1]),
    raises=(OSError,),
    quick=20,
)
def block(folder):
    from subquad.data.lra.made import read_block

    found = read_block(folder, 0)
    assert found is None or found.lengths.sum() == len(found.tokens)


def make_token_set(folder):
    from tests.data.sets import make_set

    make_set(folder / "set", [[5, 3], [9]])


def seal_token_set(folder):
    from subquad.config import digest

    file = folder / "set" / "index.json"
    index = json.loads(file.read_text())
    content = {name: index[name] for name in ("tokenizer_hash", "vocab_size", "shards")}
    file.write_text(json.dumps(index | {"sha256": digest(content)}))


@target(make_token_set, files="set/*.[tj]*", seal=seal_token_set, quick=30)
def token_set(folder):
    from subquad.data import TokenSet, windows_of

    found = TokenSet(folder / "set")
    assert len(found.tokens[: len(found)]) == len(found) == found.documents[-1]
    for pack in ("stream", "documents"):
        windows = windows_of(found, 4, pack=pack, cache=str(folder / "cache"))
        for i in range(min(len(windows), 20)):
            assert len(windows[i]["input_ids"]) == 4


def make_packing(folder):
    from subquad.data import windows_of
    from tests.data.sets import make_set

    windows_of(make_set(folder / "set", [[5, 3], [9]]), 4, pack="documents", cache=str(folder / "cache"))


@target(make_packing, files="cache/**/*", quick=30)
def packing(folder):
    from subquad.data import TokenSet, windows_of

    windows = windows_of(TokenSet(folder / "set"), 4, pack="documents", cache=str(folder / "cache"))
    for i in range(len(windows)):
        assert len(windows[i]["input_ids"]) == 4


# --- text


def make_sources(folder):
    (folder / "a.txt").write_text(TEXT)
    for suffix, module in PACKERS.items():
        (folder / f"b.txt{suffix}").write_bytes(module.compress(TEXT.encode()))
    with zipfile.ZipFile(folder / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/a.txt", TEXT)
        archive.writestr("b.txt", TEXT)
    for name, mode in (("d.tar", "w"), ("d.tar.xz", "w:xz"), ("d.tgz", "w:gz"), ("d.tar.bz2", "w:bz2")):
        with tarfile.open(folder / name, mode) as archive:
            for inner in ("x/a.txt", "y" * 120):
                info = tarfile.TarInfo(inner)
                info.size = len(TEXT.encode())
                archive.addfile(info, io.BytesIO(TEXT.encode()))


@target(make_sources, quick=30)
def source(folder):
    from subquad.data.sources import open_source

    found = open_source(str(folder))
    found.fingerprint()
    for document in found.documents():
        document.text.decode()


@target(make_sources, files="d.*", quick=6)
def archive(folder):
    from experiments.harness import data

    for name in ("d.tar", "d.tgz"):
        out = folder.parent / "unpacked"
        data.unpack_archive(folder / name, out)
        assert all(folder.parent in place.resolve().parents for place in out.rglob("*"))


# --- labelled data


def lra(dataset, quick=15):
    """A target for each layout that is read."""

    def make(folder):
        if dataset == "papers":
            rows = [{"id": f"P{i}", "text": f"text {i}"} for i in range(4)]
            (folder / "papers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            for part in ("train", "val", "test"):
                (folder / f"pairs_{part}.tsv").write_text("0\tP0\tP1\n1\tP2\tP3\n")
        elif dataset == "tables":
            for part in ("train", "test"):
                lines = "".join(f"{i % 2}\t{i}\ttext {i}\n" for i in range(12))
                (folder / f"x_{part}.tsv.gz").write_bytes(PACKERS[".gz"].compress(lines.encode()))
        else:
            home = write_release(folder.parent / "release", dataset)
            home.rename(folder / "data")

    def read(folder):
        from subquad.data.config import LabelledConfig
        from subquad.data.labelled import READERS

        name = {"papers": "retrieval", "tables": "text"}.get(dataset, dataset)
        path = folder if dataset in ("papers", "tables") else folder / "data"
        read = READERS[name.rstrip("0123456789")]
        found = read(LabelledConfig(dataset=name, path=str(path)), lambda *_: None)
        for part in found.parts.values():
            for piece in part if not hasattr(part, "documents") else part.documents:
                assert piece.lengths.sum() == len(piece.tokens)

    TARGETS[f"lra_{dataset}"] = Target(make, read, quick=quick)


for layout in ("listops", "text", "retrieval", "papers", "tables"):
    lra(layout)
lra("image", 4)
lra("pathfinder32", 4)


# --- images


def make_npz(folder):
    pixels, labels = np.arange(48, dtype=np.uint8).reshape(3, 4, 4), np.array([0, 1, 0])
    np.savez_compressed(
        folder / "a.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels, classes=np.array(["a", "b"])
    )


def make_blob(folder):
    files = []
    for i in range(3):
        out = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), 50 * i, np.uint8)).save(out, ("PNG", "JPEG", "PNG")[i])
        files.append(out.getvalue())
    offset = np.cumsum([0, *map(len, files)])
    blob = np.frombuffer(b"".join(files), np.uint8)
    np.savez(folder / "a.npz", blob=blob, offset=offset, n_train=2, label=[0, 1, 0], classes=["a", "b"])


def make_cifar(folder):
    record = bytes([3]) + bytes(range(256)) * 12
    (folder / "data_batch_1.bin").write_bytes(record * 2)
    (folder / "test_batch.bin.gz").write_bytes(PACKERS[".gz"].compress(record))


def make_pictures(folder):
    for part in ("train", "test"):
        for name, mode, suffix in (("a", "RGB", "png"), ("b", "P", "png"), ("a", "RGB", "jpg")):
            home = folder / part / name
            home.mkdir(parents=True, exist_ok=True)
            pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
            Image.fromarray(pixels).convert(mode).save(home / f"1.{suffix}")


def read_images(folder):
    from subquad.data.images import load_images

    for images in load_images(str(folder)).values():
        images.fingerprint()
        assert images.labels is None or int(images.labels.max()) < len(images.classes)


for kind, maker in {
    "idx": lambda folder: write_idx(folder, train=4, test=3),
    "idx_packed": lambda folder: write_idx(folder, train=4, test=3, suffix=".gz"),
    "npz": make_npz,
    "blob": make_blob,
    "cifar": make_cifar,
    "pictures": make_pictures,
}.items():
    TARGETS[kind] = Target(maker, read_images, quick=15)


def make_masks(folder):
    np.save(folder / "a.npy", np.eye(4, dtype=np.uint8))
    Image.fromarray(np.eye(4, dtype=np.uint8) * 255).save(folder / "b.png")


@target(make_masks, quick=30)
def mask(folder):
    from subquad.data.occlusion import occlusion

    for name in ("a.npy", "b.png"):
        occlusion(str(folder / name), 4, 4)


# --- states, models, adapters


@cache
def decoder():
    from subquad.models import Decoder, DecoderConfig

    torch.manual_seed(0)
    return Decoder(DecoderConfig(**TINY, attention="llp", options={"llp": {"segment": 4}})).eval()


def make_state(folder):
    with torch.no_grad():
        decoder()(torch.arange(6)[None])[1].save(folder / "a.safetensors")


@target(make_state, quick=30)
def state(folder):
    from subquad.cli.generate import read_state

    found = read_state(decoder(), str(folder / "a.safetensors"))
    assert found.nbytes
    assert found.batch == 1


def make_model(folder):
    from transformers import GenerationConfig

    from subquad.data import load_tokenizer
    from subquad.hf import SubquadConfig, SubquadForCausalLM

    torch.manual_seed(0)
    model = SubquadForCausalLM(SubquadConfig(**TINY, attention="llp", options={"llp": {"segment": 4}}))
    model.generation_config = GenerationConfig(max_length=9)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))


@target(make_model, files="*.[js]*", quick=10, raises=(ValueError, TypeError, OSError))
def model(folder):
    from subquad.training.runs import load_run

    loaded = load_run(folder, "cpu")
    with torch.no_grad():
        loaded.decoder(torch.zeros(1, 3, dtype=torch.long))


@target(make_model, files="config.json", quick=4, raises=(ValueError, TypeError, OSError))
def audited(folder):
    from subquad.adaptation.extended import load_causal

    load_causal(str(folder))


def make_classifier(folder):
    from subquad.hf import SubquadForSequenceClassification
    from subquad.hf.encoders import SubquadClassifierConfig
    from subquad.models import EncoderConfig

    shape = EncoderConfig(**TINY, attention="linear", position="learned", max_positions=9, num_classes=2)
    SubquadForSequenceClassification(SubquadClassifierConfig.from_encoder(shape)).save_pretrained(folder)


@target(make_classifier, quick=6, raises=(ValueError, TypeError, OSError))
def classifier(folder):
    from subquad.training.runs import load_classifier

    load_classifier(folder, "cpu")


def make_image_model(folder):
    from subquad.hf import SubquadForImages
    from subquad.hf.image import SubquadImageConfig
    from subquad.models import ImageModelConfig

    shape = ImageModelConfig(dim=8, num_layers=1, num_heads=2, height=3, width=3, channels=1)
    SubquadForImages(SubquadImageConfig.from_image(shape)).save_pretrained(folder)


@target(make_image_model, quick=3, raises=(ValueError, TypeError, OSError))
def image_model(folder):
    from subquad.training.runs import load_image_run

    load_image_run(folder, "cpu")


def make_adapter(folder):
    from subquad.hf import lora

    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    make_model(base)
    model = lora.load_base(base)
    lora.save_adapter(
        lora.add_adapter(model, rank=1, base=lora.Base(str(base), str(base), lora.weights_digest(base))), adapter
    )
    (adapter / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())


def place_adapter(folder):
    file = folder / "adapter" / "base.json"
    values = json.loads(file.read_text())
    values["path"] = values["absolute"] = str(folder / "base")
    file.write_text(json.dumps(values))


@target(make_adapter, files="adapter/*", seal=place_adapter, quick=5, raises=(ValueError, TypeError, OSError))
def adapter(folder):
    from subquad.adaptation.adapters import adapters
    from subquad.training.runs import load_run

    for found in adapters([str(folder)]):
        assert found.record()["rank"] == found.rank
        found.short.encode()
    load_run(folder / "adapter", "cpu")


# --- checkpoints and runs


def make_checkpoint(folder):
    from subquad.training import checkpoint
    from subquad.training.saving import rng_file, save_rng

    aside = checkpoint.aside(folder, 3)
    aside.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"):
        (aside / name).write_bytes(b"{}")
    save_rng(rng_file(aside, 0))
    checkpoint.publish(aside, folder / "checkpoint-3", step=3, settings={"run.seed": 0})


def seal_checkpoint(folder):
    for file in folder.rglob("checkpoint-*/manifest.json"):
        manifest = json.loads(file.read_text())
        for name, entry in manifest["files"].items():
            raw = (file.parent / name).read_bytes()
            entry.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
        file.write_text(json.dumps(manifest))


@target(make_checkpoint, seal=seal_checkpoint, quick=30)
def checkpoint(folder):
    from subquad.training import checkpoint
    from subquad.training.run import checkpoint_to_resume
    from subquad.training.saving import load_rng, rng_file

    config: Any = SimpleNamespace(run=SimpleNamespace(steps=3))
    found = checkpoint_to_resume(folder, config, "must", {"run.seed": 0})
    checkpoint.rotate(folder, keep=1, best_step=None)
    kept = torch.get_rng_state()
    try:
        load_rng(rng_file(found, 0))
    finally:
        torch.set_rng_state(kept)


def make_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def make_shares(folder):
    from subquad.training import sharding

    with warnings.catch_warnings():  # that it is one process
        warnings.simplefilter("ignore")
        sharding.list_states(folder, sharding.save_optimizer(*make_optimizer(), folder))


@target(make_shares, quick=30)
def shares(folder):
    from subquad.training import sharding
    from subquad.training.errors import reading

    with reading(folder):
        sharding.load_optimizer(*make_optimizer(), folder)


def run_config(folder):
    from subquad.training import TrainConfig

    return TrainConfig.from_dict(
        {
            "task": "probe",
            "model": {**TINY, "attention": "linear", "position": "none"},
            "schedule": {"warmup": 0},
            "probe": {"name": "copy", "symbols": 4, "examples": 8, "held_out": 2},
            "batch": {"length": 10, "size": 2},
            "run": {"folder": str(folder), "steps": 1, "save_every": 1, "eval_every": 1, "eval_windows": 2,
                    "device": "cpu", "threads": 1},
        }
    )  # fmt: skip


def make_run(folder):
    from subquad.training import train

    train(run_config(folder))


@target(make_run, files="checkpoints/*/*", seal=seal_checkpoint, quick=0)
def resume(folder):
    from subquad.training import train

    train(run_config(folder))


def make_metrics(folder):
    rows = [{"step": 2 * i, "loss": 1.5, "lr": 1e-3, "tokens_per_s": 9.5} for i in range(4)] + [
        {"step": 8, "eval_loss": 1.0}
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@target(make_metrics, quick=30)
def metrics(folder):
    from subquad.training.progress import read_metrics

    for record in read_metrics(folder):
        assert all(isinstance(value, int | float) for value in record.values())


# --- reports


def make_audit(folder):
    from subquad.evaluation.audit.report import FORMAT, FORMAT_VERSION

    case = {"kind": "padding", "tokens": [[1, 2], [3]], "side": "left", "columns": 3, "fills": [0], "dtype": "float64"}
    check = {
        "name": "padding left",
        "verdict": "violation",
        "detail": "x",
        "worst": 1e-3,
        "where": {"row": 0},
        "failing": case,
    }
    arithmetic = {"weights": "float64", "narrowest": "float64", "scale": 1.5, "band": 1e-9}
    narrow = {"band": 1e-4, "checks": ["batch"], "alone": ["batch"]}
    report = {
        "format": FORMAT, "version": FORMAT_VERSION, "passed": False, "model": "m", "settings": {"seed": 0},
        "arithmetic": {**arithmetic, "float32": narrow}, "versions": {"torch": "2"}, "checks": [check],
    }  # fmt: skip
    (folder / "a.json").write_text(json.dumps(report))
    (folder / "b.json").write_text(json.dumps({"reports": {"m": report}}))


@target(make_audit, quick=40)
def audit_report(folder):
    from subquad.cli.audit import _report
    from subquad.evaluation.audit import AuditReport
    from subquad.evaluation.audit.case import Case

    for found in (AuditReport.load(folder / "a.json"), _report(str(folder / "b.json"), "m")):
        assert str(found)
        assert found.to_json()
        for check in found.checks:
            if check.failing is not None:
                try:
                    Case.from_dict(check.failing).to_dict()
                except ValueError as error:
                    raise ValueError(f"{folder}: {error}") from error  # `replay` reads no file


def make_bench(folder):
    row = {"name": "llp", "kind": "ours", "status": "ok", "seconds": 0.5}
    (folder / "a.json").write_text(json.dumps({"what": "ops", "settings": {"device": "cpu"}, "rows": [row]}))


@target(make_bench, quick=20)
def bench_report(folder):
    from benchmarks.report import Report

    found = Report.load(folder / "a.json")
    assert found.stem
    assert isinstance(found.failures, list)


def make_results(folder):
    from experiments.lora_mnist.config import MnistConfig
    from subquad.config import digest

    identity = digest([MnistConfig().science(), "f"])
    values = {"identity": identity, "config": {}, "seeds": {"0": {"accuracy": {"base": 0.9}}}, "seconds": {"0": 1.5}}
    (folder / "a.json").write_text(json.dumps(values))


@target(make_results, quick=20)
def lora_results(folder):
    from experiments.lora_mnist.config import MnistConfig
    from experiments.lora_mnist.running import Results

    found = Results.open(MnistConfig(), str(folder / "a.json"), "f")
    found.add(1, {"accuracy": {}})


# --- the server


def make_template(folder):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": template}], "eos_token": {"content": "</s>"}})
    )
    (folder / "chat_template.jinja").write_text(template)


@target(make_template, quick=20)
def template(folder):
    from subquad.data import load_tokenizer
    from subquad.serving.texts import Texts, read_template

    texts = Texts(load_tokenizer("bytes"), read_template(folder))
    try:
        texts.chat([{"role": "user", "content": "a"}])
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error  # an answer to a client, who knows no file


@cache
def client():
    from starlette.testclient import TestClient

    from subquad.data import load_tokenizer
    from subquad.generation import BatchDecoder
    from subquad.serving import ServeConfig
    from subquad.serving.app import Served, make_app
    from subquad.serving.engine import Engine
    from subquad.serving.metrics import Metrics
    from subquad.serving.texts import Texts

    limits = ServeConfig(slots=2, max_prompt=64, max_tokens=8, max_requests=8, max_body=200_000)
    counted = Metrics()
    engine = Engine(BatchDecoder(decoder(), slots=2, max_context=limits.max_context), limits, counted)
    app = make_app(engine, Texts(load_tokenizer("bytes")), limits, Served("tiny", "llp", 1), counted)
    made = TestClient(app, raise_server_exceptions=False)
    made.__enter__()  # the engine runs as long as the process
    return made


def make_requests(folder):
    common = {"max_tokens": 2, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "n": 1}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello é"}]}, {"role": "system", "content": "a"}]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    (folder / "completions.json").write_text(json.dumps({**common, "prompt": ["hello", "é"], **stream}))
    (folder / "chat.json").write_text(json.dumps({**common, "messages": messages, "logit_bias": {}}))


@target(make_requests, quick=10, named=False)
def request(folder):
    for name, path in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions")):
        body = (folder / f"{name}.json").read_bytes()
        answer = client().post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif b"text/event-stream" in answer.headers["content-type"].encode():
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
