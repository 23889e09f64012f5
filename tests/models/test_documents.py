"""The decoder on packed documents: each as if it were alone."""

import pytest
import torch

from subquad.attention import mechanism, names
from subquad.models import Decoder, DecoderConfig
from subquad.models.decoder import IGNORED, next_tokens
from subquad.testing import assert_exact, assert_same_maths

SMALL = {"llp": {"segment": 6}, "window": {"width": 4}, "shifted": {"group": 4}, "latte_macchiato": {"width": 4}}
VOCABULARY = 23
IDS = torch.tensor([[3] * 8 + [-1] * 2 + [3] * 2 + [9] + [3] * 7, [-1] * 2 + [7] * 4 + [0] * 11 + [-1] * 3])
DOCUMENTS = (
    (0, [*range(8), 10, 11]),
    (0, [12]),
    (0, [*range(13, 20)]),
    (1, [*range(2, 6)]),
    (1, [*range(6, 17)]),
)


def tiny(attention, **fields):
    rotates = any(mechanism(name).rotates for name in ([attention] if isinstance(attention, str) else attention))
    shape = {"vocab_size": VOCABULARY, "dim": 16, "num_layers": 2, "num_heads": 2, "options": SMALL, "init_std": 0.3}
    shape["position"] = "rope" if rotates else "sinusoidal"
    torch.manual_seed(0)
    return Decoder(DecoderConfig(attention=attention, **(shape | fields))).double()


def some_tokens(tokens=20):
    return torch.randint(VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(1))


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)


def assert_as_alone(model):
    """Logits, and the loss of the next token with every gradient."""
    tokens = some_tokens()
    logits = model(tokens, doc_ids=IDS)[0]
    for b, places in DOCUMENTS:
        assert_same_maths(logits[b : b + 1, places], model(tokens[b : b + 1, places])[0], f"document {places}")
    assert_exact(logits[IDS == -1], torch.zeros_like(logits[IDS == -1]), "logits at padding")
    packed = model.loss(tokens, next_tokens(tokens, None, IDS), doc_ids=IDS, reduction="sum")
    each = [tokens[b : b + 1, places] for b, places in DOCUMENTS]
    alone = torch.stack([model.loss(own, next_tokens(own, None), reduction="sum") for own in each]).sum()
    assert_same_maths(packed, alone, "loss")
    for (name, _), actual, expected in zip(
        model.named_parameters(), gradients(model, packed), gradients(model, alone), strict=True
    ):
        assert_same_maths(actual, expected, f"gradient of {name}")


@pytest.mark.parametrize("name", [name for name in names() if "causal" in mechanism(name).forms])
def test_packed_documents_are_as_if_alone(name):
    assert_as_alone(tiny(name).train())


@pytest.mark.parametrize(
    "fields",
    [
        {"position": "learned", "max_positions": 11},
        {"position": "sinusoidal"},
        {"position": "none"},
        {"loops": 2, "loop_loss": "all"},
        {"attention": ["latte", "window"], "lookup": 8, "tie_embeddings": False},
        {"attention": ["luna", "full"], "position": "learned"},
    ],
    ids=str,
)
def test_positions_loops_and_hybrids(fields):
    assert_as_alone(tiny(**({"attention": "llp"} | fields)).train())


def test_gradients_are_the_same_with_checkpointing():
    model = tiny(["luna", "llp"]).train()
    model.gradient_checkpointing = True
    assert_as_alone(model)


def test_the_state_is_that_of_the_last_documents():
    model, tokens, more = tiny(["latte", "window"], position="learned", max_positions=16), some_tokens(), some_tokens(5)
    state = model(tokens, doc_ids=IDS)[1]
    assert state.seen.tolist() == [7, 11]
    after = model(more, state)[0]
    for row, (_, places) in enumerate((DOCUMENTS[2], DOCUMENTS[4])):
        whole = model(torch.cat([tokens[row, places], more[row]])[None])[0]
        assert_same_maths(after[row : row + 1], whole[:, len(places) :], f"row {row}")


def test_what_follows_a_document_is_not_its_label():
    model, tokens = tiny("llp"), some_tokens()
    labels = tokens.roll(-1, 1)
    losses = model.loss(tokens, labels, doc_ids=IDS, reduction="none")
    ends = torch.zeros_like(IDS, dtype=torch.bool)
    for b, t in ((0, 11), (0, 12), (1, 5)):
        ends[b, t] = True
    assert_exact(losses == 0, ends | (IDS == -1))
    masked = model.loss(tokens, labels, IDS != -1, IDS.masked_fill(IDS == -1, 4), reduction="none")
    assert_exact(masked, losses, "padding by the mask")


def test_next_tokens_stay_in_their_documents():
    tokens = torch.arange(20).expand(2, 20)
    expected = torch.full((2, 20), IGNORED)
    for b, places in DOCUMENTS:
        expected[b, places[:-1]] = torch.tensor(places[1:], dtype=torch.int64)
    assert_exact(next_tokens(tokens, None, IDS), expected)
    assert_exact(next_tokens(tokens, IDS != -1, IDS.masked_fill(IDS == -1, 4)), expected)


def test_packed_documents_have_no_state_before_them():
    model, tokens = tiny("llp"), some_tokens()
    with pytest.raises(ValueError, match="doc_ids begin new documents, and these have no state before them"):
        model(tokens, model(tokens)[1], doc_ids=IDS)


def test_a_document_beyond_a_learned_table():
    with pytest.raises(ValueError, match="position 10 is outside of the learned table of 10 positions"):
        tiny("llp", position="learned", max_positions=10)(some_tokens(), doc_ids=IDS)
