"""An audit names the fault that was planted, and no other; it leaves the model alone; its inputs can be replayed."""

import functools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from subquad.evaluation.audit import Adapter, AuditConfig, AuditReport, audit, replay
from subquad.evaluation.audit.adapters import adapter_for
from subquad.evaluation.audit.case import Case
from subquad.evaluation.audit.checks import Audited
from subquad.evaluation.audit.probe import MARGIN, Tokens, make_probe
from subquad.evaluation.audit.report import CHECKS, Check
from subquad.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from subquad.testing import assert_exact, assert_same_maths
from tests.evaluation import planted

QUICK = {"tokens": 24, "contexts": [], "long": 0}
GROWTH = {"state growth", "time growth", "memory growth"}
PADDING = {"padding left", "padding right", "padding left, then cache"}
CACHE = {"cache, one token", "cache, several tokens"}
COMPARED = {"causality", "truncation", "batch"} | CACHE | PADDING


def adapter_of(model):
    return planted.LinearAdapter() if isinstance(model, planted.Linear) else None


@functools.cache
def audited(name, **settings):
    """The planted model and its report."""
    model = getattr(planted, name)()
    return model, audit(model, adapter=adapter_of(model), **{**QUICK, **settings})


def names(report, verdict):
    return {check.name for check in report.checks if check.verdict == verdict}


# --- every planted fault, and what else the audit says

BLIND = CACHE | PADDING  # a plain module has no cache and no mask
CASES = {
    # model: (violations, findings, not checked)
    "Planted": (set(), set(), BLIND),
    "Linear": (set(), set(), set()),
    "Roll": ({"causality"}, {"lengths"}, BLIND | {"truncation"}),
    "OurRoll": ({"causality"}, {"lengths"}, BLIND | {"truncation"}),
    "UnmaskedLLP": ({"causality"}, set(), BLIND | {"truncation"}),
    "GlobalMaxPerformer": ({"causality"}, set(), BLIND | {"truncation"}),
    "LateLeak": ({"causality"}, set(), BLIND | {"truncation"}),
    "PaddedNormaliser": ({"padding left"}, set(), {"padding left, then cache"}),
    "PaddedByZero": ({"padding left"}, set(), {"padding left, then cache"}),
    "PaddedToNan": ({"padding left", "padding right"}, set(), {"padding left, then cache"}),
    "NanAtPadding": (set(), set(), set()),
    "LastState": ({"cache, several tokens"}, set(), set()),
    "Float64Only": ({"causality"}, set(), BLIND | {"truncation"}),
    "LengthInPositions": ({"truncation"}, set(), BLIND),
    "BatchMean": ({"batch"}, set(), BLIND),
    "Mixing": ({"causality", "batch"}, set(), BLIND | {"truncation"}),
    "Dropping": ({"repeatable"}, set(), COMPARED),
    "Bursting": ({"finite"}, set(), COMPARED | {"repeatable"}),
    "Masked": ({"finite"}, set(), COMPARED | {"repeatable"}),
    "MaskedLLP": ({"finite"}, set(), COMPARED | {"repeatable"}),
    "LargeBatch": ({"finite"}, set(), COMPARED | {"repeatable"}),
    "Rounding": (set(), {"causality"}, BLIND),
}


@pytest.mark.parametrize("name", CASES)
def test_the_planted_fault_is_named_and_no_other(name):
    model, report = audited(name)
    violations, findings, unchecked = CASES[name]
    assert [check.name for check in report.checks] == list(CHECKS)
    assert names(report, "violation") == violations
    assert names(report, "finding") == findings
    assert names(report, "not checked") == unchecked | GROWTH | {"bf16"}
    assert report.passed is not bool(violations)
    assert report.arithmetic["weights"] == report.arithmetic["narrowest"] == "float64"
    assert "float32" not in report.arithmetic
    for check in report.checks:  # what is not checked says why, and shows no number
        assert check.detail
        assert (check.failing is not None) == (check.verdict == "violation")
        assert check.verdict != "not checked" or check.worst is None
    if name != "Dropping":  # whose numbers are others each time
        again = replay(model, AuditReport.from_dict(json.loads(report.to_json())), adapter=adapter_of(model))
        assert {done.name for done in again if done.fails} == violations


