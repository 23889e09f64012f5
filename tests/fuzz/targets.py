"""Every reader of bytes from outside, with a maker of a valid input.

A reader reads valid files and refuses the rest by `ValueError` (for a configuration also `TypeError`, for a missing
file `OSError`), whose message names the folder or a file in it. Anything else is a fault.
"""

import hashlib
import io
import json
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from starlette.testclient import TestClient
from tokenizers import pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.report import Report
from experiments.harness.claims import read_expected
from experiments.harness.data import unpack_archive
from experiments.harness.recipe import read_recipe
from experiments.harness.result import read_result, written
from experiments.lora_mnist.config import MnistConfig
from experiments.lora_mnist.running import Results
from subquad.adaptation.adapters import adapters
from subquad.adaptation.extended import load_causal
from subquad.cli.arguments import Parser, files_first
from subquad.cli.audit import _report
from subquad.cli.generate import read_state
from subquad.config import digest, read_mapping
from subquad.data import DataConfig, TokenSet, TokenShard, load_images, load_tokenizer, prepare, windows_of
from subquad.data.config import LabelledConfig
from subquad.data.corpus import _open
from subquad.data.labelled import READERS
from subquad.data.llama2c import read_llama2c_tokenizer
from subquad.data.lra.made import read_block
from subquad.data.lra.store import PARTS, Labelled, Pairs, Sequences, Store, write_store
from subquad.data.occlusion import occlusion
from subquad.data.shards import ShardWriter
from subquad.data.sources import open_source
from subquad.data.special_tokens import separator_id
from subquad.data.tokenizers import Encoder, encode_prompt, encode_text, tokenizer_hash, vocab_size
from subquad.data.vocabularies import SEPARATOR, make_tokenizer
from subquad.evaluation.audit import AuditReport
from subquad.evaluation.audit.case import Case
from subquad.evaluation.audit.report import FORMAT, FORMAT_VERSION
from subquad.generation import BatchDecoder
from subquad.hf import SubquadConfig, SubquadForCausalLM, from_transformers, lora
from subquad.hf.llama2c import read_llama2c
from subquad.models import Decoder, DecoderConfig
from subquad.recipes import recipe_path
from subquad.serving import ServeConfig
from subquad.serving.app import Served, make_app
from subquad.serving.engine import Engine
from subquad.serving.metrics import Metrics
from subquad.serving.texts import Texts, read_template
from subquad.training import TrainConfig, checkpoint, sharding, train
from subquad.training.errors import reading
from subquad.training.progress import metrics_line, read_metrics
from subquad.training.run import checkpoint_to_resume
from subquad.training.runs import load_classifier, load_image_run, load_run
from subquad.training.saving import load_rng, rng_file, save_rng
from tests.data.lra.layouts import DATASETS, expressions, papers, pathfinder, pictures, put, release, reviews
from tests.data.pictures import PACK, jpegs, keras, records, write_idx, write_png
from tests.data.sets import make_set
from tests.hf.small import classifier, image_model


@dataclass(frozen=True)
class Target:
    """A reader."""

    make: Callable[[Path], object]
    """Fills an empty folder with valid files."""
    read: Callable[[Path], object]
    """Reads the folder and uses the result."""
    seal: Callable[[Path], None] | None = None
    """Updates the checksums that a folder keeps of its files."""
    files: str = "**/*"
    """Files to damage."""
    quick: int = 20
    """Inputs that `make test` tries; 0 for a reader that takes seconds to set up."""
    raises: tuple[type[BaseException], ...] = (ValueError, OSError)
    named: bool = True
    """Whether an error must name the folder or a file; a server's requests have no names."""


TARGETS: dict[str, Target] = {}
TYPES = (ValueError, TypeError, OSError)
"""What a configuration raises."""
TINY = {"vocab_size": 256, "dim": 8, "num_layers": 1, "num_heads": 2}
TEXT = "def f(a):\n    return a + 1  # é\n" * 20


def target(make, **options):
    """Register a reader in `TARGETS` under its name."""

    def enter(read):
        TARGETS[read.__name__] = Target(make, read, **options)
        return read

    return enter


