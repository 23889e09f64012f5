"""Adapters on every mechanism and stack."""

import pytest
import torch

from subquad.attention import mechanism, names
from subquad.hf import lora
from subquad.models.stacks import STACKS
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.adapted import T, classifier, filled, language_model, logits, tokens

FORMS = {name: mechanism(name).forms for name in names()} | {name: stack.forms for name, stack in STACKS.items()}


def idle(adapted, name):
    """Factors that change no output: a layer whose matrix is read without a call would have such."""
    parts = {key: p for key, p in adapted.named_parameters() if "lora_B" in key}
    out = adapted(tokens()).logits
    gradients = torch.autograd.grad(out.square().sum(), list(parts.values()), allow_unused=True)
    found = [key for key, g in zip(parts, gradients, strict=True) if g is None or not g.any()]
    if name == "longformer":  # one global token: what it asks and where it looks changes nothing
        found = [key for key in found if ".global_query." not in key and ".global_key." not in key]
    return found


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_every_mechanism_takes_the_default_targets(name, form):
    model = language_model(name) if form == "causal" else classifier(name)
    before, weights = logits(model), [p.detach().clone() for p in model.parameters()]
    parameters = list(model.parameters())
    named = lora.targets(model)
    adapted = lora.add_adapter(model, rank=2)
    assert_same_maths(logits(adapted.double()), before, "a fresh adapter changes nothing")
    assert idle(adapted, name) == []
    assert sum("lora_B" in key for key, _ in adapted.named_parameters()) == len(named)
    filled(adapted)
    changed = logits(model)
    assert not torch.equal(changed, before)
    with adapted.disable_adapter():
        assert_same_maths(logits(model), before, "the base without its adapter")
    for parameter, weight in zip(parameters, weights, strict=True):
        assert_exact(parameter, weight, "the base's weights")
        assert not parameter.requires_grad
    assert_same_maths(logits(lora.merge(adapted)), changed, "merged")


@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if "causal" in forms])
def test_decoding_with_an_adapter_is_the_full_pass(name):
    model = lora.add_adapter(language_model(name), rank=2)
    decoder = filled(model).get_base_model().model
    whole, state, parts = logits(model, use_cache=False), None, []
    if name == "perceiver_ar":
        greedy = [model.get_base_model().generate(tokens()[:, :10], max_new_tokens=6, do_sample=False, use_cache=use)
                  for use in (True, False)]  # fmt: skip
        assert torch.equal(*greedy)
        return
    with torch.no_grad():
        for t in range(T):
            out, state = decoder(tokens()[:, t : t + 1], state)
            parts.append(out)
    assert_same_maths(torch.cat(parts, 1), whole)
