"""The decoder on packed documents: each is read and scored as if it were alone."""

import pytest
import torch

from subquad.models.decoder import IGNORED, next_tokens
from subquad.testing import assert_exact, assert_same_maths
from tests.models import small

IDS = torch.tensor([[3] * 8 + [-1] * 2 + [3] * 2 + [9] + [3] * 7, [-1] * 2 + [7] * 4 + [0] * 11 + [-1] * 3])
DOCUMENTS = ((0, [*range(8), 10, 11]), (0, [12]), (0, [*range(13, 20)]), (1, [*range(2, 6)]), (1, [*range(6, 17)]))
TOKENS = small.tokens(2, 20)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("fields", [
    *(pytest.param({"attention": p.id}, id=p.id, marks=p.marks) for p in small.mechanisms()),
    {"position": "learned", "max_positions": 11}, {"position": "sinusoidal"}, {"position": "none"},
    {"loops": 2, "loop_loss": "all"}, {"norm_position": "post", "feedforward": "relu_squared"},
    {"attention": ["latte", "window"], "lookup": 8, "tie_embeddings": False},
    {"attention": ["luna", "full"], "position": "learned", "max_positions": 20},
], ids=str)  # fmt: skip
def test_packed_documents_are_as_if_alone(fields, checkpointing):
    """Logits, and the loss of the next token with every gradient."""
    model = small.decoder(**{"attention": "llp"} | fields).train()
    model.gradient_checkpointing = checkpointing
    logits = model(TOKENS, doc_ids=IDS)[0]
    for b, places in DOCUMENTS:
        assert_same_maths(logits[b : b + 1, places], model(TOKENS[b : b + 1, places])[0], f"document {places}")
    assert not logits[IDS == -1].any()
    packed = model.loss(TOKENS, next_tokens(TOKENS, None, IDS), doc_ids=IDS, reduction="sum")
    each = [TOKENS[b : b + 1, places] for b, places in DOCUMENTS]
    alone = torch.stack([model.loss(own, next_tokens(own, None), reduction="sum") for own in each]).sum()
    assert_same_maths(packed, alone, "loss")
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = (torch.autograd.grad(nats, parameters, materialize_grads=True) for nats in (packed, alone))
    for name, actual, expected in zip(names, *gradients, strict=True):
        assert_same_maths(actual, expected, f"gradient of {name}")


def test_the_state_is_that_of_each_rows_last_document():
    model, more = small.decoder(["latte", "window"], position="learned", max_positions=16), small.tokens(2, 5)
    state = model(TOKENS, doc_ids=IDS)[1]
    assert state.seen.tolist() == [7, 11]
    after = model(more, state)[0]
    for row, (_, places) in enumerate((DOCUMENTS[2], DOCUMENTS[4])):
        whole = model(torch.cat([TOKENS[row, places], more[row]])[None])[0]
        assert_same_maths(after[row : row + 1], whole[:, len(places) :], f"row {row}")


def test_the_first_token_of_a_document_is_no_label_of_the_one_before():
    model, labels = small.decoder("llp"), TOKENS.roll(-1, 1)
    losses = model.loss(TOKENS, labels, doc_ids=IDS, reduction="none")
    ends = torch.zeros_like(IDS, dtype=torch.bool)
    ends[[0, 0, 1], [11, 12, 5]] = True
    assert_exact(losses == 0, ends | (IDS == -1))
    masked = model.loss(TOKENS, labels, IDS != -1, IDS.masked_fill(IDS == -1, 4), reduction="none")
    assert_exact(masked, losses, "padding by the mask")


def test_next_tokens_skip_padding_and_stay_in_their_documents():
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert next_tokens(tokens, None).tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]
    mask = torch.tensor([[True, False, True, True], [False, False, True, False]])
    assert next_tokens(tokens, mask).tolist() == [[3, -100, 4, -100], [-100, -100, -100, -100]]
    tokens, expected = torch.arange(20).expand(2, 20), torch.full((2, 20), IGNORED)
    for b, places in DOCUMENTS:
        expected[b, places[:-1]] = torch.tensor(places[1:], dtype=torch.int64)
    assert_exact(next_tokens(tokens, None, IDS), expected)
    assert_exact(next_tokens(tokens, IDS != -1, IDS.masked_fill(IDS == -1, 4)), expected)


def test_documents_that_do_not_fit_are_refused():
    model = small.decoder("llp", position="learned", max_positions=10)
    with pytest.raises(ValueError, match="doc_ids begin new documents, and these have no state before them"):
        model(TOKENS, model(TOKENS[:, :5])[1], doc_ids=IDS)
    with pytest.raises(ValueError, match="position 10 is outside of the learned table of 10 positions"):
        model(TOKENS, doc_ids=IDS)