@pytest.mark.parametrize(("name", "where", "detail"), [
    # Half of the channels are rolled by 4 in groups of 8.
    ("Roll", {"output": 0, "token": 4, "length": 8, "lengths": [8, 16, 24]}, "output 0 changes with token 4, 4 later"),
    ("UnmaskedLLP", {"output": 0, "token": 1, "length": 2}, ""),
    ("Mixing", {"length": 2}, ""),
    ("LateLeak", {"output": 3, "token": 20, "length": 21, "lengths": [23, 24]}, ""),
    ("Bursting", {"output": 9, "length": 10}, "is not finite: nan for 31 of 31 tokens (0, 1, 2, 3, 4, 5, ..., 30)"),
    ("Masked", {"output": 0, "length": 1}, "output at 0 of 1 tokens is not finite: -inf for 1 of 31 tokens (3)"),
    ("LargeBatch", {"row": 2, "length": 1}, "is not finite in a batch of 4: nan for 31 of 31"),
])  # fmt: skip
def test_where_a_fault_is(name, where, detail):
    check = audited(name)[1].violations[0]
    assert {key: check.where[key] for key in where} == where
    assert detail in check.detail
    if name == "Roll":
        assert {(t, s) for t, s, _ in check.where["pairs"]} == {(t, s) for t in range(4) for s in range(4, 8)}
    assert name != "Masked" or audited(name)[1].arithmetic["band"] == 0


def test_the_failing_input_is_made_short():
    found = {name: audited(name)[1].violations[0] for name in CASES if CASES[name][0]}
    failing = {name: check.failing for name, check in found.items()}
    rows = {name: len(failing[name]["tokens"]) for name in ("PaddedNormaliser", "BatchMean", "Masked", "LargeBatch")}
    assert rows == {"PaddedNormaliser": 1, "BatchMean": 2, "Masked": 1, "LargeBatch": 4}
    assert failing["LastState"]["pieces"] == (1, 2)
    padded = failing["PaddedNormaliser"]
    assert (len(padded["tokens"][0]), padded["columns"], padded["side"]) == (1, 2, "left")
    assert found["LengthInPositions"].where["length"] <= 3
    assert found["GlobalMaxPerformer"].worst < 1e-4  # an eps of 1e-6 that counts more or less
    assert len(failing["GlobalMaxPerformer"]["tokens"][0]) <= 5


@pytest.mark.parametrize(("name", "fault"), [("Masked", set()), ("MaskedLLP", {"causality"})])
def test_the_rest_of_a_masked_vocabulary_can_be_audited(name, fault):
    class Rest(Adapter):
        def full(self, model, tokens_BT, mask_BT=None):
            logits_BTV = super().full(model, tokens_BT, mask_BT)
            return logits_BTV[..., torch.arange(planted.VOCABULARY) != 3]

    report = audit(getattr(planted, name)(), adapter=Rest(), **QUICK)
    assert names(report, "violation") == fault
    assert report.check("finite").verdict == "pass"


def test_an_input_that_is_not_finite_in_bfloat16_is_found_and_made_short():
    model, report = audited("Counting", long=300)
    assert names(report, "violation") == {"bf16"}
    check = report.check("bf16")
    assert (check.where["output"], check.where["length"]) == (256, 257)
    assert "of 257 tokens is not finite: nan for 31 of 31 tokens" in check.detail
    assert [done.fails for done in replay(model, report)] == [True]
    assert audited("Counting", long=256)[1].check("bf16").verdict == "pass"


@settings(max_examples=8)
@given(st.data())
def test_a_single_stray_look_ahead_is_found_wherever_it_is(data):
    t_in = data.draw(st.integers(1, 23))
    t_out = data.draw(st.integers(0, t_in - 1))
    stray = planted.attending(lambda t, s: (s <= t) | ((t == t_out) & (s == t_in)))
    report = audit(stray(), **QUICK)
    where = report.check("causality").where
    assert (where["output"], where["token"], where["length"]) == (t_out, t_in, t_in + 1)
    assert where["pairs_in_all"] == 1


class OnlyInFloat64(planted.Linear):
    """Right in float32 and below; in float64 its denominator counts padding."""

    def normaliser(self, k_BTK, real_BT1):
        return k_BTK if k_BTK.dtype == torch.float64 else k_BTK * real_BT1


class SmallCacheFault(OnlyInFloat64):
    """Also has, in any dtype, a cache that is off by less than float32 shows."""

    def continued(self, s_BTKV, z_BTK):
        return s_BTKV * (1 + 1e-8), z_BTK