def files(**contents):
    """Return a maker of files; `__` in a name stands for a dot, and values other than text become JSON."""

    def make(folder):
        for name, content in contents.items():
            put(folder, name.replace("__", "."), content if isinstance(content, str | bytes) else json.dumps(content))

    return make


@contextmanager
def edited(file: Path):
    """Edit the values of a JSON file in place."""
    values = json.loads(file.read_text())
    yield values
    file.write_text(json.dumps(values))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def naming(folder: Path):
    """Add the folder to an error of code that reads no file itself and so can't name one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


SETTINGS = read_mapping(recipe_path("stdlib-llp")) | {"lora": {"rank": 2, "base": "runs/a", "targets": ["query"]}}
make_config = files(a__yaml=yaml.safe_dump(SETTINGS), a__json=SETTINGS)


@target(make_config, raises=TYPES)
def config(folder):
    for name in ("a.yaml", "a.json"):
        TrainConfig.from_file(folder / name).digest()


@target(make_config, files="a.yaml", quick=1, raises=(SystemExit,), named=False)
def command(folder):
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
SCALE = {
    "identity": "0", "units": 2, "done": 2, "processes": 1, "seconds": 1.5, "dates": ["2026-01-01"], "commits": ["0"],
    "machines": [{"cpu": "x", "cores": 2}], "versions": {"torch": "2"},
    "rows": [{"arm": arm, "seed": seed, "loss": 1.0 + seed} for arm in "ab" for seed in (0, 1)],
}  # fmt: skip
EXPECTED = {
    "paper": "p", "title": "t", "source": "s", "comparable": "yes", "figures": [{"arm": "a", "loss": 1.5}],
    "claims": [{"id": "a", "says": "x", "theirs": "1", "kind": "lower", "pairs": [[{"arm": "a"}, {"arm": "b"}]]}],
}  # fmt: skip
RESULT = {"experiment": "e", "scales": {"cpu": SCALE}}


@target(files(recipe__yaml=RECIPE, expected__json=EXPECTED, result__json=RESULT), raises=TYPES)
def experiment(folder):
    recipe, expected = read_recipe(folder), read_expected(folder)
    for scale in recipe.scales:
        recipe.arms_of(scale)
    read_result(folder)
    written(folder, recipe, expected)


def make_tokenizers(folder):
    made = {name: make_tokenizer(name, [TEXT], 270) for name in ("bpe", "unigram", "characters")}
    made["bytes"] = load_tokenizer("bytes")
    made["bytes"].add_special_tokens([SEPARATOR])
    for name, tokenizer in made.items():
        (folder / f"{name}.json").write_text(tokenizer.to_str())


@target(make_tokenizers)
def tokenizer(folder):
    for file in sorted(folder.glob("*.json")):
        loaded = load_tokenizer(file)
        assert tokenizer_hash(loaded)
        assert separator_id(loaded) is None or separator_id(loaded) < vocab_size(loaded)
        with naming(folder):  # the caller names the text
            encode_text(loaded, TEXT)
            list(Encoder(loaded).encode([TEXT.encode()]))


GPT2 = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", SEPARATOR])}
make_gpt2 = files(encoder__json=GPT2, vocab__bpe="#version: 0.2\na b\nab c\n")
TARGETS["gpt2"] = Target(make_gpt2, lambda folder: encode_text(load_tokenizer(folder), TEXT))
LLAMA2C_PIECES = [" ", "a", "b", "c", "é", "ab", " a", " ab", "abc", " abc", "bc", "ca"]


def write_llama2c_tokenizer(file, pieces=LLAMA2C_PIECES, scores=None):
    """Write a llama2.c tokenizer; by default the pieces' scores fall from 0."""
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [float(-i) for i in range(len(pieces))] if scores is None else scores
    raw = struct.pack("<i", max(len(token.encode()) for token in tokens))
    for token, score in zip(tokens, scores, strict=True):
        raw += struct.pack("<fi", score, len(token.encode())) + token.encode()
    file.write_bytes(raw)


@target(lambda folder: write_llama2c_tokenizer(folder / "tok.bin"))
def llama2c_tokenizer(folder):
    found = read_llama2c_tokenizer(folder / "tok.bin")
    assert found.decode(encode_prompt(found, TEXT)) == TEXT


