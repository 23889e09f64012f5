"""`subquad lora list` and `lora merge`, and the other commands on an adapter's folder."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.adaptation.extended import load_causal
from subquad.cli import eval as eval_command
from subquad.cli import generate
from subquad.cli.lora import run
from subquad.hf import SubquadConfig, SubquadForCausalLM, lora
from subquad.testing import assert_exact, assert_same_maths
from subquad.training.runs import load_run

VOCABULARY = 23


def model(seed=0):
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCABULARY, "dim": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.5}
    return SubquadForCausalLM(SubquadConfig(**shape, attention="llp", options={"llp": {"segment": 8}}))


def save_tokenizer(folder):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base, two adapters of it, and one whose base is gone."""
    home = tmp_path_factory.mktemp("adapters")
    for name, seed in (("base", 0), ("gone", 1)):
        model(seed).save_pretrained(home / name)
        save_tokenizer(home / name)
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
        save_tokenizer(home / name)
    shutil.rmtree(home / "gone")
    return home


def words(capsys, folder, *arguments):
    capsys.readouterr()
    prompt = " ".join(f"w{i}" for i in range(9))
    command = [str(folder), "--prompt", prompt, "--temperature", "0", "--max_tokens", "12"]
    assert generate.run([*command, *map(str, arguments)]) == 0
    return capsys.readouterr().out


def stops(capsys, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_list_shows_each_adapter_once_and_whether_it_fits(runs, capsys, tmp_path):
    assert run(["list", str(runs), "--json", str(tmp_path / "list.json")]) == 0
    out = capsys.readouterr().out
    assert "3 adapters" in out
    assert "checkpoint-3" not in out
    entries = {e["folder"].rpartition("/")[2]: e for e in json.loads((tmp_path / "list.json").read_text())["adapters"]}
    parameters = sum(p.numel() for p in model().parameters())
    assert entries["one"]["rank"] == 2
    assert entries["one"]["base_parameters"] == parameters
    assert entries["one"]["fits"] == "yes"
    assert (entries["two"]["alpha"], entries["two"]["kind"]) == (3, "rsDoRA")
    assert entries["two"]["layers"] == [f"model.layers.{i}.attention.query" for i in range(2)]
    assert entries["two"]["parameters"] == 2 * (4 * (16 + 16) + 16)  # DoRA: a size for each row
    assert entries["lost"]["fits"] == "no: the base is missing"
    assert entries["lost"]["base_parameters"] is None
    run(["list", str(runs / "one"), "--markdown"])
    assert capsys.readouterr().out.startswith("*1 adapter*\n\n| adapter | base |")


def test_list_names_what_is_damaged(runs, capsys, tmp_path):
    assert "there is no folder" in stops(capsys, "list", tmp_path / "nothing")
    shutil.copytree(runs / "one", tmp_path / "one")
    (tmp_path / "one" / "adapter_model.safetensors").unlink()
    run(["list", str(tmp_path), "--markdown"])
    assert "no adapter_model.safetensors" in capsys.readouterr().out
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"x")
    run(["list", str(tmp_path), "--json", str(tmp_path / "list.json")])
    (entry,) = json.loads((tmp_path / "list.json").read_text())["adapters"]
    assert "adapter_model.safetensors is damaged" in entry["fits"]
    assert "there is no folder" in stops(capsys, "list", tmp_path, "--json", tmp_path / "none" / "x.json")
    record = (tmp_path / "one" / "base.json").read_text()
    (tmp_path / "one" / "base.json").write_text("[]")
    shutil.copy(runs / "one" / "adapter_model.safetensors", tmp_path / "one")
    run(["list", str(tmp_path), "--json", str(tmp_path / "list.json")])
    (entry,) = json.loads((tmp_path / "list.json").read_text())["adapters"]
    assert entry["fits"] == "unknown: base.json is damaged"
    (tmp_path / "one" / "base.json").write_text(record)
    (tmp_path / "one" / "base.json").unlink()
    shutil.copy(runs / "one" / "adapter_model.safetensors", tmp_path / "one")
    run(["list", str(tmp_path), "--markdown"])
    assert "unknown: no base.json" in capsys.readouterr().out
    (tmp_path / "one" / "adapter_config.json").write_text('{"r": 2}')
    assert "adapter_config.json is not the configuration of a LoRA adapter: KeyError" in stops(capsys, "list", tmp_path)