class OnlyInFloat32(OnlyInFloat64):
    """Also wrong in float32, with padding on the right."""

    def forward(self, tokens_BT, mask=None, sums=None):
        logits, sums = super().forward(tokens_BT, mask, sums)
        right = mask is not None and not mask[:, -1].all()
        return logits + (right and logits.dtype == torch.float32), sums


class CacheOnlyInFloat64(planted.Linear):
    """In float64 alone several tokens after a cache read one state."""

    def continued(self, s_BTKV, z_BTK):
        late = s_BTKV.dtype == torch.float64
        return planted.LastState.continued(self, s_BTKV, z_BTK) if late else (s_BTKV, z_BTK)


LEFT, THEN, SEVERAL = "padding left", "padding left, then cache", "cache, several tokens"


@pytest.mark.parametrize(("kind", "violations", "alone", "checks"), [
    (OnlyInFloat64, set(), LEFT, [LEFT, THEN]),  # the second was left out for the first
    (CacheOnlyInFloat64, set(), SEVERAL, [SEVERAL, THEN]),
    (SmallCacheFault, CACHE, LEFT, [LEFT, THEN]),
    (OnlyInFloat32, {"padding right"}, LEFT, [LEFT, "padding right", THEN]),
])  # fmt: skip
def test_a_fault_of_float64_alone_is_no_fault_and_hides_none(kind, violations, alone, checks):
    model, adapter = kind(), planted.LinearAdapter()
    report = audit(model, adapter=adapter, **QUICK)
    narrow = report.arithmetic["float32"]
    assert names(report, "violation") == violations
    assert report.arithmetic["weights"] == "float64"
    assert (narrow["alone"], narrow["checks"]) == ([alone], checks)
    assert narrow["band"] > 1e6 * report.arithmetic["band"]
    assert f"{'; '.join(checks)}, because these fail only in float64: {alone})" in report.title()
    assert [check.name for check in report.checks if "; in float32" in check.detail] == checks
    assert "pieces of 1, 1, 1 and 2, 3" in report.check(THEN).detail
    assert AuditReport.from_dict(json.loads(report.to_json())).to_json() == report.to_json()
    for done in replay(model, report, adapter=adapter):
        assert done.fails
        assert done.band == (narrow if done.name in checks else report.arithmetic)["band"]
    forced = audit(model, adapter=adapter, dtype="float64", **QUICK)
    assert names(forced, "violation") == {alone} | (violations & CACHE)


class Float32Only(planted.Planted):
    """Refuses other weights than float32."""

    def mix(self, x_BTD):
        if x_BTD.dtype != torch.float32:
            raise RuntimeError("float32 only")
        return super().mix(x_BTD)


def test_a_model_that_runs_in_float32_alone_is_audited_in_it():
    report = audit(Float32Only(), **{**QUICK, "long": 8})
    assert report.passed
    assert report.arithmetic["weights"] == "float32"
    assert report.check("bf16").verdict == "finding"
    assert "float32 only" in report.check("bf16").detail
    with pytest.raises(ValueError, match=r"takes no sequence of .* tokens: in float64: RuntimeError: float32 only"):
        audit(Float32Only(), dtype="float64", **QUICK)


def test_the_band_follows_the_narrowest_arithmetic_but_no_single_number():
    wide, halved, narrow = (audited(name)[1].arithmetic for name in ("Planted", "Halved", "Narrow"))
    assert (narrow["weights"], narrow["narrowest"]) == ("float64", "float32")
    assert narrow["band"] > 1e6 * wide["band"]
    assert halved["narrowest"] == "float64"


# --- the model is left alone


