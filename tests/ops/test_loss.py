import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad.layers.criterion import chunked_cross_entropy
from subquad.ops import linear_cross_entropy, loss
from subquad.testing import LOW_PRECISION, assert_exact, largest_allocation
from tests.ops.cases import ALONE, assert_all_in_budget, assert_all_same_maths, differentiated, normal

N, D, V = 23, 6, 11
REDUCTIONS = ("mean", "sum", "none")


@pytest.fixture(params=[loss.CHUNK_ENTRIES, 3 * V, 1], ids=["whole", "chunks", "row_by_row"])
def _path(monkeypatch, request):
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", request.param)


every_path = pytest.mark.usefixtures("_path")


def inputs_of(with_bias=True, dtype=torch.float64, seed=0):
    """Return h, weight and, if asked for, a bias."""
    shapes = [(N, D), (V, D), (V,)][: 2 + with_bias]
    return [normal(*shape, seed=seed + n, dtype=dtype) for n, shape in enumerate(shapes)]


def labels(ignored=(2, 7, 22), ignore_index=-100):
    y_N = torch.arange(N) * 5 % V
    y_N[list(ignored)] = ignore_index
    return y_N


def plain(h, weight, y, bias=None, **options):
    logits = F.linear(h, weight, bias)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y, **options)


def run(f, inputs, y, autocast=False, **options):
    """Return the loss, then its gradients."""

    def loss_of(h, weight, bias=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (f(h, weight, y, bias=bias, **options),)

    return differentiated(loss_of, inputs)


@every_path
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_it_is_torchs_cross_entropy_with_every_gradient(with_bias, reduction, ignore_index):
    options = {"reduction": reduction, "ignore_index": ignore_index}
    forms = linear_cross_entropy, plain
    actual, expected = (run(f, inputs_of(with_bias), labels(ignore_index=ignore_index), **options) for f in forms)
    assert_all_same_maths(actual, expected)


@every_path
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored_gives_zero_and_zero_gradients(reduction):
    for result in run(linear_cross_entropy, inputs_of(), labels(range(N)), reduction=reduction):
        assert_exact(result, torch.zeros_like(result))


@every_path
def test_no_tokens_give_zero():
    h, w, y = normal(0, D), normal(V, D), torch.zeros(0, dtype=torch.long)
    assert_exact(linear_cross_entropy(h, w, y), torch.zeros((), dtype=torch.float64))
    assert linear_cross_entropy(h, w, y, reduction="none").shape == (0,)


@every_path
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [*LOW_PRECISION, "autocast"])
def test_low_precision_stays_in_budget(dtype, with_bias):
    autocast = dtype == "autocast"
    # Not where the plain form's sum over 20 tokens happens to have no rounding error at all.
    inputs = inputs_of(with_bias, torch.float32 if autocast else dtype, seed=0 if autocast else 12)
    exact = run(plain, [x.double() for x in inputs], labels())
    expected, actual = (run(f, inputs, labels(), autocast) for f in (plain, linear_cross_entropy))
    assert [x.dtype for x in actual] == [torch.float32, *(x.dtype for x in inputs)]
    assert all(x.isfinite().all() for x in actual)
    assert_all_in_budget(actual, expected, exact, torch.bfloat16 if autocast else dtype)


@every_path
def test_extreme_logits_are_finite():
    h, w = inputs_of(with_bias=False, dtype=torch.float32)
    for result in run(linear_cross_entropy, [1e4 * h.sign(), w.sign()], labels()):
        assert result.isfinite().all()


def test_it_never_holds_all_logits(monkeypatch):
    tokens, words = 256, 1024
    h, w = (normal(n, D, dtype=torch.float32).requires_grad_() for n in (tokens, words))

    def backward():
        linear_cross_entropy(h, w, torch.arange(tokens)).backward()

    backward()
    logits = tokens * words * 4
    assert largest_allocation(backward) >= logits, "in one piece it holds them, and the measure sees that"
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", 16 * words)
    assert largest_allocation(backward) <= logits // 16


def test_the_choice_of_path_depends_on_shapes_only(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ENTRIES", N * V)

    def operations(tokens):
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(normal(tokens, D), normal(V, D), torch.zeros(tokens, dtype=torch.long))
        return [str(op) for op in counter.get_flop_counts().get("Global", {})]

    assert operations(N) == ["aten.mm"]
    assert operations(N + 1) == [], "beyond the limit it is one custom operation"


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operation_keeps_torchs_rules(with_bias):
    h, w, *bias = inputs_of(with_bias)
    rest = labels(), *(bias or [None])
    leaves = [x if x is None or not x.is_floating_point() else x.clone().requires_grad_() for x in (h, w, *rest)]
    torch.library.opcheck(loss._loss, (*leaves, -100))
    losses, lse = loss._loss(h, w, *rest, -100)
    for of_lse in (None, torch.ones_like(lse)):
        arguments = torch.ones_like(losses), of_lse, h, w, *rest, lse, -100
        torch.library.opcheck(loss._loss_backward, arguments, test_utils=ALONE)


@pytest.mark.parametrize("shapes", [
    ((N, D, 1), (V, D), (N,)), ((N, D), (V,), (N,)), ((N, D), (V, D + 1), (N,)), ((N, D), (V, D), (N + 1,)),
    ((N, D), (V, D), (N, 1)),
])  # fmt: skip
def test_shapes_that_do_not_agree_are_refused(shapes):
    h, w, y = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"h \[N, D\], weight \[V, D\] and labels \[N\] must agree, got \("):
        linear_cross_entropy(h, w, y.long())


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="unknown reduction 'avg'; valid: mean, none, sum"):
        linear_cross_entropy(*inputs_of(False), labels(), reduction="avg")


@every_path
@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_the_vocabulary_is_refused(label):
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        linear_cross_entropy(*inputs_of(False), labels((4,), label))


@pytest.mark.parametrize("labels", [torch.zeros(3), torch.zeros(3, dtype=torch.bool)], ids=["float", "bool"])
def test_labels_that_are_no_whole_numbers_are_refused(labels):
    h, weight = torch.ones(3, 2), torch.ones(4, 2)
    match = rf"labels must be whole numbers.*got {labels.dtype}"
    with pytest.raises(TypeError, match=match):
        linear_cross_entropy(h, weight, labels)
    with pytest.raises(TypeError, match=match):
        chunked_cross_entropy(lambda h: h @ weight.mT, h, labels, width=4)
