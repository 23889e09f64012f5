"""`subquad lora list` and `lora merge`, and the other commands on an adapter's folder."""

import json
import shutil

import pytest
import torch

from subquad.adaptation.extended import load_causal
from subquad.cli import main
from subquad.hf import lora
from subquad.testing import assert_exact, assert_same_maths
from subquad.training.runs import load_run
from tests.cli.folders import VOCABULARY, save_model, word_tokenizer

MODEL = {"num_layers": 2, "options": {"llp": {"segment": 8}}}
TOKENS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base, two adapters of it, and one whose base is gone."""
    home = tmp_path_factory.mktemp("adapters")
    for name, seed in (("base", 0), ("gone", 1)):
        save_model(home / name, seed=seed, **MODEL)
    for name, base, options in (
        ("one", "base", {"rank": 2}),
        ("two", "base", {"rank": 4, "alpha": 3, "dora": True, "rslora": True, "wanted": ["query"]}),
        ("lost", "gone", {"rank": 1}),
    ):
        torch.manual_seed(3)
        adapted = lora.add_adapter(lora.load_base(home / base), base=lora.Base.of(home / base), **options)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.3)
        for folder in (home / name, home / name / "checkpoints" / "checkpoint-3"):
            lora.save_adapter(adapted, folder)
        word_tokenizer().save(str(home / name / "tokenizer.json"))
    shutil.rmtree(home / "gone")
    return home


@pytest.fixture(scope="module")
def merged(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "one"
    assert main(["lora", "merge", str(runs / "one"), "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def words(printed):
    prompt = ["--prompt", " ".join(f"w{i}" for i in range(9)), "--temperature", "0", "--max_tokens", "8"]
    return lambda folder, *arguments: printed("generate", folder, *prompt, *arguments)


def test_list_shows_each_adapter_once_and_whether_it_fits(runs, printed, tmp_path):
    file = tmp_path / "list.json"
    out = printed("lora", "list", runs, "--json", file)
    assert "3 adapters" in out
    assert "checkpoint-3" not in out
    entries = {e["folder"].rpartition("/")[2]: e for e in json.loads(file.read_text())["adapters"]}
    parameters = sum(p.numel() for p in lora.load_base(runs / "base").parameters())
    one, two, lost = (entries[name] for name in ("one", "two", "lost"))
    assert (one["rank"], one["base_parameters"], one["fits"]) == (2, parameters, "yes")
    assert (two["alpha"], two["kind"]) == (3, "rsDoRA")
    assert two["layers"] == [f"model.decoder.layers.{i}.attention.query" for i in range(2)]
    assert two["parameters"] == 2 * (4 * (16 + 16) + 16)  # DoRA: a size for each row
    assert (lost["fits"], lost["base_parameters"]) == ("no: the base is missing", None)
    table = printed("lora", "list", runs / "one", "--markdown")
    assert table.startswith("*1 adapter*\n\n| adapter | base |")


@pytest.mark.parametrize(("name", "content", "fits"), [
    ("adapter_model.safetensors", None, "no adapter_model.safetensors"),
    ("adapter_model.safetensors", "x", "adapter_model.safetensors is damaged"),
    ("base.json", "[]", "unknown: base.json is damaged"),
    ("base.json", None, "unknown: no base.json"),
])  # fmt: skip
def test_list_names_what_is_damaged(runs, printed, tmp_path, name, content, fits):
    shutil.copytree(runs / "one", tmp_path / "one")
    (tmp_path / "one" / name).unlink()
    if content is not None:
        (tmp_path / "one" / name).write_text(content)
    printed("lora", "list", tmp_path, "--json", tmp_path / "list.json")
    (entry,) = json.loads((tmp_path / "list.json").read_text())["adapters"]
    assert fits in entry["fits"]


def test_list_refuses_what_it_cannot_do(tmp_path, refused):
    assert "there is no folder" in refused("lora", "list", tmp_path / "nothing")
    assert "there is no folder" in refused("lora", "list", tmp_path, "--json", tmp_path / "none" / "x.json")
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    message = refused("lora", "list", tmp_path)
    assert "adapter_config.json is not the configuration of a LoRA adapter: KeyError" in message


def test_a_merged_model_is_the_adapted_one(runs, merged, words, printed, tmp_path):
    names = {path.name for path in merged.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "merged.json"} <= names
    assert not lora.is_adapter(merged)
    assert json.loads((merged / "merged.json").read_text())["adapter"] == str(runs / "one")
    assert words(merged) == words(runs / "one")
    step = runs / "one" / "checkpoints" / "checkpoint-3"
    assert "holds the merged model" in printed("lora", "merge", step, "--out", tmp_path / "step")
    assert (tmp_path / "step" / "tokenizer.json").is_file()


def test_merge_refuses_what_it_cannot_do(runs, refused, printed, tmp_path):
    def message(run, *more, out="x"):
        return refused("lora", "merge", runs / run, *more, "--out", tmp_path / out)

    (tmp_path / "file").touch()
    assert "holds no adapter" in message("base")
    assert "already exists" in message("one", out="")
    assert "below a file; --out must name a new" in message("one", out="file/x")
    assert "which is not there" in message("lost")
    assert "subquad lora merge" in message("lost")
    assert "was trained on other weights than those in" in message("lost", "--base", runs / "base")
    found = save_model(tmp_path / "found", seed=1, **MODEL)
    printed("lora", "merge", runs / "lost", "--base", found, "--out", tmp_path / "x")


def test_generate_reads_an_adapter_and_puts_one_on_a_base(runs, words, refused):
    base, one, two = (words(runs / name) for name in ("base", "one", "two"))
    assert len({base, one, two}) == 3
    assert words(runs / "base", "--adapter", runs / "one") == one
    assert words(runs / "base", "--adapter", runs / "two") == two
    assert words(runs / "one" / "checkpoints" / "checkpoint-3") == one
    for run, adapter, message in (
        ("one", "two", "is an adapter itself: give its base as RUN"),
        ("base", "base", "there is no adapter in"),
        ("base", "lost", "was trained on other weights than those in"),
    ):
        assert message in refused("generate", runs / run, "--prompt", "w1", "--adapter", runs / adapter)


def test_a_model_with_an_adapter_is_not_quantized_but_takes_a_dtype(runs, words, refused):
    for asked in ([runs / "one"], [runs / "base", "--adapter", runs / "one"]):
        message = refused("generate", *asked, "--prompt", "w1", "--quantize", "int8")
        assert f"quantize needs a model without an adapter; merge {runs / 'one'} first, with: " in message
        assert f"lora merge {runs / 'one'} --out" in message
        assert words(*asked, "--dtype", "bfloat16")


def test_eval_measures_the_adapted_model(runs, merged, printed, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * 7 % VOCABULARY}" for i in range(60)))
    losses = {}
    for folder in (runs / "base", runs / "one", merged):
        text = ["--data.path", tmp_path / "text.txt", "--data.cache", tmp_path / "cache", "--length", "32"]
        printed("eval", folder, *text, "--json", tmp_path / "found.json")
        losses[folder] = f"{json.loads((tmp_path / 'found.json').read_text())['loss']:.4f}"
    assert losses[runs / "one"] == losses[merged] != losses[runs / "base"]


@torch.no_grad()
def test_the_decoder_of_an_adapter_is_the_audited_model_and_carries_its_state(runs):
    decoder = load_run(runs / "one").decoder
    assert_exact(load_causal(str(runs / "one")).eval()(TOKENS).logits, decoder(TOKENS)[0])
    decoder.double()
    whole, (first, state) = decoder(TOKENS)[0], decoder(TOKENS[:, :7])
    assert_same_maths(torch.cat([first, decoder(TOKENS[:, 7:], state)[0]], 1), whole)
    assert_exact(load_run(runs / "base", adapter=str(runs / "one")).decoder.double()(TOKENS)[0], whole)
