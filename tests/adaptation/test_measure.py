"""Measurements that need no conversion."""

import numpy as np

from subquad.adaptation import ConvertConfig, measure
from subquad.evaluation.text import Evaluation, PositionLoss
from tests.adaptation.test_replace import decoder


def test_the_last_token_of_a_window_is_not_a_range_of_its_own():
    parts = (PositionLoss(1, 2, 4, 3.0), PositionLoss(2, 4, 8, 2.0), PositionLoss(4, 5, 4, 5.0))
    found = Evaluation(16, 2.5, 12.0, None, None, parts, 4, 4, 10, None, None, 0.1)
    assert measure._loss(found)["by_position"] == [
        {"start": 1, "stop": 2, "tokens": 4, "loss": 3.0},
        {"start": 2, "stop": 5, "tokens": 12, "loss": 3.0},
    ]


def test_decoding_is_measured_only_at_contexts_that_learned_positions_reach():
    config = ConvertConfig.from_dict({"measure": {"contexts": [64, 8, 32], "repeats": 1}})
    text = np.arange(20) % 31
    for model, contexts in ((decoder(), [8, 32, 64]), (decoder(position="learned", max_positions=40), [8, 32])):
        rows = measure.decoding(model, text, config)
        assert [row["context"] for row in rows] == contexts
        states = [row["state_bytes"] for row in rows]
        assert states == sorted(set(states)), "keys and values of more tokens"
        assert all(row["tokens_per_second"] > 0 for row in rows)
