"""`subquad cost`, and the numbers that it prints: FLOPs against torch's counter, activations against a real run."""

import csv
import json
import re
from contextlib import contextmanager

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from subquad import attention
from subquad.cli import main
from subquad.cli.cost import _model_config
from subquad.cli.tables import count, size
from subquad.models import Decoder, DecoderConfig, costs
from subquad.models.stacks import STACKS
from subquad.ops import flops
from subquad.recipes import recipe_path
from subquad.testing import assert_exact

FORMS = [(name, form) for name in attention.names() for form in attention.mechanism(name).forms]


@pytest.fixture(autouse=True)
def _no_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@contextmanager
def counted(found: list[int]):
    """Adds what torch counts within the block."""
    flops.register()
    with FlopCounterMode(display=False) as counter:
        yield
    found.append(counter.get_total_flops())


def torch_counts(module, x) -> list[int]:
    """Forward and backward FLOPs of `module(x)`, as torch counts what really runs."""
    found: list[int] = []
    with counted(found):
        y = module(x)[0]
    with counted(found):
        y.sum().backward()
    return found


# --- FLOPs


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("tokens", [1, 37, 150])
def test_the_flops_of_a_layer_are_those_that_torch_counts(name, form, tokens):
    layer = attention.build(name, dim=32, num_heads=2, causal=form == "causal")
    cost = layer.cost(tokens)
    forward, backward = torch_counts(layer, torch.randn(1, tokens, 32, requires_grad=True))
    assert cost.mixing_flops + cost.projection_flops == forward > 0
    assert cost.backward_flops == backward > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llp_printed", {"segment": 8, "first_block_projections": True, "shared_kv": False}),
        ("llp_printed", {"segment": 8, "key_norm": False, "split_output": False}),
        ("llp", {"segment": 8, "shifted_heads": True}),
        ("full", {"num_kv_heads": 1, "rope": True, "bias": True}),
        ("performer", {"kernel": "relu"}),
        ("performer", {"kernel": "relu", "causal": False}),
        ("luna", {"tied": False}),
        ("luna", {"tied": False, "causal": False, "pack_heads": 4}),
        ("linformer", {"sharing": "none"}),
        ("strided", {"kind": "fixed", "stride": 16, "columns": 3}),
        ("elita", {"query_term": False}),
    ],
    ids=str,
)
def test_the_flops_of_options_are_those_that_torch_counts(name, options):
    layer = attention.build(name, dim=32, num_heads=2, **options)
    cost = layer.cost(53)
    forward, backward = torch_counts(layer, torch.randn(1, 53, 32, requires_grad=True))
    assert cost.mixing_flops + cost.projection_flops == forward
    assert cost.backward_flops == backward


@pytest.mark.parametrize("names", ["llp", ["full", "latte"]], ids=str)
def test_the_flops_of_a_decoder_are_those_that_torch_counts(names):
    options = {"llp": {"segment": 8}}
    position = "sinusoidal"
    decoder = Decoder(
        DecoderConfig(
            vocab_size=11, dim=16, num_layers=2, num_heads=2, attention=names, options=options, position=position
        )
    )
    cost = decoder.cost(21)
    forward, backward = torch_counts(decoder, torch.randint(0, 11, (1, 21)))
    assert cost.mixing_flops + cost.projection_flops == forward
    assert cost.backward_flops == backward


# --- activations


def kept_in_a_real_run(module, x) -> int:
    """Bytes of the storages that autograd keeps of `module(x)`, its parameters' left out."""
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


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_the_activation_bytes_are_those_that_a_real_run_keeps(name, form):
    layer = attention.build(name, dim=32, num_heads=2, causal=form == "causal")
    expected = kept_in_a_real_run(layer, torch.randn(1, 70, 32, requires_grad=True))
    assert_exact(torch.tensor(layer.cost(70).activation_bytes), torch.tensor(expected))


def test_counting_activations_computes_nothing():
    layer = attention.build("full", dim=32, num_heads=2)
    without_memory = attention.build("luna", dim=32, num_heads=2, own_memory=False)
    before = torch.random.get_rng_state()
    assert layer.cost(2**22).activation_bytes > 2**22 * 32 * 4  # a score matrix of this length would not fit anywhere
    assert without_memory.cost(8).activation_bytes > 0
    assert_exact(torch.random.get_rng_state(), before)