def make_shard(folder):
    with ShardWriter(folder / "a.tokens", vocab_size=300, tokenizer_hash="0" * 64) as writer:
        writer.add_documents(np.array([1, 2, 3, 4, 5]), np.array([2, 3]))


@target(make_shard)
def shard(folder):
    found = TokenShard(folder / "a.tokens")
    for start, end in zip(found.documents[:-1], found.documents[1:], strict=True):
        assert len(found.tokens[start:end]) == end - start
    assert 0 <= int(found.tokens.max()) < found.vocab_size


def make_corpus(folder):
    for i in range(4):
        put(folder.parent / "text", f"{i}.txt", f"{TEXT}{i}")
    cache = str(folder.parent / "corpora")
    made = prepare(DataConfig(path=str(folder.parent / "text"), tokenizer="bytes", cache=cache))
    for file in made.folder.iterdir():
        file.rename(folder / file.name)


def seal_manifest(folder):
    with edited(folder / "manifest.json") as manifest:
        manifest["sha256"] = {name: sha256(folder / name) for name in manifest["sha256"]}


@target(make_corpus, seal=seal_manifest)
def corpus(folder):
    found = _open(folder)
    assert len(found.train)
    assert found.held_out_text() is not None
    "\n".join(found.files).encode()


def make_store(folder):
    some = Labelled(np.array([1, 2, 3]), np.array([2, 1]), np.array([0, 1]))
    parts = {part: Pairs([some], np.array([[0, 1], [1, 0]]), np.array([0, 1])) for part in PARTS}
    write_store(folder, parts, classes=["a", "b"], vocab_size=9, source="x")


def seal_store(folder):
    with edited(folder / "manifest.json") as manifest:
        for part, sums in manifest["sha256"].items():
            sums[1:] = [sha256(folder / f"{part}.{kind}") for kind in ("labels", "pairs")]


@target(make_store, seal=seal_store)
def store(folder):
    found = Store(folder)
    for part in PARTS:
        items = Sequences(found, part, 4, np.arange(len(found.labels[part])))
        for i in range(len(items)):
            assert int(items[i]["labels"]) < len(found.classes)
            assert int(items[i]["input_ids"].max()) < found.vocab_size


@target(lambda folder: np.savez(folder / "0.npz", tokens=[1, 2, 3], lengths=[2, 1], labels=[0, 1]), raises=(OSError,))
def block(folder):
    found = read_block(folder, 0)
    assert found is None or found.lengths.sum() == len(found.tokens)


def seal_token_set(folder):
    with edited(folder / "set" / "index.json") as index:
        index["sha256"] = digest({name: index[name] for name in ("tokenizer_hash", "vocab_size", "shards")})


def read_windows(folder, *packs):
    found = TokenSet(folder / "set")
    for pack in packs:
        windows = windows_of(found, 4, pack=pack, cache=str(folder / "cache"))
        for i in range(min(len(windows), 20)):
            assert len(windows[i]["input_ids"]) == 4
    return found


def make_tokens(folder):
    return make_set(folder / "set", [[5, 3], [9]])


@target(make_tokens, files="set/*.[tj]*", seal=seal_token_set)
def token_set(folder):
    found = read_windows(folder, "stream", "documents")
    assert len(found.tokens[: len(found)]) == len(found) == found.documents[-1]


def make_packing(folder):
    windows_of(make_tokens(folder), 4, pack="documents", cache=str(folder / "cache"))


TARGETS["packing"] = Target(make_packing, lambda folder: read_windows(folder, "documents"), files="cache/**/*")


def zipped(contents):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(contents, mode="w", **links):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, place in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, place
            archive.addfile(link)
    return out.getvalue()


def make_sources(folder):
    raw = TEXT.encode()
    for suffix, pack in PACK.items():
        put(folder, f"b.txt{suffix}", pack(raw))
    put(folder, "a.txt", raw)
    put(folder, "e.jsonl", json.dumps({"text": TEXT, "id": 1}) + "\n")
    put(folder, "e.csv", 'id,text\n1,"a ""b"",\nc"\n')
    put(folder, "c.zip", zipped({"x/a.txt": raw, "b.txt": raw}))
    for name, mode in (("d.tar", "w"), ("d.tar.xz", "w:xz"), ("d.tgz", "w:gz"), ("d.tar.bz2", "w:bz2")):
        put(folder, name, tarred({"x/a.txt": raw, "y" * 120: raw}, mode))


