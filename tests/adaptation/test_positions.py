"""The loss by position (subquad/evaluation/positions.py), on which the report of an extension stands."""

from collections import Counter
from types import SimpleNamespace

import torch

from subquad.evaluation.positions import _batches, loss_by_position, plan_positions
from subquad.testing import assert_same_maths


class Positions(torch.nn.Linear):
    """Is the surer of the next token, one above the last, the more came before it."""

    config = SimpleNamespace(vocab_size=7)

    def forward(self, input_ids, use_cache):
        right = torch.nn.functional.one_hot((input_ids + 1) % 7, 7).double()
        steps = torch.arange(1, input_ids.shape[1] + 1)[:, None].double()
        return SimpleNamespace(logits=right * steps.log1p())


def test_the_loss_of_a_range_is_the_mean_over_its_positions():
    plan = plan_positions(400, own=8, length=40, tokens=30, stretches=3)
    assert (plan.edges, plan.step, plan.stretch, len(plan.starts)) == ((4, 8, 16, 32, 40), 4, 8, 3)
    found = loss_by_position(Positions(1, 1), (torch.arange(400) % 7).numpy(), plan)
    assert [entry.predictions for entry in found] == [24, 24, 48, 96, 48]
    for entry in found:
        positions = torch.arange(entry.first, entry.last + 1).double()
        logits = torch.zeros(len(positions), 7).double()
        logits[:, 0] = positions.log1p()
        expected = -logits.log_softmax(-1)[:, 0].mean()
        assert_same_maths(torch.tensor(entry.loss, dtype=torch.float64), expected)


def test_each_range_predicts_the_same_tokens_equally_often():
    plan = plan_positions(400, own=8, length=40, tokens=30, stretches=3)
    predicted = {last: Counter() for last in plan.edges}
    for batch in _batches(plan, most=4):
        assert len({stop - start for start, stop, *_ in batch}) == 1
        for start, stop, skip, stretch in batch:
            first = plan.starts[stretch] + 40
            assert start + skip + 1 >= first, "predicts tokens of its stretch alone"
            assert stop < first + plan.stretch
            for context in range(skip + 1, stop - start + 1):
                last = next(last for last in plan.edges if context <= last)
                predicted[last][start + context] += 1
    wanted = [t for start in plan.starts for t in range(start + 40, start + 40 + plan.stretch)]
    for first, last in zip((0, *plan.edges), plan.edges, strict=False):
        assert predicted[last] == Counter(dict.fromkeys(wanted, (last - first) // plan.step))