# --- the command


def table(capsys, *arguments) -> str:
    assert main(["cost", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["cost", *arguments])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_all_mechanisms_and_stacks_are_in_the_table(capsys, tmp_path):
    file = tmp_path / "costs.json"
    out = table(capsys, "--tokens", "64", "--dim", "16", "--heads", "2", "--layers", "2", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    shown = {row["name"].partition(" ")[0] for row in rows}
    assert shown == {*attention.names(), *STACKS}
    for name in shown:
        assert re.search(rf"^ {name}\b", out, re.MULTILINE)
    histories = {row["name"] for row in rows if row["name"].startswith("perceiver_ar")}
    assert histories == {f"perceiver_ar {history}" for history in ("cross", "self", "segments", "compressed")}
    for row in rows:
        keeps_none = row["kind"] == "bidirectional" or row["name"] in ("perceiver", "perceiver_io")
        assert (row["state_bytes"] == 0) == keeps_none


def test_the_small_state_of_perceiver_ar_is_explained_where_it_is_shown(capsys):
    note = "perceiver_ar's state is small because exact decoding (decode=exact) computes its latents anew at each token"
    sizes = ["--tokens", "64", "--dim", "16", "--heads", "2", "--layers", "1"]
    assert note in table(capsys, "--attention", "perceiver_ar,llp", *sizes)
    assert note not in table(capsys, "--attention", "llp", *sizes)


def test_the_table_keeps_to_the_columns_that_are_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    out = table(capsys, "--attention", "llp", "--tokens", "64")
    assert max(map(len, out.splitlines())) <= 90


def test_the_numbers_are_those_of_the_layers(capsys, tmp_path):
    file = tmp_path / "costs.csv"
    sizes = ["--tokens", "64", "128", "--dim", "16", "--heads", "2"]
    out = table(capsys, "--attention", "llp,latte", "--options.llp.segment", "16", *sizes, "--csv", str(file))
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["name"], row["tokens"]) for row in rows] == [
        ("llp", "64"),
        ("llp", "128"),
        ("latte", "64"),
        ("latte", "128"),
    ]
    cost = attention.build("llp", dim=16, num_heads=2, segment=16).cost(128)
    assert int(rows[1]["score_entries"]) == cost.score_entries
    assert int(rows[1]["backward_flops"]) == cost.backward_flops
    assert f"128 {count(cost.score_entries)} {count(cost.unmasked_entries)}" in re.sub(r" {2,}", " ", out)
    assert size(cost.activation_bytes) in out


def test_several_options_of_one_mechanism_all_count():
    from subquad.cli.cost import make_parser

    chosen = make_parser().parse_args(["--options.llp.segment", "16", "--options.llp.shifted_heads", "true"])
    assert chosen.options == {"llp": {"segment": 16, "shifted_heads": True}}


def test_a_table_over_the_sequence_is_as_long_as_the_sequence():
    for name in attention.names():
        assert costs.meta_layer(name, dim=16, num_heads=2, tokens=5000, options={}).cost(5000).tokens == 5000


def test_a_recipe_and_a_run_are_models(capsys, tmp_path):
    recipe = table(capsys, "--recipe", "tiny", "--tokens", "32")
    (tmp_path / "config.yaml").write_text(recipe_path("tiny").read_text())
    assert table(capsys, str(tmp_path), "--tokens", "32") == recipe
    assert table(capsys, "--config", str(tmp_path / "config.yaml"), "--tokens", "32") == recipe
    config = _model_config(None, None, "tiny")
    assert count(Decoder(config).cost(32).parameters) in recipe
    assert f"{config.num_layers} layers" in recipe


