"""Our attention in models of transformers, by `register` and `set_attention`."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from subquad import hf
from subquad.attention import build
from subquad.cli import main
from subquad.hf import interface
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.stock import KINDS, OPTIONS, positions, stock, tokens

EACH = [(kind, name) for kind in KINDS for name in OPTIONS]
LENGTHS = (1, 3, 8, 21)
"""Below, at, and above the segment; 21 is no multiple of any size here."""


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert hf.register() == [f"subquad_{name}" for name in OPTIONS]


def seen(name, T, options=None):
    """Bool `[1, H, T, T]`: the keys that the mechanism's definition gives weight to."""
    torch.manual_seed(1)
    layer = build(name, dim=16, num_heads=4, **(OPTIONS[name] if options is None else options)).double()
    return layer.weights(torch.randn(1, T, 16, dtype=torch.float64)) > 0


def gradients(model, x_BT, **inputs):
    """The loss of the next tokens and each parameter's gradient, in float64 (transformers' loss is in float32)."""
    model.zero_grad()
    logits_BTV = model(x_BT, **inputs).logits
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), x_BT[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_logits_and_gradients_are_those_of_the_definition_as_an_explicit_mask(kind, name):
    # transformers' `eager` takes its softmax in float32; `sdpa` keeps float64.
    model, plain = stock(kind, name), stock(kind, attn_implementation="sdpa")
    for T in LENGTHS:
        x_BT = tokens(2, T)
        mask_BHTS = seen(name, T).expand(2, -1, -1, -1)
        if T > 1:
            loss, grads = gradients(model, x_BT)
            plain_loss, plain_grads = gradients(plain, x_BT, attention_mask=mask_BHTS)
            assert_same_maths(loss, plain_loss, f"loss of {T} tokens")
            for parameter, grad in grads.items():
                assert_same_maths(grad, plain_grads[parameter], f"{parameter}, {T} tokens")
        with torch.no_grad():
            logits, plain_logits = model(x_BT).logits, plain(x_BT, attention_mask=mask_BHTS).logits
        assert_same_maths(logits, plain_logits, f"{T} tokens")


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_training_lowers_the_loss(kind, name):
    model, x_BT = stock(kind, name, torch.float32).train(), tokens(4, 19)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        loss = model(x_BT, labels=x_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_left_padding_changes_nothing(kind, name):
    model, x_BT = stock(kind, name), tokens(3, 21)
    for left in (1, 6, 20):
        mask_BT = torch.ones(3, 21, dtype=torch.int64)
        mask_BT[0, :left] = 0
        with torch.no_grad():
            logits = model(x_BT, attention_mask=mask_BT, position_ids=positions(mask_BT)).logits
            assert_same_maths(logits[:1, left:], model(x_BT[:1, left:]).logits, f"{left} left")
            assert_same_maths(logits[1:], model(x_BT[1:]).logits, "rows without padding")


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_generation_with_a_cache_without_and_with_a_static_one_is_the_same(kind, name):
    model, x_BT = stock(kind, name), tokens(2, 11)
    mask_BT = torch.ones_like(x_BT)
    mask_BT[0, :3] = 0
    asked = {"attention_mask": mask_BT, "max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    asked |= {"eos_token_id": None, "use_cache": True}
    cached = model.generate(x_BT, **asked)
    static = model.generate(x_BT, **asked, cache_implementation="static", disable_compile=True)
    anew = model.generate(x_BT, **asked | {"use_cache": False})
    alone = model.generate(x_BT[:1, 3:], **asked | {"attention_mask": mask_BT[:1, 3:]})
    assert_exact(static, cached, "static cache")
    assert_exact(anew, cached, "no cache")
    assert_exact(alone[:, 8:], cached[:1, 11:], "without padding")


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_pieces_with_a_cache_are_the_whole(kind, name):
    model, x_BT = stock(kind, name), tokens(2, 23)
    mask_BT = torch.ones_like(x_BT)
    mask_BT[0, :2] = mask_BT[1, 12] = 0  # padding in the middle, as a padded prompt and a padded reply have
    where = positions(mask_BT)
    with torch.no_grad():
        for mask in (torch.ones_like(x_BT), mask_BT):
            where = positions(mask)
            whole, cache, start = model(x_BT, attention_mask=mask, position_ids=where).logits, DynamicCache(), 0
            for size in (4, 1, 9, 1, 8):
                stop = start + size
                part = model(
                    x_BT[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=where[:, start:stop],
                    past_key_values=cache,
                ).logits
                real = mask[:, start:stop, None].bool()
                assert_same_maths(part.where(real, 0.0), whole[:, start:stop].where(real, 0.0), f"from {start}")
                start = stop


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_saved_model_attends_the_same_again(kind, name, tmp_path):
    model, x_BT = stock(kind, name, torch.float32), tokens(2, 13)
    model.save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())["subquad"]
    assert kept == {"attention": name, "options": OPTIONS[name]}
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    interface.check_attention(again)
    assert again.config._attn_implementation == f"subquad_{name}"
    with torch.no_grad():
        assert_exact(again(x_BT).logits, model(x_BT).logits)
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["subquad"] == kept


AUDITED = [pytest.param(kind, name, marks=[] if kind == "llama" else pytest.mark.slow) for kind, name in EACH]


@pytest.mark.parametrize(("kind", "name"), AUDITED)
def test_a_saved_model_passes_the_audit(kind, name, tmp_path, capsys):
    stock(kind, name, torch.float32).save_pretrained(tmp_path)
    assert main(["audit", str(tmp_path), "--tokens", "9", "--contexts", "[]", "--long", "0"]) == 0
    assert "passed: no violation" in capsys.readouterr().out