def test_a_merged_model_is_the_adapted_one(runs, capsys, tmp_path):
    assert run(["merge", str(runs / "one"), "--out", str(tmp_path / "merged")]) == 0
    assert "holds the merged model" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "merged.json"} <= names
    assert not lora.is_adapter(tmp_path / "merged")
    record = json.loads((tmp_path / "merged" / "merged.json").read_text())
    assert record["adapter"] == str(runs / "one")
    assert words(capsys, tmp_path / "merged") == words(capsys, runs / "one")
    tokens = torch.arange(20)[None]
    adapted = lora.open_adapter(runs / "one").double().eval()
    with torch.no_grad():
        expected = adapted(tokens).logits
        assert_same_maths(lora.merge(adapted)(tokens).logits, expected)
    run(["merge", str(runs / "one" / "checkpoints" / "checkpoint-3"), "--out", str(tmp_path / "from checkpoint")])
    assert (tmp_path / "from checkpoint" / "tokenizer.json").is_file()


def test_merge_refuses_what_it_cannot_do(runs, capsys, tmp_path):
    assert "holds no adapter" in stops(capsys, "merge", runs / "base", "--out", tmp_path / "x")
    assert "already exists" in stops(capsys, "merge", runs / "one", "--out", tmp_path)
    (tmp_path / "file").touch()
    assert "below a file; --out must name a new" in stops(
        capsys, "merge", runs / "one", "--out", tmp_path / "file" / "x"
    )
    error = stops(capsys, "merge", runs / "lost", "--out", tmp_path / "x")
    assert "which is not there" in error
    assert "subquad lora merge" in error
    error = stops(capsys, "merge", runs / "lost", "--base", runs / "base", "--out", tmp_path / "x")
    assert "was trained on other weights than those in" in error
    model(1).save_pretrained(tmp_path / "found")
    assert run(["merge", str(runs / "lost"), "--base", str(tmp_path / "found"), "--out", str(tmp_path / "x")]) == 0


def test_generate_reads_an_adapter_and_puts_one_on_a_base(runs, capsys):
    base, one, two = (words(capsys, runs / name) for name in ("base", "one", "two"))
    assert len({base, one, two}) == 3
    assert words(capsys, runs / "base", "--adapter", runs / "one") == one
    assert words(capsys, runs / "base", "--adapter", runs / "two") == two
    assert words(capsys, runs / "one" / "checkpoints" / "checkpoint-3") == one
    for arguments, message in (
        ((runs / "one", "--adapter", runs / "two"), "is an adapter itself: give its base as RUN"),
        ((runs / "base", "--adapter", runs / "base"), "there is no adapter in"),
        ((runs / "base", "--adapter", runs / "lost"), "was trained on other weights than those in"),
    ):
        with pytest.raises(SystemExit):
            generate.run([str(arguments[0]), "--prompt", "w1", *map(str, arguments[1:])])
        assert message in capsys.readouterr().err


def test_eval_measures_the_adapted_model(runs, capsys, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * 7 % VOCABULARY}" for i in range(60)))
    run(["merge", str(runs / "one"), "--out", str(tmp_path / "merged")])
    losses = {}
    for name, folder in (("base", runs / "base"), ("one", runs / "one"), ("merged", tmp_path / "merged")):
        file = tmp_path / f"{name}.json"
        arguments = ["--data.path", str(tmp_path / "text.txt"), "--data.cache", str(tmp_path / "cache")]
        assert eval_command.run([str(folder), *arguments, "--length", "32", "--json", str(file)]) == 0
        losses[name] = json.loads(file.read_text())["loss"]
    assert f"{losses['one']:.4f}" == f"{losses['merged']:.4f}" != f"{losses['base']:.4f}"


def test_audit_reads_an_adapter(runs):
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert_exact(load_causal(str(runs / "one")).eval()(tokens).logits, load_run(runs / "one").decoder(tokens)[0])


def test_the_decoder_of_an_adapter_carries_its_state(runs):
    decoder = load_run(runs / "one").decoder.double()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        whole = decoder(tokens)[0]
        first, state = decoder(tokens[:, :7])
        second, _ = decoder(tokens[:, 7:], state)
    assert_same_maths(torch.cat([first, second], 1), whole)
    with torch.no_grad():
        assert_exact(load_run(runs / "base", adapter=str(runs / "one")).decoder.double()(tokens)[0], whole)


def test_an_unknown_action_is_answered_with_the_valid_ones(capsys):
    assert run(["lst"]) == 2
    assert "unknown action 'lst'; did you mean 'list'? valid: list, merge" in capsys.readouterr().err
    assert run([]) == 2
    assert "no action" in capsys.readouterr().err
    assert run(["--help"]) == 0
    assert "subquad lora merge RUN" in capsys.readouterr().out