def test_what_processes_send_that_share_a_sequence(capsys, tmp_path):
    file = tmp_path / "cost.json"
    sizes = ["--dim", "16", "--heads", "2", "--tokens", "64", "128", "--context", "4"]
    out = table(capsys, "--attention", "llp,full,linformer", *sizes, "--json", str(file))
    found = {(row["name"], row["tokens"]): row for row in json.loads(file.read_text())["context"]}
    assert len(found) == 6
    assert (found["linformer", 64]["sent_forward"], found["linformer", 64]["sent_backward"]) == (None, None)
    for name, tokens in (("llp", 64), ("llp", 128), ("full", 128)):
        sent = attention.build(name, dim=16, num_heads=2).communication(tokens, 4)
        row = found[name, tokens]
        assert (row["sent_forward"], row["sent_backward"]) == (
            max(s.forward for s in sent),
            max(s.backward for s in sent),
        )
        assert f"{size(row['sent_forward'])} {size(row['sent_backward'])}" in re.sub(r" {2,}", " ", out)
    assert "Shared by 4 processes" in out
    assert "not shared" in out


def test_what_processes_send_for_a_model(capsys, tmp_path):
    file = tmp_path / "cost.json"
    table(capsys, "--recipe", "tiny", "--tokens", "32", "--context", "2", "--json", str(file))
    config = _model_config(None, None, "tiny")
    model = Decoder(config.replace(dropout=0.5))
    *layers, whole = json.loads(file.read_text())["context"]
    assert [row["name"] for row in layers] == [f"{name}, a layer" for name in dict.fromkeys(config.mechanisms)]
    assert whole["name"] == "in all"
    assert whole["sent_forward"] == max(sent.forward for sent in model.communication(32, 2)) > 0
    assert whole["sent_forward"] == config.num_layers * layers[0]["sent_forward"]


def test_a_classifiers_run_is_a_model_too(tmp_path):
    values = {"task": "classify", "model": {"attention": "full", "dim": 16, "num_heads": 2, "position": "none"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    (measured,) = costs.model_costs(_model_config(str(tmp_path), None, None), [32])
    assert measured.cost.state_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "lpp"], "unknown attention 'lpp'; did you mean 'llp'?"),
        (["--options.lpp.segment", "4"], "unknown attention 'lpp'; did you mean 'llp'?"),
        (
            ["--attention", "llp", "--options.llp.segmen", "4"],
            "attention 'llp' has no option 'segmen'; did you mean 'segment'?",
        ),
        (["--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--dim", "10", "--heads", "4"], "dim must be a positive multiple of num_heads"),
        (["nowhere"], "there is no folder nowhere"),
        (["--config", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["--recipe", "nothing"], "unknown recipe 'nothing'; "),
        (["--recipe", "tiny", "--dim", "8"], "--dim does not go with --recipe; what does: --context, --tokens"),
        (["--recipe", "tiny", "--config", "x"], "--config and --recipe each name a model; give one"),
        (["--context", "0"], "--context must be at least 1 process, got 0"),
        (["--context", "2", "--tokens", "8", "9"], "--tokens must be multiples of --context 2 (equal parts), got 9"),
        (["--tokns", "8"], "unknown option 'tokns'; did you mean 'tokens'?"),
    ],
)
def test_mistakes_are_named(capsys, arguments, message):
    assert message in re.sub(r"\s+", " ", refused(capsys, *arguments))


def test_a_classifier_is_not_shared(capsys, tmp_path):
    values = {"task": "classify", "model": {"attention": "full", "dim": 16, "num_heads": 2, "position": "none"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert "a classifier reads whole sequences" in refused(capsys, str(tmp_path), "--tokens", "32", "--context", "2")


def test_a_folder_without_a_configuration_is_named(capsys, tmp_path):
    assert "holds no config.yaml, so it is no run" in refused(capsys, str(tmp_path))


# --- units


def test_units():
    assert [count(n) for n in (0, 999, 1000, 1234, 99_950, 999_499, 999_500, 1_234_567)] == [
        "0",
        "999",
        "1.00 k",
        "1.23 k",
        "100 k",
        "999 k",
        "1.00 M",
        "1.23 M",
    ]
    assert [size(n) for n in (0, 1023, 1024, 1536, 1024**2 * 10, 1000 * 1024)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 KiB",
        "10.0 MiB",
        "0.98 MiB",
    ]