class Stateful(planted.Planted):
    """With a buffer that each pass changes, random numbers, and a mode that is remembered."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def mix(self, x_BTD):
        self.passes += 1
        torch.rand(3)
        return super().mix(x_BTD)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_random_state_stay_as_they_are(training):
    model = Stateful().train(training)
    model.head.weight.requires_grad_(False)
    model.query.weight.grad = torch.ones_like(model.query.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    random_state, python_state = torch.get_rng_state(), random.getstate()
    assert audit(model, tokens=8, contexts=[4, 8], repeats=1, long=8).passed
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state
    assert all(module.training is training for module in model.modules())
    assert not model.head.weight.requires_grad
    assert_exact(model.query.weight.grad, torch.ones_like(model.query.weight))
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert_exact(tensor, before[name], name)


def test_a_seed_repeats_a_report():
    report = audit(planted.LateLeak(), seed=5, **QUICK)
    assert report == audit(planted.LateLeak(), seed=5, **QUICK)
    assert report.check("causality").failing != audited("LateLeak")[1].check("causality").failing


# --- the model's own lengths, growth, texts


def test_leaks_at_the_model_s_own_sizes_are_looked_for():
    short = {"tokens": 16, "contexts": [], "long": 0}
    assert audit(planted.LateLeak(), **short).passed  # the leak begins at 21 tokens
    adapter = Adapter()
    adapter.sizes = lambda model: [10]
    report = audit(planted.LateLeak(), adapter=adapter, **short)
    assert report.check("causality").where["lengths"] == [21]


def test_caches_are_cut_at_the_model_s_own_sizes():
    class Late(planted.LinearAdapter):
        """The cache is wrong after 40 tokens."""

        def step(self, model, tokens_BT, cache, mask_BS=None):
            sums, seen = cache or (None, 0)
            logits, sums = super().step(model, tokens_BT, sums, mask_BS)
            seen += tokens_BT.shape[1]
            return logits + (seen > 40), (sums, seen)

    adapter = Late()
    assert audit(planted.Linear(), adapter=adapter, **QUICK).passed
    adapter.sizes = lambda model: [20]
    report = audit(planted.Linear(), adapter=adapter, **QUICK)
    assert names(report, "violation") == {"cache, several tokens"}
    assert sum(report.check("cache, several tokens").failing["pieces"]) == 41


def test_growth_is_a_finding_and_says_how():
    def tiny(name, **options):
        torch.manual_seed(0)
        shape = {"vocab_size": 16, "dim": 8, "num_layers": 1, "num_heads": 2, "position": "none"}
        return Decoder(DecoderConfig(**shape, attention=name, options={name: options}))

    wanted = {"tokens": 6, "long": 0, "contexts": [8, 32, 64], "repeats": 1}
    full, linear = audit(tiny("full"), **wanted), audit(tiny("linear"), **wanted)
    window = audit(tiny("window", width=16), **wanted)
    assert {name for report in (full, linear, window) for name in names(report, "finding")} == GROWTH
    assert all(report.passed for report in (full, linear, window))
    values = full.check("state growth").where["values"]
    assert values == {"8": 512, "32": 2048, "64": 4096}  # keys and values of 8 channels in float32
    exponent = torch.tensor(full.check("state growth").where["exponent"], dtype=torch.float64)
    assert_same_maths(exponent, torch.ones((), dtype=torch.float64))
    assert "about tokens^1.00" in full.check("state growth").detail
    assert linear.check("state growth").detail.endswith("constant")
    assert "level from 32 on" in window.check("state growth").detail
    assert full.check("memory growth").where["exponent"] > 0.5
    assert full.check("time growth").where["values"].keys() == values.keys()


# --- reports


def test_a_report_as_text_and_json():
    seen = []
    model = planted.LateLeak()
    report = audit(model, progress=seen.append, **QUICK)
    assert seen == ["finite", "repeatable", "causality", "truncation", "batch", "cache", "padding", "growth", "bf16"]
    text = str(report)
    assert text.endswith("failed: causality")
    assert all(name in text for name in CHECKS)
    assert "rounding band" in text
    assert str(audit(planted.Planted(), **QUICK)).endswith("passed: no violation")
    with pytest.raises(ValueError, match="there is no check 'leak'; valid: finite"):
        report.check("leak")
    grown = audit(planted.Planted(), **{**QUICK, "contexts": [4, 8]})
    assert grown.conclusion() == "passed: no violation (2 findings: worth knowing, not a fault)"
    values = json.loads(report.to_json())
    assert values["passed"] is False
    assert values["settings"] == AuditConfig(**QUICK).to_dict()
    assert AuditReport.from_dict(values).to_json() == report.to_json()
    infinite = audited("Bursting")[1]
    assert infinite.check("finite").worst == float("inf")
    values = json.loads(infinite.to_json())  # JSON has no infinity
    assert next(check["worst"] for check in values["checks"] if check["name"] == "finite") == "inf"
    assert AuditReport.from_dict(values).check("finite").worst == float("inf")


@pytest.mark.parametrize(("change", "message"), [
    ({"format": None}, "not a report of an audit: its format is None"),
    ({"version": 9}, "version 9; this release reads 1"),
    ({"checks": None}, "damaged: it has no 'checks'"),
    ({"checks": [{"verdict": "fine"}]}, "damaged: unknown verdict 'fine'; valid: pass, violation"),
])  # fmt: skip
def test_a_damaged_report_is_refused(change, message):
    good = json.loads(audited("UnmaskedLLP")[1].to_json())
    if change.get("checks"):
        change = {"checks": [{**good["checks"][0], **change["checks"][0]}]}
    values = {name: value for name, value in {**good, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        AuditReport.from_dict(values)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "must hold one JSON object, got list")])
def test_a_report_is_read_from_a_file(tmp_path, content, message):
    report, file = audited("UnmaskedLLP")[1], tmp_path / "report.json"
    file.write_text(report.to_json())
    assert AuditReport.load(file).to_json() == report.to_json()
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        AuditReport.load(file)


def failing_report(band=0.1, **failing):
    check = Check("batch", "violation", "", 1.0, {}, {"tokens": [[1, 2]], "dtype": "float64", **failing})
    return AuditReport("", {}, {"scale": 1.0, "band": band}, (check,))


DAMAGED = "not a failing input of an audit: "


@pytest.mark.parametrize(("failing", "message"), [
    ({"kind": "magic"}, rf"{DAMAGED}its keys are \["),
    ({"kind": "finite", "colour": 1}, rf"{DAMAGED}its keys are \['colour', "),
    ({"kind": "finite", "tokens": 3}, DAMAGED),
    ({"kind": "finite", "tokens": [[]]}, r"at least one token, got \[\[\]\]"),
    ({"kind": "finite", "tokens": [[2**70]]}, "tokens must lie between 0 and 2147483647, got 1180"),
    ({"kind": "finite", "tokens": [[1, 2], [3]]}, r"sequences must have one length, got \[2, 1\]"),
    ({"kind": "causality"}, r"lengths of tokens, \[2\], got \[\]"),
    ({"kind": "truncation", "keep": "x"}, "keep must be a whole number, got 'x'"),
    ({"kind": "truncation", "keep": 3}, "keep must lie between 1 and the 2 tokens, got 3"),
    ({"kind": "cache", "pieces": [5]}, r"pieces must add up to the 2 tokens, got \[5\]"),
    ({"kind": "cache", "pieces": [-1, 3]}, "pieces must be at least 1, got -1"),
    ({"kind": "batch", "order": [4]}, r"each of the 1 sequences once, got \[4\]"),
    ({"kind": "padding", "columns": 3, "fills": [0]}, "side must be left or right, got ''"),
    ({"kind": "padding", "side": "left", "columns": 3}, "fills must hold at least one token, got none"),
    ({"kind": "padding", "side": "left", "columns": 1, "fills": [0]}, "columns must be at least 2, .* got 1"),
    ({"kind": "padding", "side": "left", "columns": 1, "fills": [0], "pieces": [2]}, r"pieces must leave .* got \[2\]"),
    ({"kind": "finite", "dtype": "int4"}, "unknown dtype 'int4' of a failing input; valid: float64"),
    ({"kind": "finite", "tokens": [[99, 1]]}, "the model refuses the failing input of 'batch': IndexError"),
])  # fmt: skip
def test_a_failing_input_that_is_damaged_or_does_not_fit_is_refused(failing, message):
    with pytest.raises(ValueError, match=message):
        replay(planted.Planted(), failing_report(**failing))


def test_what_is_not_finite_fails_whatever_the_band():
    report = failing_report(kind="finite", band=float("inf"))
    assert [done.fails for done in replay(planted.Masked(), report)] == [True]
    assert [done.fails for done in replay(planted.Planted(), report)] == [False]


# --- what is refused


def giving(change):
    """A right model whose logits are changed."""
    model = planted.Planted()
    model.register_forward_hook(lambda _, __, logits_BTV: change(logits_BTV))
    return model


class NoCopy(planted.Planted):
    def __deepcopy__(self, memo):
        raise RuntimeError("one of a kind")


class OneRow(planted.Planted):
    def forward(self, tokens_BT):
        if len(tokens_BT) > 1:
            raise RuntimeError("one at a time")
        return super().forward(tokens_BT)


OURS = {"vocab_size": 16, "dim": 8, "num_layers": 1, "num_heads": 2, "attention": "full"}
T5 = {"vocab_size": 19, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
BERT = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
UNFIT = {
    "must be a torch.nn.Module, got function": lambda: lambda tokens: tokens,
    r"must return logits \[B, T, V\], got \[1, 31\] of torch.float64": lambda: giving(
        lambda logits_BTV: logits_BTV.mean(1)
    ),
    r"logits have shape \[2, 2, 31\] for tokens \[1, 2\]": lambda: giving(
        lambda logits_BTV: logits_BTV.repeat(2, 1, 1)
    ),
    "refuses a batch of 4 sequences of 24 tokens: RuntimeError: one at a time": OneRow,
    "can't be copied: one of a kind": NoCopy,
    "Encoder is not a causal language model: it reads whole sequences": lambda: Encoder(EncoderConfig(**OURS)),
    "must have at least 2 positions to be audited, got 1": lambda: Decoder(
        DecoderConfig(**OURS, position="learned", max_positions=1)
    ),
    "T5ForConditionalGeneration is an encoder-decoder": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "BertForMaskedLM is not a causal language model": lambda: BertForMaskedLM(BertConfig(**BERT)),
}


@pytest.mark.parametrize("message", UNFIT)
def test_what_can_not_be_audited_is_refused_with_the_reason(message):
    with pytest.raises((TypeError, ValueError), match=message):
        audit(UNFIT[message](), **QUICK)


def test_an_adapter_without_a_step_leaves_the_cache_unchecked():
    adapter = Adapter()
    adapter.no_cache = lambda model: None
    assert "Adapter has no step" in audit(planted.Planted(), adapter=adapter, **QUICK).check("cache, one token").detail


@pytest.mark.parametrize(("settings", "message"), [
    ({"tokens": 3}, "tokens must be at least 4, got 3"),
    ({"batch": 1}, "batch must be at least 2, got 1"),
    ({"long": -1}, "long must be at least 0, got -1"),
    ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ({"vocab_size": 1}, "vocab_size must be at least 2, got 1"),
    ({"contexts": [0]}, "contexts must be at least 1, got 0"),
    ({"token": 8}, "no key 'token'; did you mean 'tokens'"),
    ({"tokens": "8"}, "tokens must be int, got '8'"),
    ({"dtype": "int8"}, "dtype must be one of its choices"),
    ({"text": [0, 31]}, "text must hold tokens between 0 and 30, got 0 to 31"),
    ({"text": []}, "text must hold at least one token"),
])  # fmt: skip
def test_settings_are_checked(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        audit(planted.Planted(), **settings)


class Counts(nn.Module):
    """Counts each token so far."""

    def forward(self, tokens_BT):
        return nn.functional.one_hot(tokens_BT, 7).double().cumsum(1)


def test_a_module_without_parameters_can_be_audited():
    report = audit(Counts(), vocab_size=7, **QUICK)
    assert report.passed
    assert report.check("causality").verdict == "pass"


def test_the_band_is_at_least_some_roundings_of_the_largest_logit():
    model = Counts()  # no weight moves its logits
    probe, _ = make_probe(model, adapter_for(model), "float64", [4])
    assert probe.band([(2, 5, 2, 2)], torch.float32, 0) == (MARGIN * 2**-23 * 3, 3.0)


class Cancelling(nn.Module):
    """The logits of token 1 are small differences of large numbers, so rounding is worth far more there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Parameter(torch.rand(8, 8)) for _ in range(2))

    def forward(self, tokens_BT):
        rest_BTV = self.one[tokens_BT]
        return torch.where(tokens_BT[..., None] == 1, 1e6 * (rest_BTV - self.other[tokens_BT] * 0.999999), rest_BTV)


def test_rounding_is_that_of_the_input_at_hand():
    model = Cancelling()
    probe, _ = make_probe(model, adapter_for(model), "float64", [4])
    rows = ((0, 2, 3, 4),)
    band, _ = probe.band(rows, torch.float64, 0)
    shared = Audited(probe, band, [4], 4, [], Tokens(8, 0, None), 1, "float64", rows)
    near, far = Case("truncation", ((0, 2, 3, 5),)), Case("truncation", ((0, 1, 2, 3),))
    assert shared.within(near, band)
    assert not shared.within(near, 1e3 * band)
    assert shared.within(far, 1e3 * band)
    assert shared.band > 1e3 * band
    assert not shared.within(far, 1e-3)
    assert not shared.within(Case("finite", ((0, 1, 2, 3),)), 1e-300)
    assert not shared.within(far, float("inf"))
