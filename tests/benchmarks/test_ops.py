"""`measure_ops`: rows, ratios, files; a case that runs out of memory; other libraries, there or not."""

import json
import re
import time

import pytest
import torch

from benchmarks import operators as _cases
from benchmarks import ops
from benchmarks import peers as _peers
from benchmarks.config import LayersConfig, OpsConfig
from benchmarks.layers import measure_layers
from benchmarks.operators import ENGINES, PASSES, Engine, Operator, Shape, our_cases, sdpa, segments, unfused, window
from benchmarks.ops import measure_ops
from benchmarks.peers import Peer
from benchmarks.report import Report
from subquad import attention
from subquad.ops.patterns import Causal
from subquad.testing import assert_in_budget, assert_same_maths

TINY = {"heads": 2, "channels": 8, "latents": [4], "segment": [16], "repeats": 2, "peers": "none"}


@pytest.fixture(scope="module")
def report():
    """All operators at two lengths, two numbers of latents and two segments."""
    config = {**TINY, "latents": [4, 6], "segment": [16, 8]}
    return measure_ops(OpsConfig(mechanisms=list(ENGINES), tokens=[32, 48], passes=list(PASSES), **config))


def test_there_is_a_row_for_each_case_length_and_pass(report):
    found = {(row["label"], row["tokens"], row["pass"]) for row in report.rows}
    sizes = {f"llp, segment {n}" for n in (16, 8)} | {f"window, {n} wide" for n in (16, 8)}
    labels = {"sdpa, causal", "full", "linear", "elita", *sizes, *(f"latte, {n} latents per head" for n in (4, 6))}
    labels |= {f"{scan} scan, a decay per {of}" for scan in ("gated", "delta") for of in ("head", "channel")}
    labels |= {"delta scan", "gated scan, as Mamba-2"}
    assert found == {(label, tokens, which) for label in labels for tokens in (32, 48) for which in PASSES}
    assert len(report.rows) == len(found)
    assert {row["status"] for row in report.rows} == {"ok"}
    assert {row["repeats"] for row in report.rows} == {2}


def test_ratios_are_those_of_the_medians_of_the_same_turns(report):
    base = {(row["tokens"], row["pass"]): row["median_s"] for row in report.rows if row["name"] == "sdpa"}
    for row in report.rows:
        assert row["times_faster"] == base[row["tokens"], row["pass"]] / row["median_s"]
        assert row["p20_s"] <= row["median_s"] <= row["p80_s"]
        assert row["bytes_per_s"] > 0
        if row["flops"]:
            assert row["flops_per_s"] == row["flops"] / row["median_s"]


def test_memory_is_measured_with_the_output_and_the_gradients(report):
    inputs = 3 * 2 * 32 * 8 * 4  # q, k and v of 2 heads, 32 tokens and 8 channels in float32
    rows = {row["pass"]: row for row in report.rows if row["label"] == "linear" and row["tokens"] == 32}
    assert rows["forward"]["io_bytes"] == inputs * 4 // 3
    assert rows["forward_backward"]["io_bytes"] == 2 * rows["forward"]["io_bytes"]
    assert rows["forward"]["peak_bytes"] >= inputs // 3
    assert rows["forward_backward"]["peak_bytes"] >= inputs * 4 // 3
    assert rows["backward"]["peak_bytes"] is None


def test_the_files_hold_the_rows_and_their_provenance(report, tmp_path):
    file = report.save(tmp_path / "results")
    assert [file] == list((tmp_path / "results").iterdir()) == [tmp_path / "results" / "cpu_ops.json"]
    record = json.loads(file.read_text())
    assert record["rows"] == report.rows
    assert set(record["provenance"]) == {"date", "machine", "versions", "commit"}
    assert {"cpu", "cores", "threads", "memory_bytes"} <= set(record["provenance"]["machine"])
    assert record["provenance"]["versions"]["torch"] == torch.__version__
    assert set(record["ceilings"]) == {"copy_bytes_per_s", "matmul_flops_per_s"}
    assert Report.load(file) == report


def test_the_table_has_a_line_for_each_row_and_the_ceilings(report):
    table = report.table()
    assert table.count("\n| llp, segment 16 | 32 |") == 3
    assert "*Forward + backward: batch 1, 2 heads of 8 channels, float32" in table
    assert "In the same run: a copy" in table


def replaced(monkeypatch, name, make):
    """The operator `name` made by `make(shape, backend)`."""
    monkeypatch.setitem(_cases.ENGINES, name, Engine(make, lambda _: name, lambda _: 1))


def test_a_length_that_runs_out_of_memory_says_so_and_the_run_goes_on(monkeypatch):
    def make(shape, backend):
        if shape.tokens > 32:
            raise torch.OutOfMemoryError("no room for so many")
        return ENGINES["llp"].make(shape, backend)

    replaced(monkeypatch, "full", make)
    report = measure_ops(OpsConfig(mechanisms=["full", "linear"], tokens=[32, 48, 16], **TINY))
    status = {(row["name"], row["tokens"]): row["status"] for row in report.rows}
    assert {key: value for key, value in status.items() if value != "ok"} == {("full", 48): "out of memory"}
    assert report.failures == []
    assert "full: out of memory: no room for so many" in report.table()


