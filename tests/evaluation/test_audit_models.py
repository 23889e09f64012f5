"""Right models pass an audit, ours and those of transformers; what is wrong with Mamba's cache is found."""

import logging

import pytest
import torch
import transformers

from subquad.evaluation.audit import audit, replay
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models.build import build_model
from tests.generation.models import HISTORIES, MECHANISMS, config_of

QUICK = {"tokens": 7, "contexts": [], "long": 0}
NOT_ASKED = {"state growth", "time growth", "memory growth", "bf16"}
TINY = {
    "vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "Llama": {"intermediate_size": 24}, "GPT2": {}, "Mamba": {"vocab_size": 64, "hidden_size": 32, "state_size": 8},
    "Qwen3": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8},
}  # fmt: skip
SHORT = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16}


def ours(name, **changes):
    torch.manual_seed(0)
    return build_model(config_of(name).replace(init_std=0.5, **changes))


def perceiver(**options):
    options = {"latents": 3, **options}
    return ours("perceiver_ar cross exact", options={"perceiver_ar": options})


def tiny(kind, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY | KINDS[kind] | changes)
    model = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, model)(config).eval()


@pytest.fixture(autouse=True)
def _quiet():
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    yield
    transformers.utils.logging.set_verbosity(before)


def not_checked(report):
    return {check.name for check in report.checks if check.verdict == "not checked"}


def judged(report):
    """All that compares logits passes, far inside of the band."""
    assert report.passed, str(report)
    assert {check.verdict for check in report.checks if check.name not in NOT_ASKED} == {"pass"}, str(report)
    assert max(check.worst or 0.0 for check in report.checks) < report.arithmetic["band"] / 4
    assert report.check("causality").worst == 0


OF_EACH_KIND = ("full", "latte", "linear", "llp", "luna", "delta_net")
"""Mechanisms with each kind of state. The contract holds all of them to stricter laws than an audit's checks."""


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in OF_EACH_KIND else [pytest.mark.slow]) for name in MECHANISMS
])  # fmt: skip
def test_every_mechanism_passes_every_check(name):
    # Luna hands a memory from one layer to the next.
    report = audit(ours(name, num_layers=2 if name == "luna" else 1), **QUICK)
    judged(report)
    assert report.arithmetic["narrowest"] == "float64"


@pytest.mark.parametrize("history", [
    pytest.param(name, marks=[] if name == "cross" else [pytest.mark.slow]) for name in HISTORIES
])  # fmt: skip
def test_perceiver_ar_is_compared_as_its_documentation_says(history):
    report = audit(perceiver(history=history, **HISTORIES[history]), **QUICK)
    judged(report)
    # Whole sequences have outputs up to 3 tokens; a longer one's outputs are its own latents'.
    assert "up to 3 tokens; in longer sequences only the last" in report.check("truncation").detail


def test_one_latent_passes_every_check_but_truncation_which_needs_two():
    report = audit(perceiver(latents=1), **QUICK)
    assert report.passed, str(report)
    assert not_checked(report) - NOT_ASKED == {"truncation"}


@pytest.mark.parametrize("decode", ["refill", "frozen"])
def test_decoding_that_is_another_pass_by_design_is_not_judged(decode):
    model = perceiver(decode=decode)
    report = audit(wrapped(model) if decode == "frozen" else model, **QUICK)
    assert report.passed
    later = {"cache, one token", "cache, several tokens", "padding left, then cache"}
    assert not_checked(report) - NOT_ASKED == later
    assert f"decode='{decode}' goes on with other latents" in report.check("cache, one token").detail


def wrapped(decoder):
    model = SubquadForCausalLM(SubquadConfig.from_decoder(decoder.config))
    model.decoder.load_state_dict(decoder.state_dict())
    return model


@pytest.mark.parametrize("make", [
    lambda: ours("llp"), pytest.param(lambda: perceiver(history_tokens=2), marks=pytest.mark.slow)
])  # fmt: skip
def test_our_models_in_transformers_pass_too(make):
    judged(audit(wrapped(make()), **QUICK))


@pytest.mark.parametrize("name", ["Llama", "GPT2", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_models_of_transformers_pass(name):
    report = audit(tiny(name), tokens=20, contexts=[8, 24], repeats=1, long=64)
    assert report.passed, str(report)
    assert not_checked(report) == set()
    assert "attention_mask and position_ids passed" in report.check("padding left").detail
    assert report.check("state growth").where["exponent"] > 0.9
    assert report.check("bf16").where["length"] == 64
    if name == "GPT2":
        assert "without position_ids off by" in report.check("padding left").detail
        assert report.check("lengths").verdict == "pass"


def test_mamba_goes_on_wrongly_with_several_tokens():
    model = tiny("Mamba")
    report = audit(model, tokens=12, contexts=[], long=0)
    assert [check.name for check in report.violations] == ["cache, several tokens"]
    check = report.check("cache, several tokens")
    assert check.worst > 30 * report.arithmetic["band"]
    assert check.failing["pieces"][-1] > 1
    assert sum(check.failing["pieces"]) <= 6
    assert report.check("cache, one token").worst < report.arithmetic["band"] / 10
    assert report.arithmetic["narrowest"] == "float32"
    assert [done.fails for done in replay(model, report)] == [True]


def test_what_a_model_of_transformers_can_not_do_is_said():
    class Bare(transformers.LlamaForCausalLM):
        def forward(self, input_ids):
            return super().forward(input_ids, use_cache=False)

    class Forgetful(transformers.LlamaForCausalLM):
        def forward(self, input_ids, past_key_values=None, use_cache=None):
            return super().forward(input_ids, use_cache=False)

    config = tiny("Llama").config
    report = audit(Bare(config), **QUICK)
    assert report.passed
    assert "no parameter attention_mask" in report.check("padding left").detail
    assert "no parameter past_key_values or cache_params or state" in report.check("cache, one token").detail
    report = audit(Forgetful(config), **QUICK)
    assert report.passed
    assert "the model returned no past_key_values" in report.check("cache, one token").detail


@pytest.mark.parametrize(("model", "tokens", "length"), [
    (lambda: tiny("GPT2", **SHORT), 17, 16),
    (lambda: ours("learned", num_layers=1, max_positions=24), 40, 24),
    (lambda: wrapped(ours("learned", num_layers=1, max_positions=24)), 40, 24),
    (lambda: tiny("Llama", **SHORT), 17, 16),
    (lambda: tiny("Llama", **SHORT), 9, 16),
])  # fmt: skip
def test_a_longer_sequence_than_the_positions_is_not_tried(model, tokens, length):
    report = audit(model(), tokens=tokens, contexts=[16, 200], long=100, repeats=1)
    assert report.passed
    assert report.check("bf16").where["length"] == length
    assert "positions for fewer than two" in report.check("state growth").detail
    end = f"; nothing longer, since the model has positions for {length} tokens"
    assert report.check("lengths").detail.endswith(end) == (tokens > length)


@pytest.mark.parametrize("factor", [2.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_dynamic_positions_are_tried_above_their_own_length(factor):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}
    report = audit(tiny("Llama", **SHORT, rope_parameters=rope), **QUICK | {"tokens": 20})
    assert report.check("truncation").verdict == "violation"
    assert "of 17 tokens is off by" in report.check("truncation").detail
    assert report.check("causality").verdict == "pass"
