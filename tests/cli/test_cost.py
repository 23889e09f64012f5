"""`subquad cost` and docs/costs.md; counted FLOPs and activations against real runs."""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from experiments.llp_table6 import command as llp_table6
from subquad import attention
from subquad.cli import cost as cost_command
from subquad.cli import main
from subquad.cli.cost import _model_config
from subquad.cli.show import PICTURES
from subquad.cli.tables import count, size
from subquad.models import Decoder, DecoderConfig, costs
from subquad.models.stacks import STACKS
from subquad.ops import flops
from subquad.recipes import recipe_path
from subquad.testing import assert_exact

SMALL = ["--tokens", "64", "--dim", "16", "--heads", "2", "--layers", "1"]
CLASSIFIER = {"task": "classify", "model": {"attention": "full", "dim": 16, "num_heads": 2, "position": "none"}}


def flops_of(function):
    """FLOPs that torch counts while the function runs."""
    flops.register()
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def check_flops(module, x, cost):
    """A module's counted FLOPs are those of a real run, forward and backward."""
    y, forward = flops_of(lambda: module(x)[0])
    _, backward = flops_of(lambda: y.sum().backward())
    assert cost.mixing_flops + cost.projection_flops == forward > 0
    assert cost.backward_flops == backward > 0


def kept_bytes(module, x):
    """Bytes that autograd keeps of `module(x)`, excluding parameters and buffers."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that its address is not given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = module(x)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    total = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
    del result
    return total


FORMS = [(name, {"causal": form == "causal"}) for name in attention.names() for form in attention.mechanism(name).forms]
OPTIONS = [
    ("full", {"num_kv_heads": 1, "rope": True, "bias": True}), ("performer", {"kernel": "relu", "causal": False}),
    ("linformer", {"sharing": "none", "causal": False}),
]  # fmt: skip
MORE_OPTIONS = [
    ("llp_printed", {"segment": 8, "first_block_projections": True, "shared_kv": False}),
    ("llp_printed", {"segment": 8, "key_norm": False, "split_output": False}),
    ("llp", {"segment": 8, "shifted_heads": True}), ("performer", {"kernel": "relu"}), ("luna", {"tied": False}),
    ("luna", {"tied": False, "causal": False, "pack_heads": 4}), ("elita", {"query_term": False}),
    ("strided", {"kind": "fixed", "stride": 16, "columns": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "tokens"), [
    *((*case, 37) for case in FORMS), *((*case, 23) for case in OPTIONS),
    *(pytest.param(*case, tokens, marks=pytest.mark.slow) for case in FORMS for tokens in (1, 150)),
    *(pytest.param(*case, 23, marks=pytest.mark.slow) for case in MORE_OPTIONS),
], ids=str)  # fmt: skip
def test_a_layers_counts_are_those_of_a_real_run(name, options, tokens):
    layer = attention.build(name, dim=32, num_heads=2, **options)
    cost, x = layer.cost(tokens), torch.randn(1, tokens, 32, requires_grad=True)
    check_flops(layer, x, cost)
    assert cost.activation_bytes == kept_bytes(layer, x)


@pytest.mark.parametrize("names", ["llp", ["full", "latte"]], ids=str)
def test_the_flops_of_a_decoder_are_those_of_a_real_run(names):
    shape = {"vocab_size": 11, "dim": 16, "num_layers": 2, "num_heads": 2, "position": "sinusoidal"}
    decoder = Decoder(DecoderConfig(**shape, attention=names, options={"llp": {"segment": 8}}))
    check_flops(decoder, torch.randint(0, 11, (1, 21)), decoder.cost(21))


def test_counting_activations_computes_nothing():
    layer = attention.build("full", dim=32, num_heads=2)
    without_memory = attention.build("luna", dim=32, num_heads=2, own_memory=False)
    before = torch.random.get_rng_state()
    assert layer.cost(2**22).activation_bytes > 2**22 * 32 * 4  # a score matrix of this length would not fit anywhere
    assert without_memory.cost(8).activation_bytes > 0
    assert_exact(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["linformer", "elita"])
def test_a_table_over_the_sequence_is_as_long_as_the_sequence(name):
    assert costs.meta_layer(name, dim=16, num_heads=2, tokens=5000, options={}).cost(5000).tokens == 5000


# --- the command


@pytest.mark.parametrize("names", [["llp", "linformer", "perceiver_ar"], pytest.param([], marks=pytest.mark.slow)])
def test_mechanisms_and_stacks_are_in_the_table(printed, tmp_path, names):
    """Without names, all."""
    asked = ["--attention", ",".join(names)] if names else []
    out = printed("cost", *asked, *SMALL, "--json", tmp_path / "costs.json")
    rows = json.loads((tmp_path / "costs.json").read_text())["rows"]
    shown = {row["name"].partition(" ")[0] for row in rows}
    assert costs.chosen(None, {}) == (attention.names(), list(STACKS))
    assert shown == set(names or [*attention.names(), *STACKS])
    assert all(re.search(rf"^ {name}\b", out, re.MULTILINE) for name in shown)
    histories = {row["name"] for row in rows if row["name"].startswith("perceiver_ar")}
    assert histories == {f"perceiver_ar {history}" for history in ("cross", "self", "segments", "compressed")}
    assert "perceiver_ar's state is small because exact decoding (decode=exact) computes its latents anew" in out
    for row in rows:
        keeps_none = row["kind"] == "bidirectional" or row["name"] in ("perceiver", "perceiver_io")
        assert (row["state_bytes"] == 0) == keeps_none


def test_the_numbers_are_those_of_the_layers(printed, tmp_path, monkeypatch):
    file, asked = tmp_path / "costs.csv", ["--attention", "llp,latte", "--options.llp.segment", "16"]
    out = printed("cost", *asked, *SMALL, "--tokens", "64", "128", "--csv", file)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["name"], row["tokens"]) for row in rows] == [
        (name, tokens) for name in ("llp", "latte") for tokens in ("64", "128")
    ]
    cost = attention.build("llp", dim=16, num_heads=2, segment=16).cost(128)
    assert int(rows[1]["score_entries"]) == cost.score_entries
    assert int(rows[1]["backward_flops"]) == cost.backward_flops
    assert f"128 {count(cost.score_entries)} {count(cost.unmasked_entries)}" in re.sub(r" {2,}", " ", out)
    assert size(cost.activation_bytes) in out
    assert "perceiver_ar" not in out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = printed("cost", "--attention", "linformer", *SMALL, "--tokens", "16384")
    assert max(map(len, narrow.splitlines())) <= 80
    assert re.search(r"^ linformer \(bidirectional\) +16,384( +\d+(\.\d+)? [kMG])+ .* none $", narrow, re.MULTILINE)
    assert "Left out: allowed; parameters; backward. See them in a wider terminal or by" in narrow


def test_a_recipe_a_file_and_a_run_are_models(printed, tmp_path, capsys):
    tiny, file = yaml.safe_load(recipe_path("tiny").read_text()), tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tiny))
    config = _model_config(None, None, "tiny")
    assert _model_config(str(tmp_path), None, None) == _model_config(None, str(file), None) == config
    small = {"dim": 16, "num_layers": 1, "num_heads": 2}
    file.write_text(yaml.safe_dump(tiny | {"model": tiny["model"] | small}))
    config, out = config.replace(**small), printed("cost", "--config", file, "--tokens", "32")
    assert count(Decoder(config).cost(32).parameters) in out
    assert f"{config.num_layers} layers" in out
    file.write_text(yaml.safe_dump(CLASSIFIER))
    assert "none" in printed("cost", tmp_path, "--tokens", "8")  # it keeps no state
    with pytest.raises(SystemExit, match="2"):
        main(["cost", str(tmp_path), "--tokens", "8", "--context", "2"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "a classifier reads whole sequences" in shown.err


def test_bytes_that_processes_send_to_share_a_sequence(printed, tmp_path):
    file = tmp_path / "cost.json"
    sizes = ["--dim", "16", "--heads", "2", "--tokens", "64", "128", "--context", "4"]
    out = printed("cost", "--attention", "llp,full,linformer", *sizes, "--json", file)
    found = {
        (row["name"], row["tokens"]): (row["sent_forward"], row["sent_backward"])
        for row in json.loads(file.read_text())["context"]
    }
    assert len(found) == 6
    assert found["linformer", 64] == (None, None)
    for name, tokens in (("llp", 64), ("llp", 128), ("full", 128)):
        sent = attention.build(name, dim=16, num_heads=2).communication(tokens, 4)
        assert found[name, tokens] == (max(s.forward for s in sent), max(s.backward for s in sent))
        assert " ".join(map(size, found[name, tokens])) in re.sub(r" {2,}", " ", out)
    shared = out.partition("Shared by 4 processes")[2]
    assert re.findall(r"^ (llp|full|linformer)\b", shared, re.MULTILINE) == ["llp", "full", "linformer"]
    assert "not shared" in shared


def test_bytes_that_processes_send_for_a_model(printed, tmp_path):
    file = tmp_path / "cost.json"
    printed("cost", "--recipe", "tiny", "--tokens", "32", "--context", "2", "--json", file)
    config = _model_config(None, None, "tiny")
    model = Decoder(config.replace(dropout=0.5))
    *layers, whole = json.loads(file.read_text())["context"]
    assert [row["name"] for row in layers] == [f"{name}, a layer" for name in dict.fromkeys(config.mechanisms)]
    assert whole["name"] == "in all"
    assert whole["sent_forward"] == max(sent.forward for sent in model.communication(32, 2)) > 0
    assert whole["sent_forward"] == config.num_layers * layers[0]["sent_forward"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--attention", "lpp"], "unknown attention 'lpp'; did you mean 'llp'?"),
    (["--options.lpp.segment", "4"], "unknown attention 'lpp'; did you mean 'llp'?"),
    (["--tokens", "0"], "tokens must be at least 1, got 0"),
    (["latte"], "there is no folder latte; give the folder of a run of `subquad train`; for the mechanism use "
     "--attention latte"),
    (["."], ". has no config.yaml, so it is not a run"),
    (["--config", "nowhere.yaml"], "there is no file nowhere.yaml"),
    (["--recipe", "tiny", "--dim", "8"], "--dim can't be combined with --recipe, only --tokens and --context can"),
    (["--recipe", "tiny", "--config", "x"], "--config and --recipe each name a model; give one"),
    (["--context", "0"], "--context must be at least 1 process, got 0"),
    (["--context", "2", "--tokens", "8", "9"], "--tokens must be multiples of --context 2 (equal parts), got 9"),
])  # fmt: skip
def test_mistakes_are_named(refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in re.sub(r"\s+", " ", refused("cost", *arguments))


def test_numbers_have_three_digits_and_a_unit():
    numbers = (0, 999, 1000, 1234, 99_950, 999_499, 999_500, 1_234_567)
    assert [count(n) for n in numbers] == ["0", "999", "1.00 k", "1.23 k", "100 k", "999 k", "1.00 M", "1.23 M"]
    numbers = (0, 1023, 1024, 1536, 1024**2 * 10, 1000 * 1024)
    assert [size(n) for n in numbers] == ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 MiB", "0.98 MiB"]


# --- docs/costs.md

PAGE = (Path(__file__).resolve().parents[2] / "docs/costs.md").read_text(encoding="utf-8")
WRITTEN = re.compile(
    r"<!-- \w+: written by `(subquad cost|python -m experiments\.llp_table6) (.*?)` -->\n\n(.*?)\n\n<!--", re.S
)
TABLES = {program: (options.split(), table) for program, options, table in WRITTEN.findall(PAGE)}


@pytest.mark.parametrize("names", [["llp"], pytest.param([], marks=pytest.mark.slow)], ids=str)
def test_the_pages_table_of_costs_is_what_the_command_prints(capsys, names):
    options, table = TABLES["subquad cost"]
    assert cost_command.run([*options, *(("--attention", *names) if names else ())]) == 0
    out = capsys.readouterr().out.strip()
    assert out in table if names == [] else set(out.splitlines()) <= set(table.splitlines())
    assert len(out.splitlines()) > 5


def test_the_pages_table_of_the_paper_is_what_its_command_prints(capsys):
    options, table = TABLES["python -m experiments.llp_table6"]
    assert llp_table6.run(options) == 0
    assert capsys.readouterr().out.strip() == table


def test_the_pages_commands_parse():
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    commands = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    assert len(commands) > 5
    for command in commands:
        name, *arguments = shlex.split(command)[1:]
        parser = cost_command.make_parser() if name == "cost" else PICTURES[arguments.pop(0)][0]()
        parser.parse_args(arguments)
