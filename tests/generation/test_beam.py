"""Beam search, compared with transformers' and with all continuations."""

import itertools

import pytest
import torch

from subquad.generation import beam_search, generate
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_same_maths
from tests.generation.models import MECHANISMS, make, numbers

PROMPT = numbers(7)
FEW = [
    ("latte", (), 1, 1.0), ("latte", (7,), 2, 0.5), ("latte", (20, 12), 4, 1.0), ("latte", (20, 12), 2, 2.0),
    ("full", (), 4, 0.5), ("llp", (3,), 3, 1.0), ("perceiver_ar self exact", (), 3, 1.0),
]  # fmt: skip
ALL = itertools.product(MECHANISMS, [(), (7,), (20, 12)], [3], [1.0, 0.5, 2.0])


@pytest.mark.parametrize(
    ("name", "stops", "beams", "length_penalty"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)]
)
def test_beams_are_those_of_transformers(name, stops, beams, length_penalty):
    model, prompt = make(name), torch.tensor([PROMPT])
    wrapped = SubquadForCausalLM(SubquadConfig.from_decoder(model.config)).double().eval()
    wrapped.decoder.load_state_dict(model.state_dict())
    how = {"num_beams": beams, "num_return_sequences": beams, "length_penalty": length_penalty} if beams > 1 else {}
    ends = {"eos_token_id": list(stops) or None, "pad_token_id": 1, "do_sample": False}
    theirs = wrapped.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, **ends, **how)
    ours = beam_search(model, PROMPT, beams=beams, max_new_tokens=10, stop_tokens=stops, length_penalty=length_penalty)
    assert len(ours) == beams
    for beam, row in zip(ours, theirs[:, len(PROMPT) :].tolist(), strict=True):
        assert row[: len(beam.tokens)] == beam.tokens
        assert set(row[len(beam.tokens) :]) <= {1}


def test_enough_beams_find_the_best_of_all_continuations():
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=4, dim=8, num_layers=1, num_heads=2, attention="full", init_std=1.0)
    model = Decoder(config).double().eval()
    prompt, scores = [1, 2], {}
    for tokens in itertools.product(range(4), repeat=3):
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            log_p = model(ids)[0][0, 1:-1].log_softmax(-1)
        scores[tokens] = log_p.gather(1, ids[0, 2:, None]).sum().item() / 3
    best = sorted(scores, key=lambda tokens: -scores[tokens])
    found = beam_search(model, prompt, beams=64, max_new_tokens=3)
    assert [tuple(beam.tokens) for beam in found] == best
    ours, theirs = ([beam.score for beam in found], [scores[tokens] for tokens in best])
    assert_same_maths(torch.tensor(ours).double(), torch.tensor(theirs).double())


def test_a_state_may_come_before_the_prompt():
    model = make("llp")
    state = generate(model, PROMPT[:4], max_new_tokens=0).read_all()
    parted = beam_search(model, PROMPT[4:], beams=3, max_new_tokens=8, state=state)
    whole = beam_search(model, PROMPT, beams=3, max_new_tokens=8)
    assert [beam.tokens for beam in parted] == [beam.tokens for beam in whole]


@pytest.mark.parametrize(("options", "weight", "match"), [
    ({"beams": 0}, 1.0, "beams must be at least 1, got 0"),
    ({"length_penalty": float("nan")}, 1.0, "length_penalty must be finite, got nan"),
    ({}, float("nan"), "the model's logits must be finite"),
])  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(options, weight, match):
    model = make("latte")
    assert beam_search(model, PROMPT, max_new_tokens=0)[0].tokens == []
    with torch.no_grad():
        model.norm.weight.fill_(weight)
    with pytest.raises(ValueError, match=match):
        beam_search(model, PROMPT, **options)