@target(make_sources)
def source(folder):
    found = open_source(str(folder))
    found.fingerprint()
    for document in found.documents():
        document.text.decode()


@target(make_sources, files="d.*", quick=6)
def archive(folder):
    for name in ("d.tar", "d.tgz"):
        out = folder.parent / "unpacked"
        unpack_archive(folder / name, out)
        assert all(folder.parent in place.resolve().parents for place in out.rglob("*"))


LINES = PACK[".gz"]("".join(f"{i % 2}\t{i}\ttext {i}\n" for i in range(12)).encode())
tables = files(x_train__tsv__gz=LINES, x_test__tsv__gz=LINES)


def read_labelled(dataset, folder):
    config = LabelledConfig(dataset=dataset, path=str(folder))
    for part in READERS[dataset.rstrip("0123456789")](config, lambda *_: None).parts.values():
        for piece in part if not hasattr(part, "documents") else part.documents:
            assert piece.lengths.sum() == len(piece.tokens)


for layout, maker in {
    "listops": expressions, "text": reviews, "tables": tables, "retrieval": release, "papers": papers,
    "image": pictures, "pathfinder32": pathfinder,
}.items():  # fmt: skip
    quick = 4 if maker in (pictures, pathfinder) else 15
    TARGETS[f"lra_{layout}"] = Target(maker, partial(read_labelled, DATASETS.get(maker, "text")), quick=quick)


def make_pictures(folder):
    for part in ("train", "test"):
        for file, mode in (("a/1.png", "RGB"), ("b/1.png", "P"), ("a/1.jpg", "RGB")):
            write_png(folder / part / file, np.arange(192, dtype=np.uint8).reshape(8, 8, 3), mode)


def read_images(folder):
    for images in load_images(str(folder)).values():
        images.fingerprint()
        assert images.labels is None or int(images.labels.max()) < len(images.classes)


for kind, maker in {
    "idx": partial(write_idx, train=4, test=3),
    "idx_packed": partial(write_idx, train=4, test=3, suffix=".gz"),
    "npz": lambda folder: np.savez_compressed(folder / "a.npz", **keras()),
    "blob": lambda folder: np.savez(folder / "a.npz", **jpegs()),
    "cifar": files(data_batch_1__bin=records(3, 3), test_batch__bin__gz=PACK[".gz"](records(3))),
    "pictures": make_pictures,
}.items():
    TARGETS[kind] = Target(maker, read_images, quick=15)


def make_masks(folder):
    np.save(folder / "a.npy", np.eye(4, dtype=np.uint8))
    Image.fromarray(np.eye(4, dtype=np.uint8) * 255).save(folder / "b.png")


@target(make_masks)
def mask(folder):
    for name in ("a.npy", "b.png"):
        occlusion(str(folder / name), 4, 4)


LLP: dict[str, Any] = {**TINY, "attention": "llp", "options": {"llp": {"segment": 4}}}


@cache
def decoder():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**LLP)).eval()


def make_state(folder):
    with torch.no_grad():
        decoder()(torch.arange(6)[None])[1].save(folder / "a.safetensors")


@target(make_state)
def state(folder):
    found = read_state(decoder(), str(folder / "a.safetensors"))
    assert found.nbytes
    assert found.batch == 1


def write_llama2c(file, vocab=20):
    """Write a checkpoint of one layer with random weights."""
    dim, hidden, heads, kv, positions = 8, 12, 2, 1, 6
    count = 2 * dim + 2 * dim * dim + 2 * dim * kv * dim // heads + 3 * dim * hidden + dim
    count += abs(vocab) * dim * (1 if vocab > 0 else 2) + positions * dim // heads
    header = np.array([dim, hidden, 1, heads, kv, vocab, positions], dtype="<i4")
    weights = np.random.default_rng(0).standard_normal(count).astype("<f4")
    file.write_bytes(header.tobytes() + weights.tobytes())