def test_memory_that_ends_inside_of_a_call_is_told_apart_by_pass(monkeypatch):
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")

    replaced(monkeypatch, "linear", lambda shape, _: Operator(shape.qkv(), lambda q, k, v: Greedy.apply(q + k + v)))
    report = measure_ops(OpsConfig(mechanisms=["linear"], tokens=[16], **TINY))
    status = {row["pass"]: row["status"] for row in report.rows if row["name"] == "linear"}
    assert status == {"forward": "ok", "forward_backward": "out of memory"}


def test_after_the_deadline_lengths_are_skipped_and_what_was_found_is_kept():
    heard = []
    config = OpsConfig(mechanisms=["linear"], tokens=[16, 32], **TINY)
    report = measure_ops(config, deadline=time.monotonic() - 1, found=lambda part: heard.append(len(part.rows)))
    assert {row["status"] for row in report.rows} == {"skipped"}
    assert heard == [4, 8]


def test_a_pass_that_would_take_too_long_by_the_square_of_its_tokens_is_skipped(monkeypatch):
    """0.1 s at 32 tokens would be 1.6 s at 128."""

    def make(shape, backend):
        return Operator(shape.qkv(), lambda q, k, v: time.sleep(0.1) or v * 1)

    replaced(monkeypatch, "linear", make)
    settings = {**TINY, "repeats": 1, "passes": ["forward"], "limit": 1.0}
    report = measure_ops(OpsConfig(mechanisms=["linear"], tokens=[16, 32, 128], **settings))
    rows = {row["tokens"]: row for row in report.rows if row["name"] == "linear"}
    assert [rows[tokens]["status"] for tokens in (16, 32, 128)] == ["ok", "ok", "skipped"]
    assert re.match(r"it could take \d+ s a pass", rows[128]["message"])
    assert {row["status"] for row in report.rows if row["name"] == "sdpa"} == {"ok"}


def test_a_pass_that_would_need_too_much_memory_by_its_tokens_is_skipped(monkeypatch):
    """640 kB at 16 tokens would be 1.28 MB at 32, beyond four fifths of 1 MiB."""

    def make(shape, backend):
        return Operator(shape.qkv(), lambda q, k, v: v + v.new_zeros(shape.tokens, 10_000).sum())

    replaced(monkeypatch, "linear", make)
    monkeypatch.setattr(ops, "total_bytes", lambda device: 2**20)
    report = measure_ops(OpsConfig(mechanisms=["linear"], tokens=[16, 32], **{**TINY, "passes": ["forward"]}))
    assert [row["status"] for row in report.rows if row["name"] == "linear"] == ["ok", "skipped"]
    assert re.match(r"it could need \d+\.\d GiB", report.rows[-1]["message"])


def test_whole_layers_are_timed_beside_full_attention():
    names = LayersConfig().mechanisms
    assert names == [
        name for name in attention.names() if "causal" in attention.mechanism(name).forms and name != "full"
    ]
    report = measure_layers(LayersConfig(mechanisms=["llp", "longformer"], tokens=[9], dim=16, heads=2, repeats=1))
    assert [(row["name"], row["pass"]) for row in report.rows] == [
        (name, which) for name in ("full", "llp", "longformer") for which in ("forward", "forward_backward")
    ]
    base = {row["pass"]: row["median_s"] for row in report.rows if row["name"] == "full"}
    for row in report.rows:
        assert row["status"] == "ok", row
        assert row["times_faster"] == base[row["pass"]] / row["median_s"]
        assert row["peak_bytes"] > 0
    parameters = attention.build("llp", dim=16, num_heads=2).parameters()
    moved = 4 * (sum(p.numel() for p in parameters) + 2 * 9 * 16)
    assert {row["pass"]: row["io_bytes"] for row in report.rows if row["name"] == "llp"} == {
        "forward": moved, "forward_backward": 2 * moved,
    }  # fmt: skip
    assert "layers of width 16, 2 heads" in report.table()


