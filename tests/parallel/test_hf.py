"""`SubquadForCausalLM` on several ranks: each is given the whole sequences."""

import pytest
import torch

from subquad.hf import SubquadCache
from subquad.parallel import context_parallel
from subquad.testing import assert_same_maths
from tests.parallel import cases
from tests.parallel.ranks import on_ranks

TOKENS = 12


def the_loss(group, items):
    model, ids = cases.small_model().train(), cases.draw_tokens(TOKENS)
    labels = ids.clone()
    labels[:, 5:7] = -100  # on both sides of a cut
    whole = model(ids, labels=labels, num_items_in_batch=items).loss
    _, expected = cases.gradients(model, whole)
    model.model.gradient_checkpointing = True
    with context_parallel(group):
        loss = model(ids, labels=labels, num_items_in_batch=items).loss
    _, actual = cases.gradients(model, loss)
    size = group.size
    cases.compare_summed(
        group,
        {"loss": loss.detach() / size, **{name: grad / size for name, grad in actual.items()}},
        {"loss": whole.detach(), **expected},
    )


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mean_over_the_ranks_is_the_loss_of_one_process(ranks, items):
    on_ranks(ranks, lambda group: the_loss(group, items))


def a_cache(group):
    model, ids = cases.small_model().eval(), cases.draw_tokens(TOKENS + 3)
    whole, cache = model(ids).logits, SubquadCache()
    with torch.no_grad(), context_parallel(group):
        part = model(ids[:, :TOKENS], attention_mask=torch.ones(2, TOKENS), past_key_values=cache)
    assert cache.get_seq_length() == TOKENS
    after = model(ids[:, TOKENS:], past_key_values=cache).logits
    assert_same_maths(part.logits, group.part(whole[:, :TOKENS]), "logits of the part")
    assert_same_maths(after, whole[:, TOKENS:], "logits after it")


def test_a_cache_is_gone_on_from_without_the_group():
    on_ranks(2, a_cache)


def refused(group, match, **inputs):
    model = cases.small_model()
    with context_parallel(group), pytest.raises(ValueError, match=match):
        model(**{"input_ids": cases.draw_tokens(TOKENS), **inputs})


def test_what_a_part_cannot_have():
    mask = torch.ones(2, TOKENS)
    mask[0, 0] = 0
    for match, inputs in {
        "tokens must be a multiple of 2, got 7": {"input_ids": cases.draw_tokens(7)},
        "logits_to_keep counts the outputs of a whole sequence": {"logits_to_keep": 1},
        "has no padding": {"attention_mask": mask},
    }.items():
        on_ranks(2, lambda group, match=match, inputs=inputs: refused(group, match, **inputs))