def check_logits(model):
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, model.config.vocab_size)


@target(lambda folder: write_llama2c(folder / "a.bin"))
def llama2c(folder):
    check_logits(read_llama2c(folder / "a.bin"))


def make_transformers(folder):
    torch.manual_seed(0)
    small = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    rope = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    config = LlamaConfig(**small, num_attention_heads=2, rope_parameters=rope)
    LlamaForCausalLM(config).save_pretrained(folder)


@target(make_transformers, files="*.*", quick=8)
def imported(folder):
    check_logits(from_transformers(folder))


def make_model(folder):
    torch.manual_seed(0)
    model = SubquadForCausalLM(SubquadConfig(**LLP))
    model.generation_config = GenerationConfig(max_length=9, eos_token_id=[3, 5])
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CHAT))


@target(make_model, files="*.[js]*", quick=10, raises=TYPES)
def model(folder):
    with torch.no_grad():
        loaded = load_run(folder, "cpu")
        loaded.decoder(torch.zeros(1, 3, dtype=torch.long))
        assert all(type(token) is int for token in loaded.end_tokens)


@target(make_model, files="config.json", quick=4, raises=TYPES)
def audited(folder):
    load_causal(str(folder))


for kind, maker, load in (("classifier", classifier, load_classifier), ("image_model", image_model, load_image_run)):
    make, read = (lambda folder, maker=maker: maker().save_pretrained(folder)), partial(load, device="cpu")
    TARGETS[kind] = Target(make, read, quick=6, raises=TYPES)


def make_adapter(folder):
    base, home = folder / "base", folder / "adapter"
    base.mkdir()
    make_model(base)
    record = lora.Base(str(base), str(base), lora.weights_digest(base))
    lora.save_adapter(lora.add_adapter(lora.load_base(base), rank=1, base=record), home)
    (home / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())


def place_adapter(folder):
    with edited(folder / "adapter" / "base.json") as values:
        values["path"] = values["absolute"] = str(folder / "base")


@target(make_adapter, files="adapter/*", seal=place_adapter, quick=5, raises=TYPES)
def adapter(folder):
    for found in adapters([str(folder)]):
        assert found.to_dict()["rank"] == found.rank
        found.short.encode()
    load_run(folder / "adapter", "cpu")


def make_checkpoint(folder):
    aside = checkpoint.aside(folder, 3)
    aside.mkdir()
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"):
        (aside / name).write_bytes(b"{}")
    save_rng(rng_file(aside, 0))
    checkpoint.publish(aside, folder / "checkpoint-3", step=3, settings={"run.seed": 0})


def seal_checkpoint(folder):
    for file in folder.rglob("checkpoint-*/manifest.json"):
        with edited(file) as manifest:
            for name, entry in manifest["files"].items():
                place = file.parent / name
                entry.update(bytes=place.stat().st_size, sha256=sha256(place))


def read_checkpoint(folder):
    config: Any = SimpleNamespace(run=SimpleNamespace(steps=3))
    found = checkpoint_to_resume(folder, config, "must", {"run.seed": 0})
    checkpoint.rotate(folder, keep=1, best_step=None)
    with torch.random.fork_rng():
        load_rng(rng_file(found, 0))


TARGETS["checkpoint"] = Target(make_checkpoint, read_checkpoint, seal=seal_checkpoint)


def make_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def make_shares(folder):
    with warnings.catch_warnings():  # of a single process
        warnings.simplefilter("ignore")
        sharding.list_states(folder, sharding.save_optimizer(*make_optimizer(), folder))


@target(make_shares)
def shares(folder):
    with reading(folder):
        sharding.load_optimizer(*make_optimizer(), folder)


def resume(folder):
    """Train one step, or resume after it."""
    run = {"steps": 1, "save_every": 1, "eval_every": 1, "eval_windows": 2, "device": "cpu", "threads": 1}
    values = {
        "task": "probe", "model": {**TINY, "attention": "linear", "position": "none"}, "schedule": {"warmup": 0},
        "probe": {"name": "copy", "symbols": 4, "examples": 8, "held_out": 2}, "batch": {"length": 10, "size": 2},
        "run": {"folder": str(folder), **run},
    }  # fmt: skip
    train(TrainConfig.from_dict(values))


