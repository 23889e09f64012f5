"""The z-loss by its closed form, in every way that the loss of the next token is computed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import Decoder, DecoderConfig
from subquad.ops import loss
from subquad.parallel import context_parallel
from subquad.testing import assert_exact, assert_same_maths
from subquad.testing.ranks import on_ranks
from subquad.training import TrainConfig
from subquad.training.losses import LossConfig

SIZES = {"vocab_size": 11, "dim": 16, "num_layers": 1, "num_heads": 2, "attention": "linear"}
TOKENS = torch.arange(26).view(2, 13) * 7 % 11
WEIGHT = 0.3


def decoder(**options):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**SIZES, **options)).double().train()


def closed_form(logits, labels):
    """`-log p + w log^2 Z`, the mean over the labels that count."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    log_z = logits.exp().sum(-1).log().flatten()
    counts = labels.flatten() != -100
    return (each + WEIGHT * log_z**2)[counts].mean()


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("entries", [loss.CHUNK_ENTRIES, 33, 1], ids=["whole", "chunks", "row_by_row"])
@pytest.mark.parametrize("options", [{}, {"lookup": 5}, {"head_bias": True}], ids=["plain", "lookup", "bias"])
def test_the_z_loss_is_its_closed_form_with_every_gradient(monkeypatch, entries, options):
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", entries)
    model, labels = decoder(**options), TOKENS.roll(-1, 1).masked_fill(TOKENS == 3, -100)
    expected = closed_form(model(TOKENS)[0], labels)
    wanted = gradients(model, expected)
    LossConfig(z_weight=WEIGHT).apply_to(model)
    found = model.loss(TOKENS, labels)
    assert_same_maths(found, expected)
    for name, gradient in gradients(model, found).items():
        assert_same_maths(gradient, wanted[name], name)


def test_a_called_head_gives_the_same(monkeypatch):
    """With a hook on it, the head is called on chunks."""
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", 33)
    model = decoder()
    LossConfig(z_weight=WEIGHT).apply_to(model)
    plain = model.loss(TOKENS, TOKENS)
    model.head.register_forward_hook(lambda module, inputs, output: output * 1.0)
    assert_same_maths(model.loss(TOKENS, TOKENS), plain)


def test_evaluation_is_the_cross_entropy_alone():
    model = decoder()
    before = model.eval().loss(TOKENS, TOKENS)
    LossConfig(z_weight=WEIGHT).apply_to(model)
    assert_exact(model.eval().loss(TOKENS, TOKENS), before)
    assert model.train().loss(TOKENS, TOKENS) > before


@pytest.mark.parametrize("options", [{}, {"lookup": 5}], ids=["plain", "lookup"])
def test_terms_add_up(options):
    model = decoder(**options)
    plain = model.loss(TOKENS, TOKENS)
    model.criterion.terms = (lambda nll, lse: 2 * nll, lambda nll, lse: lse * 0 + 0.5)
    assert_same_maths(model.loss(TOKENS, TOKENS), 3 * plain + 0.5)


def test_ranks_that_share_a_sequence_add_up_to_it():
    torch.manual_seed(0)
    model = SubquadForCausalLM(SubquadConfig(**SIZES)).double().train()
    LossConfig(z_weight=WEIGHT).apply_to(model)
    whole = model(TOKENS[:, :12], labels=TOKENS[:, :12], use_cache=False).loss

    def part(group):
        with context_parallel(group):
            return model(TOKENS[:, :12], labels=TOKENS[:, :12], use_cache=False).loss

    assert_same_maths(sum(on_ranks(3, part)) / 3, whole)
    logits = model(TOKENS[:, :12], use_cache=False).logits
    assert_same_maths(whole, closed_form(logits[:, :-1], TOKENS[:, 1:12]))


def test_the_option_reaches_models_of_text_alone():
    for task in ("classify", "image"):
        with pytest.raises(ValueError, match=rf"loss\.z_weight=0\.1 has no effect with task={task}"):
            TrainConfig.from_dict({"task": task, "loss": {"z_weight": 0.1}})
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"loss\.z_weight must be at least 0, got"):
            LossConfig(z_weight=weight)
    with pytest.raises(ValueError, match=r"LossConfig\(z_weight=0\.1\) has no effect: Linear has no loss of the next"):
        LossConfig(z_weight=0.1).apply_to(nn.Linear(2, 2))
    LossConfig().apply_to(nn.Linear(2, 2))
    model = SubquadForCausalLM(SubquadConfig(**SIZES))
    for weight, count in ((1e-4, 1), (1e-4, 1), (0.0, 0)):
        LossConfig(z_weight=weight).apply_to(model)
        assert [len(one.criterion.terms) for one in (model, model.decoder)] == [count] * 2