@pytest.mark.parametrize(("changes", "message"), [
    ({"tokens": []}, "tokens must have at least one value"),
    ({"limit": 0.0}, "limit must be above 0, got 0.0"),
    ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
    ({"dtype": "float64"}, "unknown dtype 'float64'"),
    ({"passes": ["sideways"]}, "unknown pass 'sideways'"),
    ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ({"seconds": 0.0}, "seconds must be above 0, got 0.0"),
    ({"mechanisms": "llp"}, "mechanisms must be a list, got 'llp'"),
    ({"tokens": 8}, "tokens must be a list, got 8"),
])  # fmt: skip
def test_mistakes_are_named(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        OpsConfig(**changes)


def shape(**changes):
    sizes = {"batch": 2, "heads": 2, "tokens": 20, "channels": 8, "latents": 4, "segment": 6, "device": "cpu"}
    return Shape(**{**sizes, "dtype": torch.float32, **changes})


@pytest.mark.parametrize("pattern", [segments, window, lambda _: Causal()], ids=["segments", "window", "causal"])
def test_the_flops_of_attention_are_those_of_the_entries_that_the_mask_leaves(pattern):
    positions = torch.arange(20)
    allowed = pattern(shape()).allowed(positions[:, None], positions)
    assert _cases.pattern_flops(pattern)(shape()) == 2 * 2 * 4 * 8 * int(allowed.sum())


@pytest.mark.parametrize("name", list(ENGINES))
def test_the_operators_are_those_of_the_definition(name):
    """Each equals itself on the backend that is the definition."""
    (case,), (definition,) = our_cases([name], [None]), our_cases([name], ["reference"])
    plain, exact = definition.make(shape()), definition.make(shape())
    exact_inputs = [x.detach().double() for x in exact.inputs]
    actual, reference = case.make(shape()), plain.call(*plain.inputs)
    assert_in_budget(actual.call(*actual.inputs), reference, exact.call(*exact_inputs), torch.float32)


def test_the_base_is_full_attention():
    ours, theirs = our_cases(["full"], [None])[0].make(shape()), sdpa().make(shape())
    inputs = [x.detach().double() for x in ours.inputs]
    assert_same_maths(ours.call(*inputs), theirs.call(*inputs))
    assert_same_maths(unfused().make(shape()).call(*inputs), theirs.call(*inputs))


@pytest.mark.parametrize(("which", "expected"), [("forward", 4), ("backward", 7), ("forward_backward", 11)])
def test_every_tensor_is_moved_once_in_each_direction(which, expected):
    operator = sdpa().make(shape())
    assert operator.moved_bytes(which) == expected * operator.inputs[0].nbytes


def test_the_batch_makes_up_a_number_of_tokens():
    config = OpsConfig(batch_tokens=64)
    assert [config.batch_of(tokens) for tokens in (16, 64, 128)] == [4, 1, 1]


def a_peer(name, module, make):
    cases = [_cases.Case(name, make, lambda _: f"{name}'s", "peer", passes=("forward",))]
    return Peer(name, module, ("cpu",), lambda device: cases, distribution=f"{name}-dist")


@pytest.fixture
def peers(monkeypatch):
    """One that runs, one that fails, one that isn't installed, one for a GPU alone."""

    def fails(_):
        raise ImportError("no wheel for this machine")

    found = (
        a_peer("there", "torch", lambda s: Operator(s.qkv(), lambda q, k, v: v * 1)),
        a_peer("broken", "torch", fails),
        a_peer("absent", "no_such_module", fails),
        Peer("elsewhere", "torch", ("cuda",), lambda device: []),
    )
    monkeypatch.setattr(_peers, "PEERS", found)


def test_absent_peers_are_named_with_the_command_that_installs_them(peers):
    report = measure_ops(OpsConfig(mechanisms=["linear"], tokens=[16], **{**TINY, "peers": "auto"}))
    assert report.peers == [
        {"name": "there", "status": "installed", "version": "unknown"},
        {"name": "broken", "status": "installed", "version": "unknown"},
        {"name": "absent", "status": "not installed", "install": "pip install absent-dist"},
    ]
    assert "absent: not installed (pip install absent-dist)" in report.table()
    rows = {row["name"]: row for row in report.rows if row["kind"] == "peer"}
    assert rows["there"]["status"] == "ok"
    assert rows["there"]["times_faster"] > 0
    assert rows["broken"]["status"] == "failed"
    assert report.failures == []  # another library's failure is not ours


def test_peers_can_be_chosen_or_left_out(peers):
    assert [peer.name for peer in _peers.chosen(["there"], "cpu")[0]] == ["there"]
    assert _peers.chosen("none", "cpu") == ([], [])
    for asked, message in (
        ("absent", "peer 'absent' is not installed; pip install absent-dist"),
        (["ther"], "unknown peer 'ther' on cpu; did you mean 'there'"),
        ("elsewhere", "unknown peer 'elsewhere' on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            _peers.chosen(asked, "cpu")


def test_a_peer_is_timed_beside_its_mechanism_and_otherwise_named(monkeypatch):
    def make(shape):
        return Operator(shape.qkv(), lambda q, k, v: v * 1)

    cases = [_cases.Case(f"of {name}", make, lambda _: "", "peer", beside=name) for name in ("llp", "linear")]
    found = [Peer(name, "torch", ("cpu",), lambda _, n=n: cases[:n]) for name, n in (("both", 2), ("llps", 1))]
    monkeypatch.setattr(_peers, "PEERS", found)
    report = measure_ops(OpsConfig(mechanisms=["linear"], tokens=[16], **{**TINY, "peers": "auto"}))
    assert {row["name"] for row in report.rows if row["kind"] == "peer"} == {"of linear"}
    assert "llps: not timed: it is compared with none of these mechanisms" in report.table()


def test_importing_a_peer_is_silent(capsys, tmp_path, monkeypatch):
    (tmp_path / "a_loud_peer.py").write_text("import warnings\nprint('hello')\nwarnings.warn('I am old')\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _peers.load("a_loud_peer").value == 3
    assert capsys.readouterr().out == ""