TARGETS["resume"] = Target(resume, resume, files="checkpoints/*/*", seal=seal_checkpoint, quick=0)
ROWS = [
    *({"step": 2 * i, "loss": 1.5, "lr": 1e-3, "tokens_per_s": 9.5} for i in range(4)),
    {"step": 8, "eval_loss": 1.0},
]


@target(files(metrics__jsonl="".join(map(metrics_line, ROWS))))
def metrics(folder):
    for record in read_metrics(folder):
        assert all(isinstance(value, int | float) for value in record.values())


CASE = {"kind": "padding", "tokens": [[1, 2], [3]], "side": "left", "columns": 3, "fills": [0], "dtype": "float64"}
REPORT = {
    "format": FORMAT, "version": FORMAT_VERSION, "passed": False, "model": "m", "settings": {"seed": 0},
    "arithmetic": {
        "weights": "float64", "narrowest": "float64", "scale": 1.5, "band": 1e-9,
        "float32": {"band": 1e-4, "checks": ["batch"], "alone": ["batch"]},
    },
    "versions": {"torch": "2"},
    "checks": [{
        "name": "padding left", "verdict": "violation", "detail": "x", "worst": 1e-3, "where": {"row": 0},
        "failing": CASE,
    }],
}  # fmt: skip


@target(files(a__json=REPORT, b__json={"reports": {"m": REPORT}}))
def audit_report(folder):
    for found in (AuditReport.load(folder / "a.json"), _report(str(folder / "b.json"), "m")):
        assert str(found)
        assert found.to_json()
        for check in found.checks:
            if check.failing is not None:
                with naming(folder):  # `replay` reads no file
                    Case.from_dict(check.failing).to_dict()


TIMED = {"name": "llp", "kind": "ours", "status": "ok", "seconds": 0.5}


@target(files(a__json={"what": "ops", "settings": {"device": "cpu"}, "rows": [TIMED]}))
def bench_report(folder):
    found = Report.load(folder / "a.json")
    assert found.stem
    assert isinstance(found.failures, list)


IDENTITY = digest([MnistConfig().science(), "f"])
ACCURACIES = {"identity": IDENTITY, "config": {}, "seeds": {"0": {"accuracy": {"base": 0.9}}}, "seconds": {"0": 1.5}}


@target(files(a__json=ACCURACIES))
def lora_results(folder):
    Results.open(MnistConfig(), str(folder / "a.json"), "f").add(1, {"accuracy": {}})


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
CHAT = {"chat_template": [{"name": "default", "template": TEMPLATE}], "eos_token": {"content": "</s>"}}


@target(files(tokenizer_config__json=CHAT, chat_template__jinja=TEMPLATE))
def template(folder):
    texts = Texts(load_tokenizer("bytes"), read_template(folder))
    with naming(folder):  # the error goes to a client, who knows no file
        texts.chat([{"role": "user", "content": "a"}])


@cache
def client():
    limits = ServeConfig(slots=2, max_prompt=64, max_tokens=8, max_requests=8, max_body=200_000)
    counted = Metrics()
    engine = Engine(BatchDecoder(decoder(), slots=2, max_context=limits.max_context), limits, counted)
    app = make_app(engine, Texts(load_tokenizer("bytes")), limits, Served("tiny", "llp", 1), counted)
    made = TestClient(app, raise_server_exceptions=False)
    made.__enter__()  # the engine runs as long as the process
    return made


COMMON = {"max_tokens": 2, "temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "n": 1}
COMPLETIONS = {**COMMON, "prompt": ["hello", "é"], "stream": True, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hello é"}]}, {"role": "system", "content": "a"}]
BIASED = {"presence_penalty": 0.5, "frequency_penalty": -1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [3]}
TALK = {**COMMON, **BIASED, "messages": MESSAGES, "logit_bias": {"5": 1.5}}


@target(files(completions__json=COMPLETIONS, chat__json=TALK), quick=6, named=False)
def request(folder):
    for name, path in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions")):
        body = (folder / f"{name}.json").read_bytes()
        answer = client().post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        elif "text/event-stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
