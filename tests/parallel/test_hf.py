"""`SubquadForCausalLM` on several ranks: each is given the whole sequences."""

import pytest
import torch

from subquad.hf import SubquadCache
from subquad.parallel import context_parallel
from subquad.testing import assert_same_maths
from subquad.testing.ranks import on_ranks
from tests.parallel import cases

TOKENS = 12


@pytest.mark.parametrize(("ranks", "items"), [(2, None), (3, 40)])
def test_the_mean_over_the_ranks_is_the_loss_of_one_process(ranks, items):
    def work(group):
        model, ids = cases.small_model().train(), cases.draw_tokens(TOKENS)
        labels = ids.clone()
        labels[:, 5:7] = -100  # on both sides of a cut
        whole = model(ids, labels=labels, num_items_in_batch=items).loss
        _, expected = cases.gradients(model, whole)
        model.model.decoder.gradient_checkpointing = True
        with context_parallel(group):
            loss = model(ids, labels=labels, num_items_in_batch=items).loss
        _, actual = cases.gradients(model, loss)
        means = {name: value / group.size for name, value in {"loss": loss.detach(), **actual}.items()}
        cases.compare_summed(group, means, {"loss": whole.detach(), **expected})

    on_ranks(ranks, work)


def test_one_process_continues_from_the_cache_of_a_group():
    def work(group):
        model, ids = cases.small_model().eval(), cases.draw_tokens(TOKENS + 3)
        whole, cache = model(ids).logits, SubquadCache()
        with torch.no_grad(), context_parallel(group):
            part = model(ids[:, :TOKENS], attention_mask=torch.ones(2, TOKENS), past_key_values=cache)
        assert cache.get_seq_length() == TOKENS
        after = model(ids[:, TOKENS:], past_key_values=cache).logits
        assert_same_maths(part.logits, group.part(whole[:, :TOKENS]), "logits of the part")
        assert_same_maths(after, whole[:, TOKENS:], "logits after it")

    on_ranks(2, work)


@pytest.mark.parametrize(("inputs", "match"), [
    ({"input_ids": cases.draw_tokens(7)}, "tokens must be a multiple of 2, got 7"),
    ({"logits_to_keep": 1}, "logits_to_keep counts the outputs of a whole sequence"),
    ({"attention_mask": (torch.arange(TOKENS) > 0).expand(2, -1)}, "has no padding"),
])  # fmt: skip
def test_unsupported_inputs_are_refused(inputs, match):
    def work(group):
        with context_parallel(group), pytest.raises(ValueError, match=match):
            cases.small_model()(**{"input_ids": cases.draw_tokens(TOKENS), **inputs})

    on_ranks(2, work)
