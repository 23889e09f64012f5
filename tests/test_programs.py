"""Programs from other people's situations, against the plain call: PyTorch's tools around a layer, a model, a state."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn import functional as F

from subquad import State, attention
from subquad.hf import SubquadForCausalLM
from subquad.models import Decoder
from subquad.ops.backends import use_backend
from subquad.testing import assert_exact, assert_same_maths
from tests.models.small import VOCABULARY, decoder

TOKENS = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
HYBRID = ["gated_delta_net", "window"]


def loss_of(model: Decoder, weights: dict[str, Tensor], tokens_T: Tensor) -> Tensor:
    logits = functional_call(model, weights, (tokens_T[None, :-1],))[0]
    return F.cross_entropy(logits[0], tokens_T[1:])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample_are_clipped_and_added():
    """Differentially private training: the gradient of each row, of its own length."""
    model = decoder(HYBRID)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(lambda weights, row: loss_of(model, weights, row)), (None, 0))(weights, TOKENS)
    for i, row in enumerate(TOKENS):
        leaves = {name: p.clone().requires_grad_() for name, p in weights.items()}
        for name, g in zip(
            leaves, torch.autograd.grad(loss_of(model, leaves, row), list(leaves.values())), strict=True
        ):
            assert_same_maths(each[name][i], g, f"row {i}, {name}")


def test_a_product_with_the_hessian_forward_over_backward():
    """Influence functions, curvature: no second backward pass, and no backend asked for."""
    model = decoder("elita")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in weights.items()}
    product = jvp(grad(lambda weights: loss_of(model, weights, TOKENS[0])), (weights,), (direction,))[1]
    leaves = {name: p.clone().requires_grad_() for name, p in weights.items()}
    with use_backend("reference"):
        first = torch.autograd.grad(loss_of(model, leaves, TOKENS[0]), list(leaves.values()), create_graph=True)
        along = sum((g * direction[name]).sum() for name, g in zip(leaves, first, strict=True))
        second = torch.autograd.grad(along, list(leaves.values()))
    for name, h in zip(leaves, second, strict=True):
        assert_same_maths(product[name], h, name)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_ensemble_decodes_with_a_state_for_each_member():
    members = [attention.build("llp", dim=8, num_heads=2, segment=4, rope=True).double().eval() for _ in range(3)]
    weights, buffers = stack_module_state(members)
    empty = copy.deepcopy(members[0]).to("meta")

    def step(weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
        return functional_call(empty, (weights, buffers), (x, state))

    with torch.no_grad():
        x = torch.randn(2, 8, 8, dtype=torch.double)
        alone = [member(x[:, :7])[1] for member in members]
        together = torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *alone)
        y, after = vmap(step, (0, 0, None, 0))(weights, buffers, x[:, 7:], together)
        y_next, _ = vmap(step, (0, 0, None, 0))(weights, buffers, x[:, 7:], after)
        for i, member in enumerate(members):
            expected, state = member(x[:, 7:], alone[i])
            assert_same_maths(y[i], expected, f"member {i}")
            assert_same_maths(y_next[i], member(x[:, 7:], state)[0], f"member {i}, one token on")


def test_a_stream_is_trained_piece_by_piece_and_taken_up_from_a_file():
    """Truncated backpropagation: the state goes on without its graph, and into one file with weights and optimizer."""

    def trained(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer, state: State | None) -> State | None:
        for i in steps:
            piece = TOKENS[:, 2 * i : 2 * i + 3]
            logits, state = model(piece[:, :-1], state)
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten()).backward()
            optimizer.step()
            state = state.detach()
        return state

    torch.manual_seed(0)
    model = decoder(HYBRID)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, file = trained(range(2), model, optimizer, None), io.BytesIO()
    torch.save({"model": model.state_dict(), "state": state}, file)
    trained(range(2, 4), model, optimizer, state)
    file.seek(0)
    saved, again = torch.load(file, weights_only=True), decoder(HYBRID)
    again.load_state_dict(saved["model"])
    trained(range(2, 4), again, torch.optim.SGD(again.parameters(), 0.1), saved["state"])
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert_exact(q, p, name)


@torch.no_grad()
def test_beams_in_an_own_loop_through_an_exported_model():
    """The exported step, read from a file, takes the states that the loop reorders."""
    model = decoder(HYBRID)
    logits, state = model(TOKENS)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (TOKENS[:, :1], state)), file)
    file.seek(0)
    step, expected_state = torch.export.load(file).module(), state
    for order in ([2, 0, 1], [1, 1, 0], [0, 2, 2]):
        state, expected_state = state.select(order), expected_state.select(order)
        token = logits[order, -1:].argmax(-1)
        logits, state = step(token, state)
        expected, expected_state = model(token, expected_state)
        assert_same_maths(logits, expected, "logits")
        assert state.seen == expected_state.seen


@torch.no_grad()
def test_a_transformers_model_is_exported_with_its_cache():
    model = SubquadForCausalLM.around(decoder(HYBRID)).eval()
    cache = model(TOKENS, use_cache=True).past_key_values
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    arguments = {"input_ids": TOKENS[:, :1], "past_key_values": copy.deepcopy(cache), "use_cache": True}
    step = torch.export.export(model, (), arguments).module()
    for t in range(3):
        out = step(input_ids=TOKENS[:, t : t + 1], past_key_values=cache, use_cache=True)
        expected = model(TOKENS[:, t : t + 1], past_key_values=kept, use_cache=True)
        assert_same_maths(out.logits, expected.logits, f"token {t}")
        cache, kept = out.past_key_values, expected.past_key_values
        assert cache.get_seq_length() == kept.get_seq_length() == TOKENS.shape[1] + t + 1
